"""Tensor parallelism of transformers' own classes, by the plan that transformers has for each.

Between modules go plain tensors, whole on every rank: no sequence parallelism. What the plan does
not name every rank has whole and computes alike, so its gradient is the same on all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elastic_trainer.model.decoder import ModelError
from elastic_trainer.model.transformers_model import TransformersModel
from elastic_trainer.parallel.tensor import HEADS
from elastic_trainer.worker.torch_private import local_of

_WHOLE = Replicate()
_STYLES: Final[Mapping[str, tuple[type[nn.Module], Callable[[], ParallelStyle] | None]]] = {
    "colwise": (nn.Linear, ColwiseParallel),
    "colwise_gather_output": (nn.Linear, lambda: ColwiseParallel(output_layouts=_WHOLE)),
    "colwise_rep": (nn.Linear, lambda: ColwiseParallel(output_layouts=_WHOLE)),
    "rowwise": (nn.Linear, RowwiseParallel),
    "rowwise_split_input": (nn.Linear, lambda: RowwiseParallel(input_layouts=_WHOLE)),
    "rowwise_rep": (nn.Linear, lambda: RowwiseParallel(input_layouts=_WHOLE)),
    "embedding_rowwise": (nn.Embedding, lambda: RowwiseParallel(input_layouts=_WHOLE)),
    # Norms of this rank's heads: as DTensors their gradients are summed over tp.
    "replicated_with_grad_allreduce": (
        nn.Module,
        lambda: SequenceParallel(sequence_dim=HEADS, use_local_output=True),
    ),
    "replicate": (nn.Module, None),
}
"""Style of transformers.distributed.tensor_parallel -> of which module, and torch's."""
ALIKE: Final = 1e-3
"""Relative difference of gradient norms that rounding may make on GPUs."""


def apply_plan(model: TransformersModel, mesh: DeviceMesh) -> None:
    """Cut the parameters that transformers' plan names over `mesh`; logits stay whole.

    Raises:
        ModelError: HF335, there is no plan, or one with a style that is not known here.
    """
    modules = dict(model.theirs.named_modules())
    plan = _plan_of(model, modules)
    for name, style in plan.items():
        kind, made = _STYLES.get(style, (None, None))
        if kind is None or not isinstance(modules.get(name), kind):
            raise ModelError(
                "HF335",
                f"transformers' plan cuts {name} as {style}, which is not done here: tp 1",
            )
        if made is not None:
            parallelize_module(modules[name], mesh, made())
    model.tie()  # of two tables that were cut alike


def _plan_of(model: TransformersModel, modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return name of a module or parameter -> style.

    Tied tables are cut alike, or not at all: the row of padding has no gradient, and torch 2.13
    takes it for a row of each rank's part.
    """
    known: dict[str, str] = model.theirs.tp_plan or {}
    names = [*modules, *(name for name, _ in model.theirs.named_parameters())]
    plan = {
        name: style
        for pattern, style in known.items()
        for name in names
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name)
    }
    if not plan:
        raise ModelError("HF335", f"{type(model.theirs).__name__} has no plan for tp: tp 1")
    name_of = {id(module): name for name, module in modules.items()}
    tables = (model.theirs.get_input_embeddings(), model.theirs.get_output_embeddings())
    embedding, head = (name_of.get(id(table)) for table in tables)
    tied = head is not None and tables[0].weight is tables[1].weight
    if tied and plan.get(head) == "colwise_gather_output":
        plan[embedding] = "embedding_rowwise"
    if embedding in plan and getattr(tables[0], "padding_idx", None) is not None:
        del plan[embedding]
        if tied:
            plan.pop(head, None)
    return plan


def check_gradients(model: TransformersModel, mesh: DeviceMesh) -> None:
    """See that ranks have the same gradients of what is not cut; collective.

    Else the plan lacks a parameter: one of which each rank has seen its own part of the heads.

    Raises:
        ModelError: HF335.
    """
    whole = {
        name: local_of(param.grad)
        for name, param in model.theirs.named_parameters()
        if param.grad is not None and not _is_cut(param)
    }
    if not whole:
        return
    norms = torch.stack([grad.double().norm() for grad in whole.values()])
    every = [torch.empty_like(norms) for _ in range(mesh.size())]
    dist.all_gather(every, norms, group=mesh.get_group())
    seen = torch.stack(every)
    apart = (seen.amax(0) - seen.amin(0)) > ALIKE * seen.amax(0)
    if apart.any():
        name = list(whole)[int(apart.nonzero()[0])]
        raise ModelError(
            "HF335",
            f"with tp each rank has another gradient of {name}, of which transformers' plan says "
            "nothing: tp 1",
        )


def _is_cut(param: Any) -> bool:
    names = param.device_mesh.mesh_dim_names if isinstance(param, DTensor) else ()
    return "tp" in (names or ())
