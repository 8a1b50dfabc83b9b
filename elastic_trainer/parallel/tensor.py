"""Tensor parallelism with sequence parallel and loss parallel, as DTensor plans.

Megatron's cut (arXiv 1909.08053, 2205.05198): the first projection of a branch by
columns, the second by rows; between branches activations are split along the sequence,
so norms and residuals work on their part of it. Logits stay split over the vocabulary.
"""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.data import IGNORED
from elastic_trainer.model import Block, Llama

SEQUENCE = 1
"""The dim of activations that is split between branches."""
warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
# Said of the head's local logits, which nobody changes in place.


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Cut every parameter of `model` over `mesh`; parts that are nn.Identity are passed over.

    Stages of a pipeline exchange their own part of the sequence: plain tensors
    (B, T / tp, D). The head returns this rank's part of the vocabulary (B, T, V / tp).
    """
    outer: dict[str, ParallelStyle] = {}
    if isinstance(model.embedding, nn.Embedding):
        outer["embedding"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(SEQUENCE)
        )
    if isinstance(model.head, nn.Linear):
        outer["norm"] = SequenceParallel(sequence_dim=SEQUENCE)
        outer["head"] = ColwiseParallel(input_layouts=Shard(SEQUENCE))
    tied = model.shape.tie_embeddings and len(outer) == 3
    if outer:
        parallelize_module(model, mesh, outer)
    if "embedding" in outer:
        model.embedding.register_forward_hook(_arrived)
    if tied:  # each was cut by itself, by rows of the vocabulary both
        model.head.weight = model.embedding.weight
    for block in model.layers.values():
        _cut_block(block, mesh)


def _arrived(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Return activations that are there, not on their way.

    A compiled block doubles the gradient of an input that is still being reduced
    (torch 2.13, without an error).
    """
    return output.clone()


def _cut_block(block: Block, mesh: DeviceMesh) -> None:
    whole_sequence = {"input_layouts": (Shard(SEQUENCE),), "desired_input_layouts": (Replicate(),)}
    parallelize_module(
        block,
        mesh,
        {
            "attention_norm": SequenceParallel(sequence_dim=SEQUENCE),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(SEQUENCE), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
            "ffn_norm": SequenceParallel(sequence_dim=SEQUENCE),
            "ffn": PrepareModuleInput(**whole_sequence),
            "ffn.w1": ColwiseParallel(),
            "ffn.w3": ColwiseParallel(),
            "ffn.w2": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        },
    )


def token_loss_sum(logits: Tensor, targets: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the sum of the tokens' cross-entropies, fp32 scalar; IGNORED targets count nothing.

    Args:
        logits: (B, T, V), or this rank's (B, T, V / tp).
        targets: (B, T) int64.
        mesh: the tensor-parallel one; backward then also belongs inside `loss_scope`.
    """
    rows = logits.flatten(0, 1).float()
    if mesh is None:
        return F.cross_entropy(rows, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    whole = DTensor.from_local(rows, mesh, [Shard(1)], run_check=False)
    loss = F.cross_entropy(whole, targets.flatten(), reduction="sum", ignore_index=IGNORED)
    assert isinstance(loss, DTensor)
    return loss.to_local()


def loss_scope(mesh: DeviceMesh | None) -> AbstractContextManager[None]:
    """Return the context that `token_loss_sum` and its backward need."""
    return loss_parallel() if mesh is not None else nullcontext()
