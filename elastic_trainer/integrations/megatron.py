"""A loop on Megatron-core keeps its state in memory and loses no step: two lines.

    from holdfast.integrations.megatron import Steps

    for step in (steps := Steps(1000, model, optimizer, scheduler)):
        ...
        steps.loss = loss

after `initialize_model_parallel` and the model, in place of `for step in range(1000)`. Tested with
megatron-core 0.16.1 on CPU, tensor and data parallel. Without an agent nothing is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from elastic_trainer import api
from elastic_trainer.integrations.steps import seed_step


class Steps:
    """The steps that are left, from 0 or the first that is not kept; after each its state is.

    Where the job is asked to stop, the process ends with code 91 between two steps. Random
    numbers of a step are a function of the seed, the step and the data-parallel rank. The batch
    over all ranks is the script's: Megatron's count of micro-batches keeps it.

    Args:
        steps: of the whole training.
        model: as built, or a list of it.
        optimizer: of its parameters, of torch.
        scheduler: with a state dict, as Megatron's OptimizerParamScheduler.
        seed: of random numbers.
        options: as of `holdfast.start`: name, every_s, every_steps, keep, memory_every_steps.

    Raises:
        ApiError: HF536, it is parallel in a way, or optimized by what, this does not cover.
    """

    def __init__(
        self,
        steps: int,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        scheduler: Stateful | None = None,
        *,
        seed: int = 0,
        **options: Any,
    ) -> None:
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        _refuse_what_is_not_covered(chunks, optimizer)
        self._steps, self._seed = steps, seed
        self.loss: torch.Tensor | float | None = None
        """Of the step, for the record; that of rank 0 counts."""
        self._run = run = api.start(**options)
        kept: dict[str, Stateful] = {"megatron": _Split(chunks[0])}
        if scheduler is not None:
            kept["scheduler"] = scheduler
        self.done = run.restore(chunks[0], optimizer, kept, sharding=_Sharding(chunks[0]))
        """Completed steps."""

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each step that is left, counted from 0."""
        replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
        while self.done < self._steps and not self._run.finished:
            if self._run.managed:
                seed_step(self._seed, self.done, replica)
            self.loss = None
            yield self.done
            self.done += 1
            loss = None if self.loss is None else float(self.loss)
            if self._run.completed(self.done, loss=loss):
                self._run.leave()
        self._run.finish(self.done)
        if self._run.managed:
            seed_step(self._seed, self.done)  # on all ranks alike again


class _Sharding:
    """Says which tensor a parameter is this rank's part of, as Megatron has noted on it."""

    def __init__(self, model: nn.Module) -> None:
        self._params = dict(model.named_parameters())
        ranks = torch.arange(torch.distributed.get_world_size())
        self._mesh = DeviceMesh.from_group(
            [
                parallel_state.get_data_parallel_group(with_context_parallel=True),
                parallel_state.get_tensor_model_parallel_group(),
            ],
            next(iter(self._params.values())).device.type,
            mesh=ranks.view(-1, parallel_state.get_tensor_model_parallel_world_size()),
            mesh_dim_names=("dp", "tp"),
        )

    def __call__(self, name: str) -> tuple[DeviceMesh, Sequence[Placement]] | None:
        param = self._params.get(name)
        if param is None or not getattr(param, "tensor_model_parallel", False):
            return None
        return self._mesh, [Replicate(), Shard(param.partition_dim)]


class _Split:
    """Keeps the number of parts of the state, which is taken back only where it fits."""

    def __init__(self, model: nn.Module) -> None:
        configs = (getattr(module, "config", None) for module in model.modules())
        self._gated = any(getattr(config, "gated_linear_unit", False) for config in configs)

    def state_dict(self) -> dict[str, int]:
        return {"tp": parallel_state.get_tensor_model_parallel_world_size()}

    def load_state_dict(self, kept: dict[str, int]) -> None:
        now = self.state_dict()
        if self._gated and kept != now:
            # Each part has its gate before its other half: put together they are not the whole.
            raise ValueError(
                f"an MLP with a gate is kept in {kept['tp']} parts and wanted in {now['tp']}: "
                "keep the tensor parallel size"
            )


def _refuse_what_is_not_covered(
    chunks: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    degrees = {
        "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert": parallel_state.get_expert_model_parallel_world_size(),
        "virtual pipeline": len(chunks),
    }
    for name, degree in degrees.items():
        if degree > 1:
            raise api.ApiError(
                f"HF536 {name} parallel by {degree}: tensor, context and data parallel are kept; "
                "use the checkpoints of Megatron"
            )
    known = {id(param) for chunk in chunks for param in chunk.parameters()}
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ()
    params = [param for group in groups for param in group["params"]]
    if not params or any(id(param) not in known for param in params):
        raise api.ApiError(
            f"HF536 {type(optimizer).__name__} is not an optimizer of torch over the model's own "
            "parameters: Megatron's mixed-precision and distributed optimizers are not kept"
        )
