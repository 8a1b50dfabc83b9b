"""Steps taken together on all ranks: every rank learns of every failure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from elastic_trainer.record.failures import plain_text
from elastic_trainer.state.errors import CheckpointError, DamagedError, SaveFailedError
from elastic_trainer.storage.files import outage_of
from elastic_trainer.worker.rank_grid import RankGrid, as_tensor

_FAILED, _AWAY, _GOOD = range(3)
"""How a step ended on a rank, the worst first."""
FAILURES = (Exception, CheckpointException)
"""What a step can fail with; DCP's exception is a BaseException and slips through `Exception`."""


class StepFailedError(Exception):
    """A step failed on some rank and was given up by all; no rank is still in it."""


class StorageAwayError(StepFailedError):
    """A step failed since storage is away on this rank: nothing is known to be damaged.

    `failures.py` knows it and its kind below by name.
    """


class PeerStorageAwayError(StorageAwayError):
    """The same on another rank: no failure of this node."""


OURS = (CheckpointError, DamagedError, SaveFailedError, StepFailedError)
"""Errors whose text says it all."""


def describe(error: BaseException) -> str:
    """Return one line: our own errors' text, others' type and text, DCP's first cause.

    torch's text of a failed write hides the system's own error, which counts then.
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
    """Steps of all ranks of `grid`, for one thread at a time. Messages are JSON.

    Any error but StepFailedError means that a group itself broke.
    """

    def __init__(self, grid: RankGrid) -> None:
        self.grid, self.rank, self.world_size = grid, grid.rank, grid.world_size

    def by_first(self, step: Callable[[], Any]) -> Any:
        """Run `step` on rank 0 and return its value, as JSON has it, everywhere.

        Raises:
            StepFailedError: on every rank, when it failed; on rank 0 with its cause.
        """
        value: Any = None
        reason: str | None = None
        cause: BaseException | None = None
        if self.rank == 0:
            try:
                value = step()
            except FAILURES as error:
                cause, reason = error, describe(error)
        value, reason = json.loads(self._from(0, json.dumps([value, reason]).encode()))
        if reason is not None:
            raise StepFailedError(reason) from cause
        return value

    def together(self, step: Callable[[], None]) -> None:
        """Run `step` on every rank.

        Steps may be nested: a rank that fails meets the others at their next agreement, in whatever
        step, and all give up the outermost.

        Raises:
            StepFailedError: on every rank, when it failed on any.
            StorageAwayError: of these, where storage was away on each rank that failed.
        """
        reason, outcome = None, _GOOD
        try:
            step()
        except StepFailedError:
            raise  # of a step inside: all ranks know
        except FAILURES as error:
            reason, outcome = describe(error), _AWAY if outage_of(error) else _FAILED
        worst = torch.tensor([outcome], dtype=torch.int32)
        self.grid.all_reduce(worst, dist.ReduceOp.MIN)
        if worst.item() == _GOOD:
            return
        told = self._first(reason)
        if worst.item() == _FAILED:
            raise StepFailedError(told)
        raise PeerStorageAwayError(told) if reason is None else StorageAwayError(told)

    def maxima(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' values, place by place."""
        largest = torch.tensor(values, dtype=torch.int64)
        self.grid.all_reduce(largest, dist.ReduceOp.MAX)
        found: list[int] = largest.tolist()
        return found

    def exchange(self, messages: Mapping[int, bytes]) -> dict[int, bytes]:
        """Send each rank its message, if any; return the messages for this rank, by sender."""
        return self.grid.exchange(messages)

    def gather_bytes(self, own: bytes) -> list[bytes]:
        """Return all ranks' `own`, by rank; the cost is the sum of their sizes."""
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = len(own)
        self.grid.all_reduce(sizes)
        ends = sizes.cumsum(0).tolist()
        raw = self._filled(ends[-1], ends[self.rank] - len(own), own)
        return [raw[begin:end] for begin, end in itertools.pairwise([0, *ends])]

    def gather(self, step: Callable[[], Any]) -> list[Any]:
        """Run `step` on every rank; return all values, by rank, on rank 0, elsewhere [].

        Raises:
            StepFailedError: on every rank, when it failed on any.
        """
        values: list[Any] = []
        self.together(lambda: values.append(step()))
        return list(map(json.loads, self.exchange({0: json.dumps(values[0]).encode()}).values()))

    def scatter(self, step: Callable[[], Iterable[Any]]) -> Any:
        """Run `step`, which makes a value for each rank, on rank 0; return this rank's.

        Raises:
            StepFailedError: on every rank, when it failed.
        """
        values: dict[int, bytes] = {}
        if self.rank == 0:
            self.together(lambda: values.update(enumerate(json.dumps(v).encode() for v in step())))
        else:
            self.together(lambda: None)
        return json.loads(self.exchange(values)[0])

    def _filled(self, size: int, at: int, own: bytes) -> bytes:
        """Return `size` bytes of which each rank gives its `own`, without overlap."""
        content = torch.zeros(size, dtype=torch.uint8)
        content[at : at + len(own)] = as_tensor(own)
        if size:
            self.grid.all_reduce(content, dist.ReduceOp.MAX)
        return content.numpy().tobytes()

    def _from(self, rank: int, raw: bytes) -> bytes:
        """Return the `raw` of `rank`; others' does not count."""
        own = raw if self.rank == rank else b""
        return self._filled(self.maxima([len(own)])[0], 0, own)

    def _first(self, reason: str | None) -> str:
        """Return the `reason` of the first rank that has one, and how many more have."""
        failed = torch.tensor([reason is not None], dtype=torch.int32)
        self.grid.all_reduce(failed)
        rank = -self.maxima([-self.world_size if reason is None else -self.rank])[0]
        text = self._from(rank, (reason or "").encode()).decode()
        more = f" (and {failed.item() - 1} more ranks)" if failed.item() > 1 else ""
        return f"rank {rank}: {text}{more}"
