"""Tensor parallelism with sequence parallel and loss parallel, as DTensor plans.

Megatron's cut (arXiv 1909.08053, 2205.05198): the first projection of a branch by
columns, the second by rows; between branches activations are split along the sequence,
so norms and residuals work on their part of it. Logits stay split over the vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from elastic_trainer.data import IGNORED
from elastic_trainer.model.decoder import Decoder, ModelError
from elastic_trainer.worker.torch_private import (
    all_gather_single_autograd,
    all_reduce,
    reduce_scatter_single_autograd,
)

SEQUENCE = 1
"""The dim of activations that is split between branches."""
HEADS = 1
"""The dim of queries and keys (B, H, T, E) that is split inside attention."""
LOSS_ROWS = 1024
"""Rows of logits that the loss has in fp32 at once: 0.5 GiB of Llama 3's vocabulary."""
warnings.filterwarnings("ignore", r"FSDP2-wrapped module .* returned a view tensor", UserWarning)
# Said of the head's local logits, which nobody changes in place.


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut every parameter of `model` over `mesh`; parts that are nn.Identity are passed over.

    Stages of a pipeline exchange their own part of the sequence: plain tensors
    (B, T / tp, D). The head returns this rank's part of the vocabulary (B, T, V / tp).

    Raises:
        ModelError: HF331 the plan leaves out a parameter, or has an unknown word.
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
        _cut_block(block, mesh, model.tensor_plan)


def _arrived(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    """Return activations that are there, not on their way.

    A compiled block doubles the gradient of an input that is still being reduced
    (torch 2.13, without an error).
    """
    return output.clone()


class WholeSequence(ParallelStyle):
    """Gathers a module's first argument, of which each rank has its part of the sequence."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
            first, *others = args
            if not isinstance(first, DTensor):
                first = DTensor.from_local(first, device_mesh, [Shard(SEQUENCE)], run_check=False)
            return (first.redistribute(placements=[Replicate()]), *others)

        module.register_forward_pre_hook(gather)
        return module


class CutExperts(ParallelStyle):
    """Cuts each expert as a feed-forward, but gathers and sums once for all of them.

    Whole sequences go in, with what the router says of them. What comes out is a summand, and so
    are the gradients of all that went in.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group = device_mesh.get_group()

        def gather(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return tuple(all_gather_single_autograd(arg, SEQUENCE, group) for arg in args)

        def reduce(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
            summed: Tensor = reduce_scatter_single_autograd(output, "sum", SEQUENCE, group)
            return summed

        module.register_forward_pre_hook(gather)
        module.register_forward_hook(reduce)
        # Their hooks are never called: an expert takes the weights only.
        cut = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
        for expert in module.children():
            parallelize_module(expert, device_mesh, cut)
        return module


class ColumnsNorm(ParallelStyle):
    """Cuts an RMSNorm over what `columns` leaves: the mean square is that of all ranks' columns."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)])
        module.weight = nn.Parameter(weight)
        eps = module.eps

        def forward(x: Tensor) -> Tensor:
            out: Tensor = _SplitNorm.apply(x, module.weight.to_local(), eps, device_mesh)
            return out

        module.forward = forward
        return module


class _SplitNorm(torch.autograd.Function):
    """RMSNorm of rows of which each rank has some columns, as F.rms_norm of all of them.

    With s = 1 / sqrt(mean(x^2) + eps) and n = x s, the gradient of x is s (g - n mean(g n)) where
    g is that of n: both means are over all columns. Computed in fp32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, mesh: DeviceMesh) -> Tensor:
        """Map x (..., width / tp) and weight (width / tp,) to the same as x."""
        squares = all_reduce(x.float().square().sum(-1, keepdim=True), "sum", mesh)
        ctx.mesh, ctx.width = mesh, x.shape[-1] * mesh.size()
        scale = (squares / ctx.width + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale * weight).type_as(x)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Map the gradient of the output to those of x and weight."""
        x, weight, scale = ctx.saved_tensors
        gradient, normal = outputs[0].float(), x.float() * scale
        inner = gradient * weight
        total = all_reduce((inner * normal).sum(-1, keepdim=True), "sum", ctx.mesh)
        to_x = scale * (inner - normal * (total / ctx.width))
        to_weight = (gradient * normal).flatten(0, -2).sum(0)
        return to_x.type_as(x), to_weight.type_as(weight), None, None


def _styles() -> dict[str, ParallelStyle]:
    """Return what the words of `Decoder.tensor_plan` mean.

    Between modules go plain tensors, so that a block may do with them what it likes; only what
    `whole` gathers is a DTensor, for the projections inside.
    """
    return {
        "columns": ColwiseParallel(),
        "rows": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
        "sequence": SequenceParallel(sequence_dim=SEQUENCE, use_local_output=True),
        "whole": WholeSequence(),
        # Their gradient is that of this rank's heads: as DTensors they are summed over tp.
        "heads": SequenceParallel(sequence_dim=HEADS, use_local_output=True),
        "columns_norm": ColumnsNorm(),
        "experts": CutExperts(),
    }


def _cut_block(block: nn.Module, mesh: DeviceMesh, plan: Mapping[str, object]) -> None:
    modules, styles = dict(block.named_modules()), _styles()
    for name, how in plan.items():
        style = styles.get(how) if isinstance(how, str) else how
        if not isinstance(style, ParallelStyle):
            raise ModelError(
                "HF331", f"tensor_plan of {name}: {how!r:.40} is none of {', '.join(styles)}"
            )
        if name in modules and not isinstance(modules[name], nn.Identity):
            parallelize_module(modules[name], mesh, style)
    left_out = [name for name, param in block.named_parameters() if not isinstance(param, DTensor)]
    if left_out:
        raise ModelError(
            "HF331",
            f"tensor_plan says nothing of {', '.join(left_out)} of {type(block).__name__}: with tp "
            "its gradient would be one rank's alone; add its module, or use tp 1",
        )


def token_loss_sum(logits: Tensor, targets: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Return the sum of the tokens' cross-entropies, fp32 scalar; IGNORED targets count nothing.

    Args:
        logits: (B, T, V), or this rank's (B, T, V / tp).
        targets: (B, T) int64.
        mesh: the tensor-parallel one.
    """
    loss: Tensor = _ChunkedLoss.apply(logits.flatten(0, 1), targets.flatten(), mesh)
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Cross-entropy of rows of logits, of which `LOSS_ROWS` at a time are in fp32.

    With a mesh each rank has a part of the vocabulary, and for all rows at once the ranks reduce
    the maximum, and then the sum of exponentials and the target's logit, as Megatron does
    (tensor_parallel/cross_entropy.py).
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """Map logits (N, V / tp) and targets (N,) to the sum of the losses."""
        width = logits.shape[1]
        columns = targets - (mesh.get_local_rank() * width if mesh is not None else 0)
        here = ((columns >= 0) & (columns < width)).unsqueeze(1)
        columns = columns.clamp(0, width - 1).unsqueeze(1)
        largest = logits.amax(1, keepdim=True).float()
        if mesh is not None:
            largest = all_reduce(largest, "max", mesh)
        exponentials = [  # in fp32, as `largest` is
            (rows - top).exp_().sum(1, keepdim=True)
            for rows, top in zip(logits.split(LOSS_ROWS), largest.split(LOSS_ROWS), strict=True)
        ]
        hit = torch.where(here, logits.gather(1, columns).float() - largest, 0.0)
        sums = torch.cat([torch.cat(exponentials), hit], dim=1)
        if mesh is not None:
            sums = all_reduce(sums, "sum", mesh)
        log_sum = sums[:, :1].log()
        counts = (targets != IGNORED).unsqueeze(1)
        ctx.save_for_backward(logits, columns, here, counts, largest + log_sum)
        return torch.where(counts, log_sum - sums[:, 1:], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        """Map the gradient of the sum to that of the logits: softmax, less 1 at the target."""
        logits, *each = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        parts = (tensor.split(LOSS_ROWS) for tensor in (gradient, logits, *each))
        for out, rows, columns, here, counts, log_sum in zip(*parts, strict=True):
            # Without a name, which would keep one piece while the next is made.
            out.copy_(
                (rows - log_sum)
                .exp_()
                .scatter_add_(1, columns, -here.float())
                .mul_(counts * outputs[0])
            )
        return gradient, None, None
