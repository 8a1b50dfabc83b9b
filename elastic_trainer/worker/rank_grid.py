"""All ranks together, without a process group of all ranks.

gloo connects each rank of a group with every other, and each gets every other's address from the
store: a group of 16,384 takes 16,383 sockets a rank. Here ranks are on a grid whose axes are
short, and only the lines of the grid are groups. A collective along each axis in turn is one over
all.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_trainer.worker.torch_private import use_one_thread

MAX_GROUP: Final = 32
"""Ranks of a group that connects all of them."""
UNCONNECTED: Final = "unconnected"
"""Backend of a default group that knows ranks and store, and has no collectives."""
_HEADER = struct.Struct("<qqq")
"""Sender, receiver and length of a message on its way."""


class _Unconnected(dist.ProcessGroup):
    """Every collective on it fails: nobody uses all ranks' group by mistake."""

    def getBackendName(self) -> str:  # noqa: N802  torch's
        """Return its name."""
        return UNCONNECTED


dist.Backend.register_backend(
    UNCONNECTED,
    lambda _store, rank, size, _timeout: _Unconnected(rank, size),
    devices=["cpu", "cuda"],
)


def init_unconnected(store: dist.Store, *, rank: int, world_size: int, timeout: timedelta) -> None:
    """Initialise torch.distributed: groups can be made, but none of all ranks is."""
    # gloo, for all groups: nothing but a rank's own address is stored, and one request gets those
    # of a group.
    os.environ["GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"] = "1"
    os.environ["GLOO_ENABLE_STORE_V2_API"] = "1"
    use_one_thread()
    dist.init_process_group(
        UNCONNECTED, store=store, rank=rank, world_size=world_size, timeout=timeout
    )


@contextmanager
def connected_when_used(num_ranks: int) -> Iterator[None]:
    """Within it, new gloo groups of up to `num_ranks` connect two ranks when they first talk.

    That is for groups above MAX_GROUP: a ring has two neighbours. Smaller ones connect at once, so
    that a store that goes away later does no harm.
    """
    if num_ranks <= MAX_GROUP:
        yield
        return
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_GLOO_LAZY_INIT"]


def grid_shape(num_ranks: int, longest: int) -> tuple[int, ...]:
    """Return the lengths of the axes, innermost first, none above `longest`.

    All axes but the last have `longest` ranks, so the grid holds more than half of all ranks. Each
    that has no place on it is paired with one that has.
    """
    shape: list[int] = []
    while num_ranks > longest:
        shape.append(longest)
        num_ranks //= longest
    return (*shape, num_ranks)


def lines(num_ranks: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of each line of two or more, axis by axis, and then of each pair."""
    inside, stride = math.prod(shape), 1
    for length in shape:
        for first in range(inside):
            if first // stride % length == 0 and length > 1:
                yield tuple(range(first, first + stride * length, stride))
        stride *= length
    for rank in range(inside, num_ranks):
        yield rank - inside, rank


_shared: dict[tuple[str, timedelta], tuple[object, RankGrid]] = {}
"""Use and time-out -> the default group it was made under, and the grid."""


class RankGrid:
    """All ranks of the default group, for one thread at a time. Making it is collective.

    Ranks wait `timeout` for each other.
    """

    def __init__(self, timeout: timedelta, *, backend: str = "gloo") -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        shape = grid_shape(self.world_size, MAX_GROUP)
        self._inside = math.prod(shape)
        self.groups: list[dist.ProcessGroup] = []
        """This rank's: along each axis, and its pair last."""
        for ranks in lines(self.world_size, shape):
            group = dist.new_group(ranks, timeout=timeout, backend=backend)
            if self.rank in ranks:
                self.groups.append(group)
        is_paired = self.rank >= self._inside or self.rank + self._inside < self.world_size
        self._pair = self.groups[-1] if is_paired else None
        self._axes: list[tuple[int, int, dist.ProcessGroup]] = []
        """Stride and length, and the group of this rank's line."""
        if self.rank < self._inside:
            long = [axis for axis, length in enumerate(shape) if length > 1]
            self._axes = [
                (math.prod(shape[:axis]), shape[axis], group)
                for axis, group in zip(long, self.groups, strict=False)
            ]

    def all_reduce(
        self,
        values: Tensor,
        op: dist.ReduceOp = dist.ReduceOp.SUM,
        *,
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        """Reduce `values` (on the CPU) over all ranks in place: the same bits on every rank.

        `entered` is called once this rank has come, before it waits for others.
        """
        along = [partial(dist.all_reduce, op=op, group=group) for _, _, group in self._axes]
        if self._pair is not None:
            first = self.rank % self._inside
            along.insert(0, partial(dist.all_reduce, op=op, group=self._pair))
            along.append(partial(dist.broadcast, src=first, group=self._pair))
        works = (collective(values, async_op=True) for collective in along)
        work = next(works, None)
        entered()
        while work is not None:
            work.wait()
            work = next(works, None)

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send each rank its message, where there is one; return those for this rank, by sender.

        A message goes along each axis once: a rank holds its own and what passes through.
        """
        held = [(self.rank, to, raw) for to, raw in messages.items() if raw]
        if self._pair is not None:
            held = _pass_on(held, self._pair, lambda _: 0)
        for stride, length, group in self._axes:
            held = _pass_on(held, group, partial(self._at, stride=stride, length=length))
        if self._pair is not None:
            held = _pass_on(held, self._pair, lambda to: to // self._inside)
        return {sender: raw for sender, _, raw in sorted(held)}

    def _at(self, to: int, *, stride: int, length: int) -> int:
        """Return the place along an axis of a receiver, or of the rank that it is paired with."""
        return to % self._inside // stride % length


def shared_grid(use: str, timeout: timedelta) -> RankGrid:
    """Return the process's grid for one use; collective when it is made.

    A script that trains a hundred times would else run out of sockets.
    """
    known = _shared.get((use, timeout))
    if known is None or known[0] is not dist.group.WORLD:
        known = _shared[use, timeout] = (dist.group.WORLD, RankGrid(timeout))
    return known[1]


def _pass_on(
    held: list[tuple[int, int, bytes]], group: dist.ProcessGroup, next_of: Callable[[int], int]
) -> list[tuple[int, int, bytes]]:
    """Give each message to the rank in `group` that is next on its way; return what comes."""
    parcels: list[list[bytes]] = [[] for _ in range(group.size())]
    for sender, to, raw in held:
        parcels[next_of(to)] += [_HEADER.pack(sender, to, len(raw)), raw]
    out_counts = [sum(map(len, parcel)) for parcel in parcels]
    in_counts = torch.empty(len(parcels), dtype=torch.int64)
    dist.all_to_all_single(in_counts, torch.tensor(out_counts), group=group)
    into = torch.empty(int(in_counts.sum()), dtype=torch.uint8)
    out = as_tensor(b"".join(raw for parcel in parcels for raw in parcel))
    dist.all_to_all_single(into, out, in_counts.tolist(), out_counts, group=group)
    raw, at, found = into.numpy().tobytes(), 0, []
    while at < len(raw):
        sender, to, length = _HEADER.unpack_from(raw, at)
        at += _HEADER.size
        found.append((sender, to, raw[at : at + length]))
        at += length
    return found


def as_tensor(raw: bytes) -> Tensor:
    """Return the bytes as a tensor of uint8."""
    if not raw:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
