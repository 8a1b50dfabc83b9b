"""What GPU-time was spent on, by cause, from the record. Pure.

The GPUs of an attempt are allocated from `run.started` to `run.ended` (or to the last event). An
epoch's time, from the moment it was formed to the next one's, is divided so:

| cause | which GPUs | which time |
|---|---|---|
| productive | members' | steps that count |
| redone | members' | steps that were executed and do not count |
| restart | members' | before an epoch's first step, and after its last one where it failed |
| hang | members' | after an epoch's last step where a hang ended it |
| other | members' | between steps: saves, validation, data; after the last step of the run |
| idle | all others' | spares, nodes that are lost or excluded, nodes of no use while parked |

Before the first epoch of an attempt all GPUs count as `restart`. The causes sum to `allocated`.
`queue` is what was asked for and not yet allocated, from `submitted` to `run.started`: it is in no
sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final, NamedTuple

from elastic_trainer.record.events import Event
from launcher.record.event import node_names, whole
from launcher.record.timeline import STEPS, EpochSpan, epochs, lineage

CAUSES: Final = ("productive", "redone", "restart", "hang", "other", "idle")
"""Sorted as they are shown; they sum to what was allocated."""
QUEUE: Final = "queue"
EVENTS: Final = (
    "run.started",
    "run.ended",
    "epoch.formed",
    "trainer.started",
    "worker.hung",
    "membership.parked",
    *STEPS,
)
"""What it needs of a record."""
_HOUR_S: Final = 3600.0
_CLOCKS_S: Final = 60.0
"""Clocks of a run's machines differ by less."""


@dataclass(slots=True)
class GpuTime:
    """GPU-seconds by cause."""

    by_cause: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))
    queue: float = 0.0

    @property
    def allocated(self) -> float:
        """GPU-seconds of all causes."""
        return sum(self.by_cause.values())

    def spend(self, cause: str, seconds: float) -> None:
        """Add GPU-seconds of one cause, or of the queue."""
        if cause == QUEUE:
            self.queue += seconds
        else:
            self.by_cause[cause] += seconds

    def to_json(self) -> dict[str, float]:
        """Return GPU-hours by cause, with `allocated` and `queue`."""
        hours = {**self.by_cause, "allocated": self.allocated, QUEUE: self.queue}
        return {cause: round(seconds / _HOUR_S, 4) for cause, seconds in hours.items()}


class AttemptTime(NamedTuple):
    """Time from one start of a run's agents to their end."""

    begun_t: float
    ended_t: float
    """When it ended, else its last event."""
    nodes: int
    code: int | None
    """Its exit code; None: it has not ended, or nobody could say so."""


class _Slice(NamedTuple):
    """A stretch of time that one cause has."""

    begun_t: float
    ended_t: float
    nodes: int
    cause: str


def gpu_time_by_month(
    events: Sequence[Event], *, gpus_per_node: int, submitted: Iterable[float] = ()
) -> dict[str, GpuTime]:
    """Return what the run's GPUs were used for, by month in UTC (`2026-11`).

    Events are in order of time; `submitted` says when its jobs were, in unix seconds.
    """
    found: dict[str, GpuTime] = {}
    begun = attempts(events)
    for each in (*_slices(begun, events, epochs(events)), *_waits(begun, submitted)):
        for month, seconds in _by_month(each.begun_t, each.ended_t):
            account = found.setdefault(month, GpuTime())
            account.spend(each.cause, seconds * each.nodes * gpus_per_node)
    return dict(sorted(found.items()))


def gpu_time_since(
    events: Sequence[Event], spans: Sequence[EpochSpan], begun_t: float, *, gpus_per_node: int
) -> GpuTime:
    """Return what the run's GPUs were used for from `begun_t` on, unix seconds.

    `spans` are the epochs of `events`.
    """
    found = GpuTime()
    for each in _slices(attempts(events), events, spans):
        seconds = max(0.0, each.ended_t - max(each.begun_t, begun_t))
        found.spend(each.cause, seconds * each.nodes * gpus_per_node)
    return found


def total(accounts: Iterable[GpuTime]) -> GpuTime:
    """Return the sum of `accounts`."""
    found = GpuTime()
    for account in accounts:
        for cause, seconds in (*account.by_cause.items(), (QUEUE, account.queue)):
            found.spend(cause, seconds)
    return found


def attempts(events: Sequence[Event]) -> list[AttemptTime]:
    """Return when each attempt began and ended, and how many nodes it had."""
    begun = [_begin(events, i) for i, each in enumerate(events) if each.event == "run.started"]
    if any(_nodes_of(event) for event in events[: next(iter(begun), len(events))]):
        begun.insert(0, 0)  # the beginning was not read
    found = []
    for index, after in pairwise([*begun, len(events)]):
        of_attempt = events[index:after]
        ended = [each for each in of_attempt if each.event == "run.ended"]
        asked = [whole(each, "nodes") for each in of_attempt if each.event == "run.started"]
        nodes = max([*asked, *map(_nodes_of, of_attempt)], default=0)
        last_t = (ended or of_attempt)[-1].t_unix
        told = ended[-1].fields.get("code") if ended else None
        code = told if isinstance(told, int) else None
        found.append(AttemptTime(events[index].t_unix, last_t, nodes, code))
    return found


def _begin(events: Sequence[Event], started: int) -> int:
    """Return the index of an attempt's first event: the clocks of its agents may be behind."""
    begin, since = started, events[started].t_unix - _CLOCKS_S
    for index in range(started - 1, -1, -1):
        if events[index].t_unix < since or events[index].event in ("run.started", "run.ended"):
            break
        begin = index if _nodes_of(events[index]) else begin
    return begin


def _nodes_of(event: Event) -> int:
    """Return the number of members and spares of an epoch; 0 of any other event."""
    if event.event != "epoch.formed":
        return 0
    return sum(len(node_names(event.fields.get(part))) for part in ("members", "spares"))


def _slices(
    begun: Iterable[AttemptTime], events: Sequence[Event], spans: Sequence[EpochSpan]
) -> Iterator[_Slice]:
    """Divide attempts: before the first epoch all GPUs do one thing, then members and others."""
    counts = {(done.epoch, done.step) for done in lineage(spans)}
    hung = {each.epoch for each in events if each.event == "worker.hung"}
    parked = [each.t_unix for each in events if each.event == "membership.parked"]
    for attempt in begun:
        ours = [each for each in spans if attempt.begun_t <= each.formed_t < attempt.ended_t]
        ends = [*(each.formed_t for each in ours), attempt.ended_t]
        yield _Slice(attempt.begun_t, ends[0], attempt.nodes, "restart")
        for span, ended_t in zip(ours, ends[1:], strict=True):
            members = min(len(span.members), attempt.nodes)
            parked_t = min((t for t in parked if span.formed_t <= t < ended_t), default=ended_t)
            yield _Slice(span.formed_t, parked_t, attempt.nodes - members, "idle")
            yield _Slice(parked_t, ended_t, attempt.nodes, "idle")
            last = "other" if span is ours[-1] else "restart"
            after = "hang" if span.epoch in hung else last
            yield from _members_time(span, parked_t, members, counts, after)


def _members_time(
    span: EpochSpan, ended_t: float, nodes: int, counts: Collection[tuple[int, int]], after: str
) -> Iterator[_Slice]:
    """Divide the time of an epoch's members up to `ended_t`; `after` is the cause of its end."""
    now = span.formed_t
    for done in sorted(span.steps.values(), key=lambda each: each.t):
        done_t = min(done.t, ended_t)
        if done_t <= now:
            continue
        first = now == span.formed_t
        # One that does not say how long it took lasts since the step before it.
        took_s = done.step_s if done.step_s is not None else 0.0 if first else done_t - now
        begun_t = max(now, done_t - max(0.0, took_s))
        yield _Slice(now, begun_t, nodes, "restart" if first else "other")
        counted = (done.epoch, done.step) in counts
        yield _Slice(begun_t, done_t, nodes, "productive" if counted else "redone")
        now = done_t
    yield _Slice(now, ended_t, nodes, after if span.steps or after == "hang" else "restart")


def _waits(begun: Sequence[AttemptTime], submitted: Iterable[float]) -> Iterator[_Slice]:
    """Yield the wait of each submission that an attempt followed."""
    for submit_t in sorted(submitted):
        after = next((each for each in begun if each.begun_t >= submit_t), None)
        if after is not None:
            yield _Slice(submit_t, after.begun_t, after.nodes, QUEUE)


def _by_month(begun_t: float, ended_t: float) -> Iterator[tuple[str, float]]:
    """Divide a stretch of time at the ends of months: (month, seconds)."""
    while begun_t < ended_t:
        day = datetime.fromtimestamp(begun_t, UTC)
        year, month = divmod(day.year * 12 + day.month, 12)
        after_t = min(ended_t, datetime(year, month + 1, 1, tzinfo=UTC).timestamp())
        yield day.strftime("%Y-%m"), after_t - begun_t
        begun_t = after_t
