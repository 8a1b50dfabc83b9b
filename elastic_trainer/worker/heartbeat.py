"""One small mmap file per worker: the progress record that agent and worker share.

The worker writes what it does; the agent writes what it asks for. Each field has
one writer and is one aligned 8-byte store, so no lock is needed.

Inside the loop a worker marks every part of a step as it enters it. A mark costs about
two microseconds and no system call. The time spent in each part is added up here too, as a
total and as a histogram of gaps between marks, from which limits are learned.
"""

from __future__ import annotations

import enum
import mmap
import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_trainer.record.script_steps import StepSource


class Section(enum.IntEnum):
    """What a worker is doing. From STEP on it has completed a step of its epoch."""

    STARTING = 0
    CONNECTING = 1
    """Makes the process groups: waits for the others, who must come."""
    RESTORING = 2
    FIRST_STEP = 3
    STEP = 4
    SAVING = 5
    EVALUATING = 6
    STOPPED = 7
    """Left the loop on request, state saved."""
    FINISHED = 8
    """The last step is done and saved."""


class StepPart(enum.IntEnum):
    """Where in a step of the loop a worker is (`Section.STEP` and `FIRST_STEP`)."""

    OTHER = 0
    """Between steps, or not known."""
    DATA = 1
    FORWARD = 2
    GATHER = 3
    """Waits, or nearly, for parameters or gradients that others of its shard group share."""
    BACKWARD = 4
    PIPELINE = 5
    """Waits, or nearly, for another stage."""
    REDUCE = 6
    """In the all-reduce of all ranks that ends the step."""
    OPTIMIZER = 7
    SNAPSHOT = 8
    """Copies its state to the agent's memory."""
    SUMS = 9
    """Adds up its own losses and norms, and enters the all-reduce: not yet a wait for others."""
    COMPILE = 10
    """In torch.compile, for the first time or again."""


AXES: Final = ("tp", "cp", "ep")
"""Axes of the mesh whose collectives are inside forward and backward."""

WAITING = frozenset({StepPart.GATHER, StepPart.PIPELINE, StepPart.REDUCE})
"""Parts in which a healthy worker stands still when another does."""

BUCKETS = 48
"""Of a histogram of gaps; two to each doubling, from 1 ms (2^20 ns) to over an hour."""
_MILLI_BITS = 20

(
    _STEP,
    _SECTION,
    _COUNTER,
    _COMMITTED,
    _REQUEST,
    _SAVES_ASKED,
    _SAVES_SERVED,
    _LANE,
    _PART,
    _PLACE,
    _LISTENS,
    _FROM_START,
    _FIRST,
    _SOURCE,
) = range(14)
_TOTALS = 16
_SAMPLED = _TOTALS + 16
_INSIDE = _SAMPLED + 1
_GAPS = _INSIDE + len(AXES)
_SIZE = 8 * (_GAPS + len(StepPart) * BUCKETS)


class Request(enum.IntFlag):
    """What the agent asks of its workers; the group agrees in the step's all-reduce."""

    NONE = 0
    STOP = 1
    """Save, then leave with exit code 91 (a signal, a cancel with save)."""
    GROW = 2
    """Save, then leave with exit code 91: the next epoch has more nodes."""
    SAVE = 4
    """Save and continue."""


@dataclass(frozen=True, slots=True)
class Beat:
    """One reading. `step` is the last completed step; 0 before the first."""

    step: int
    section: Section
    counter: int
    """Rises with every sign of progress; equal readings mean none in between."""
    committed_step: int
    part: StepPart = StepPart.OTHER
    place: int = 0
    """Marks since the step began. Ranks of one lane make the same ones in every step."""
    lane: int = 0
    """The ranks it may be compared with: the place in the pipeline."""
    listens: bool = False
    """The worker looks at what is asked for; of a script nobody knows until it says so."""
    from_start: bool = False
    """`step` counts from the worker's start, for nothing tells where a script resumed; else
    from the beginning of the training."""
    first: int = 0
    """The first step that it showed, by `source`; 0: none."""
    source: StepSource = StepSource.NONE


@dataclass(frozen=True, slots=True)
class Pace:
    """Where the time of the loop went, since the worker's start."""

    totals_s: tuple[float, ...]
    """By `StepPart`."""
    gaps: tuple[tuple[int, ...], ...]
    """By `StepPart`: how many gaps between two marks fell into each bucket."""
    sampled: int = 0
    """Steps whose collectives were timed."""
    inside_s: tuple[float, ...] = (0.0,) * len(AXES)
    """By `AXES`: what collectives inside forward and backward took in those steps."""


def bucket_of(gap_ns: int) -> int:
    """Return the histogram's bucket of a gap in nanoseconds."""
    millis = gap_ns >> _MILLI_BITS
    bits = millis.bit_length()
    if bits < 2:
        return 2 * bits
    return min(2 * bits - 1 + (millis >> (bits - 2) & 1), BUCKETS - 1)


def edge_s(bucket: int) -> float:
    """Return the seconds that gaps of `bucket` stay below; at most twice their length."""
    half, odd = divmod(bucket, 2)
    return (1 << _MILLI_BITS) * (1.5 * 2**half if odd else 2.0**half) / 1e9


class Heartbeat:
    """Maps the file at `path`, making it when `create`. Either side may close at any time."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)
        # A cast view stores a whole word at once; struct would write byte by byte.
        self._words = memoryview(self._map).cast("Q")
        self._since = time.monotonic_ns()
        self._elsewhere: Collection[int] = ()

    def beat(
        self,
        *,
        step: int | None = None,
        section: Section | None = None,
        committed_step: int | None = None,
    ) -> None:
        """Worker: record progress. Arguments left out stay as they were.

        A new step or section begins in `StepPart.OTHER`.
        """
        words = self._words
        self.mark(StepPart.OTHER if step is not None or section is not None else words[_PART])
        if step is not None:
            words[_STEP] = step
            words[_PLACE] = 0
        if section is not None:
            words[_SECTION] = section
        if committed_step is not None:
            words[_COMMITTED] = committed_step

    def mark(self, part: int) -> None:
        """Worker: record that it enters `part` of a step. Cheap: no system call."""
        words = self._words
        now = time.monotonic_ns()
        gap, self._since = now - self._since, now
        if words[_SECTION] == Section.STEP:
            left = words[_PART]
            if left not in self._elsewhere:
                words[_TOTALS + left] += gap
            words[_GAPS + left * BUCKETS + bucket_of(gap)] += 1
        words[_PART] = part
        words[_PLACE] += 1
        words[_COUNTER] += 1

    def time_elsewhere(self, parts: Collection[int]) -> None:
        """Worker: have `add_time` say how long `parts` take, not the time between marks."""
        self._elsewhere = parts

    def add_time(self, part: int, seconds: float) -> None:
        """Worker: add to what `part` has taken."""
        self._words[_TOTALS + part] += int(seconds * 1e9)

    def add_inside(self, seconds: Collection[float]) -> None:
        """Worker: add what collectives took in one step that was timed, by `AXES`."""
        for at, each in enumerate(seconds, _INSIDE):
            self._words[at] += int(each * 1e9)
        self._words[_SAMPLED] += 1

    def part(self) -> StepPart:
        """Worker: the part that it is in."""
        return StepPart(self._words[_PART])

    def compare_within(self, lane: int) -> None:
        """Worker: say which ranks make the same marks as this one."""
        self._words[_LANE] = lane

    def count_from_start(self, *, yes: bool) -> None:
        """Worker: say what `step` counts from, see `Beat.from_start`."""
        self._words[_FROM_START] = yes

    def begin_at(self, first: int, source: StepSource) -> None:
        """Worker: say with which step of a script it began, and how that is known."""
        self._words[_FIRST], self._words[_SOURCE] = first, source

    def read(self) -> Beat:
        """Agent: the newest reading."""
        words = self._words
        return Beat(
            words[_STEP],
            Section(words[_SECTION]),
            words[_COUNTER],
            words[_COMMITTED],
            StepPart(words[_PART]),
            words[_PLACE],
            words[_LANE],
            bool(words[_LISTENS]),
            bool(words[_FROM_START]),
            words[_FIRST],
            StepSource(words[_SOURCE]),
        )

    def pace(self) -> Pace:
        """Agent: where the time went."""
        words, parts = self._words, range(len(StepPart))
        totals = tuple(words[_TOTALS + part] / 1e9 for part in parts)
        starts = (_GAPS + part * BUCKETS for part in parts)
        return Pace(
            totals,
            tuple(tuple(words[at : at + BUCKETS]) for at in starts),
            words[_SAMPLED],
            tuple(each / 1e9 for each in words[_INSIDE:_GAPS]),
        )

    def ask(self, request: Request) -> None:
        """Agent: add to what is asked for."""
        words = self._words
        if Request.SAVE in request:
            words[_SAVES_ASKED] += 1
        words[_REQUEST] |= request & ~Request.SAVE

    def listen(self) -> None:
        """Worker: say that it looks at what is asked for."""
        self._words[_LISTENS] = 1

    def asked(self) -> Request:
        """Worker: what is asked for."""
        words = self._words
        save = words[_SAVES_ASKED] != words[_SAVES_SERVED]
        return Request(words[_REQUEST]) | (Request.SAVE if save else Request.NONE)

    def save_served(self) -> None:
        """Worker: no save is asked for any more.

        A separate count, since a word that both sides change could lose a STOP.
        """
        self._words[_SAVES_SERVED] = self._words[_SAVES_ASKED]

    def close(self) -> None:
        """Unmap the file."""
        self._words.release()
        self._map.close()
