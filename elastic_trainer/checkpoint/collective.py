"""Doing things together on one process group: every rank learns of every failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic_trainer.checkpoint.errors import CheckpointError, DamagedError, SaveFailedError
from elastic_trainer.failures import plain_text

T = TypeVar("T")

FAILURES = (Exception, CheckpointException)
"""What a step can fail with; DCP's exception is a BaseException and slips through `Exception`."""


class StepFailedError(Exception):
    """A step failed on some rank and was given up by all; none is still in it."""


OURS = (CheckpointError, DamagedError, SaveFailedError, StepFailedError)
"""Errors whose text says it all."""


def describe(error: BaseException) -> str:
    """Return one line: our own errors' text, others' type and text, DCP's first cause.

    What torch says of a write that failed hides the system's own error, which counts then.
    """
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {describe(cause)}"
    behind = error.__cause__ or error.__context__
    if type(error) is RuntimeError and isinstance(behind, OSError):
        return describe(behind)
    text = plain_text(str(error))
    return text if isinstance(error, OURS) else f"{type(error).__name__}: {text}"


class Collective:
    """Steps on `group`, a group of all ranks. For one thread at a time.

    Any error but StepFailedError means that the group itself broke.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    def by_first(self, step: Callable[[], T]) -> T:
        """Run `step` on rank 0 and return its value everywhere.

        Raises:
            StepFailedError: on every rank, when it failed; on rank 0 with its cause.
        """
        message: list[Any] = [None, None]
        cause: BaseException | None = None
        if self.rank == 0:
            try:
                message[0] = step()
            except FAILURES as error:
                cause, message[1] = error, describe(error)
        if self.world_size > 1:
            dist.broadcast_object_list(message, src=0, group=self.group)
        if message[1] is not None:
            raise StepFailedError(message[1]) from cause
        value: T = message[0]
        return value

    def together(self, step: Callable[[], None]) -> None:
        """Run `step` on every rank.

        Steps may be nested: a rank that fails meets the others at the next agreement, whichever
        step they have got to, and all give up the outermost.

        Raises:
            StepFailedError: on every rank, when it failed on any.
        """
        reason = None
        try:
            step()
        except StepFailedError:
            raise  # of a step inside: all ranks know
        except FAILURES as error:
            reason = describe(error)
        good = torch.tensor([reason is None], dtype=torch.int32)
        dist.all_reduce(good, op=dist.ReduceOp.MIN, group=self.group)
        if not good.item():
            self._raise_gathered(reason)

    def maxima(self, values: Sequence[int]) -> list[int]:
        """Return the largest of each of all ranks' values; as many on every rank."""
        largest = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        found: list[int] = largest.tolist()
        return found

    def gather_numbers(self, own: Sequence[int]) -> list[list[int]]:
        """Return all ranks' `own`, as many on every rank, by rank."""
        mine = torch.tensor(own, dtype=torch.int64)
        everything = torch.empty(self.world_size * len(own), dtype=torch.int64)
        dist.all_gather_single(everything, mine, group=self.group)
        rows: list[list[int]] = everything.view(self.world_size, len(own)).tolist()
        return rows

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send each rank its message, where there is one; return those for this rank, by sender.

        A rank holds its own messages and those for it, and 8 bytes for each rank twice.
        """
        if self.world_size == 1:
            return {rank: raw for rank, raw in messages.items() if raw}
        ranks = [rank for rank in sorted(messages) if messages[rank]]
        out_bytes = torch.zeros(self.world_size, dtype=torch.int64)
        for rank in ranks:
            out_bytes[rank] = len(messages[rank])
        in_bytes = torch.empty_like(out_bytes)
        dist.all_to_all_single(in_bytes, out_bytes, group=self.group)
        out = _as_tensor(b"".join(messages[rank] for rank in ranks))
        into = torch.empty(int(in_bytes.sum()), dtype=torch.uint8)
        counts = in_bytes.tolist()
        dist.all_to_all_single(into, out, counts, out_bytes.tolist(), group=self.group)
        found, at, raw = {}, 0, into.numpy().tobytes()
        for rank, count in enumerate(counts):
            if count:
                found[rank] = raw[at : at + count]
            at += count
        return found

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return all ranks' `own`, by rank; the sum of their sizes is all that it costs."""
        if self.world_size == 1:
            return [own]
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        dist.all_reduce(sizes, group=self.group)
        ends = sizes.cumsum(0).tolist()
        everything = torch.zeros(ends[-1], dtype=torch.uint8)
        if own:
            everything[ends[self.rank] - len(own) : ends[self.rank]] = _as_tensor(own)
        if ends[-1]:
            dist.all_reduce(everything, op=dist.ReduceOp.MAX, group=self.group)
        raw = everything.numpy().tobytes()
        return [raw[begin:end] for begin, end in itertools.pairwise([0, *ends])]

    def gather(self, step: Callable[[], T]) -> list[T]:
        """Run `step` on every rank and return all values, by rank, on every rank.

        Raises:
            StepFailedError: on every rank, when it failed on any.
        """
        values: list[T] = []
        self.together(lambda: values.append(step()))
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, values[0], group=self.group)
        return gathered

    def _raise_gathered(self, reason: str | None) -> None:
        reasons: list[Any] = [None] * self.world_size
        dist.all_gather_object(reasons, reason, group=self.group)
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text is not None]
        more = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise StepFailedError(failed[0] + more)


def _as_tensor(raw: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        if raw
        else torch.empty(0, dtype=torch.uint8)
    )
