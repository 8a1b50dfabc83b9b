"""Products of rows with the matrix of the expert that each row goes to, as operators of torch.

Operators, so that compiler and selective recomputation see one product in place of one each. The
weights stay apart, as parameters and in checkpoints; no copy of them is kept for the backward.

Shapes: R rows, sorted by expert, of E experts with weights (O, I); `ends`, where each expert's rows
end, is (E,): int64 on the CPU, then experts are multiplied one by one; or int32 on the rows' GPU,
then by torch's grouped product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

GROUPED_MAX: Final = 1 << 23
"""Elements of a matrix, from which on experts are multiplied one by one on GPUs too.

The grouped product needs them side by side. To copy one in bf16 moves 4 bytes an element, at 2.8
TB/s in the 12 us from one kernel's launch to the next (launcher/plan/step_time.py). Computed, not
measured.
"""
_LIBRARY: Final = torch.library.Library("holdfast", "FRAGMENT")
_ARGUMENTS: Final = "Tensor rows, Tensor[] weights, Tensor ends"
for _schema in (
    f"grouped_linear({_ARGUMENTS}) -> Tensor",
    f"grouped_linear_backward(Tensor grad, {_ARGUMENTS}) -> (Tensor, Tensor[])",
):
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def grouped_linear(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Map rows (R, I) to (R, O).

    Every expert has a gradient, zeros if it has no rows: ranks reduce it together.
    """
    out: Tensor = _GroupedLinear.apply(rows, ends, *weights)
    return out


def ends_for(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    """Return `ends` (int64, on the rows' device) as `grouped_linear` takes it.

    The grouped product is for GPUs and bf16, and takes rows of 16 bytes or multiples.
    """
    aligned = all(size % 8 == 0 for size in weights[0].shape)
    small = weights[0].numel() < GROUPED_MAX and rows.shape[0] > 0
    if rows.is_cuda and rows.dtype == torch.bfloat16 and aligned and small:
        return ends.int()
    return ends.cpu()


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        out: Tensor = torch.ops.holdfast.grouped_linear(rows, weights, ends)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        backward = torch.ops.holdfast.grouped_linear_backward
        rows_grad, weight_grads = backward(*grads, rows, weights, ends)
        return rows_grad, None, *weight_grads


def _forward(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    return (_at_once if ends.is_cuda else _one_by_one)(rows, weights, ends)


def _backward(
    grad: Tensor, rows: Tensor, weights: Sequence[Tensor], ends: Tensor
) -> tuple[Tensor, list[Tensor]]:
    back = _at_once_backward if ends.is_cuda else _one_by_one_backward
    return back(grad, rows, weights, ends)


def _one_by_one(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    out = rows.new_empty(rows.shape[0], weights[0].shape[0])
    parts = (each.tensor_split(ends[:-1]) for each in (rows, out))
    for weight, part, piece in zip(weights, *parts, strict=True):
        torch.mm(part, weight.t(), out=piece)
    return out


def _one_by_one_backward(
    grad: Tensor, rows: Tensor, weights: Sequence[Tensor], ends: Tensor
) -> tuple[Tensor, list[Tensor]]:
    # Each by itself: malloc keeps no piece as large as all of them, and new pages take time.
    rows_grad, weight_grads = torch.empty_like(rows), list(map(torch.empty_like, weights))
    parts = (each.tensor_split(ends[:-1]) for each in (grad, rows, rows_grad))
    for weight, weight_grad, above, part, piece in zip(weights, weight_grads, *parts, strict=True):
        torch.mm(above, weight, out=piece)
        torch.mm(above.t(), part, out=weight_grad)
    return rows_grad, weight_grads


def _at_once(rows: Tensor, weights: Sequence[Tensor], ends: Tensor) -> Tensor:
    return F.grouped_mm(rows, torch.stack(tuple(weights)).transpose(1, 2), offs=ends)


def _at_once_backward(
    grad: Tensor, rows: Tensor, weights: Sequence[Tensor], ends: Tensor
) -> tuple[Tensor, list[Tensor]]:
    grad = grad.contiguous()
    rows_grad = F.grouped_mm(grad, torch.stack(tuple(weights)), offs=ends)
    weight_grads = F.grouped_mm(grad.t(), rows, offs=ends)
    # On B200 an expert without rows gets what was in memory (pytorch#172439).
    idle = ends.diff(prepend=ends.new_zeros(1)) == 0
    return rows_grad, list(weight_grads.masked_fill_(idle[:, None, None], 0.0))


_LIBRARY.impl("grouped_linear", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("grouped_linear_backward", _backward, "CompositeExplicitAutograd")


@torch.library.register_fake("holdfast::grouped_linear", lib=_LIBRARY)
def _fake(rows: Tensor, weights: Sequence[Tensor], _ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights[0].shape[0])


@torch.library.register_fake("holdfast::grouped_linear_backward", lib=_LIBRARY)
def _fake_backward(
    _grad: Tensor, rows: Tensor, weights: Sequence[Tensor], _ends: Tensor
) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(rows), list(map(torch.empty_like, weights))
