"""Which bytes of a stored tensor a read item needs, and how its elements lie in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes from the first to the last element of a box in a contiguous tensor."""

    item: ReadItem
    dtype: torch.dtype
    at: int
    """Where they begin, bytes."""
    num_bytes: int
    strides: tuple[int, ...]
    """Of the box in them, elements."""

    @property
    def is_dense(self) -> bool:
        """Whether they are the box's elements in their order, and nothing else."""
        return self.num_bytes == math.prod(self.item.lengths) * self.dtype.itemsize

    def tensor(self, raw: Any) -> Tensor:
        """Return the item's tensor in `raw`, a writable buffer of `num_bytes`."""
        if not self.num_bytes:
            return torch.empty(tuple(self.item.lengths), dtype=self.dtype)
        flat = torch.frombuffer(raw, dtype=self.dtype)
        return flat.as_strided(tuple(self.item.lengths), self.strides)


def span_of(item: ReadItem, sizes: Sequence[int], dtype: torch.dtype, at: int) -> Span:
    """Return what `item` needs of the contiguous tensor of `sizes` whose bytes begin at `at`."""
    strides = contiguous_strides(sizes)
    begin = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
    last = begin + sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
    count = 0 if 0 in item.lengths else last + 1 - begin
    return Span(item, dtype, at + begin * dtype.itemsize, count * dtype.itemsize, strides)


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, elements."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))
