"""One clock for a record whose writers' clocks differ. Pure.

Times of one node are right among themselves, by its monotonic clock. Nodes are tied together by
what cannot have been the other way round: a worker is started after its epoch was formed, and
its trainers are ready after all workers of the epoch were started. A clock that contradicts no
such order by more than TOLERANCE_S is left alone; another is moved until the shortest time from
an epoch to a worker is what it is on the coordinator's own node. So durations between nodes are
wrong by what a message takes, some 10 ms, however far apart the clocks are.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.events import Event
from elastic_trainer.failures import EXIT_DONE, EXIT_SAVED

TOLERANCE_S: Final = 0.1
"""Below it an order may be wrong because a writer was not scheduled in between."""
_SAME_CLOCK_S: Final = 1.0
"""Between wall and monotonic clock: further apart it is another boot, or the clock was set."""
_BY_LAUNCHER: Final = ("run.started", "run.ended", "fault.injected")
_KILLS: Final = ("kill-node", "kill-coordinator", "kill-agent")
_READY: Final = ("trainer.started", "step.completed", "script.progress")
"""Signs that all workers of an epoch were there."""
_ENDS: Final = ("worker.exit", "member.lost", "job.stopped")
_TELLING: Final = ("epoch.formed", "worker.started", *_READY, *_ENDS, *_BY_LAUNCHER)
_STARTED: Final = ("run.started", None)
_ENDED: Final = ("run.ended", None)
_Place = tuple[int, float]
"""(clock, time)."""
_Places = dict[tuple[str, int | None], list[tuple[_Place, Event]]]
"""(event's name, epoch) -> where and when."""


@dataclass(slots=True)
class _Clock:
    """One machine's clock between two boots."""

    machine: str
    base_s: float
    """What the wall clock was ahead of the monotonic one at first."""
    bases_s: list[float] = field(default_factory=list)
    """All such differences, seconds apart: more than one when the clock was set."""
    events: list[Event] = field(default_factory=list)

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            if not self.knows(event):
                self.bases_s.append(_base_s(event))
        self.events.extend(events)

    def knows(self, event: Event) -> bool:
        return any(abs(_base_s(event) - base_s) < _SAME_CLOCK_S for base_s in self.bases_s)

    def time(self, event: Event) -> float:
        """Return when `event` was, by this clock as it was at first."""
        return event.t_unix if len(self.bases_s) == 1 else event.t_mono + self.base_s


@dataclass(slots=True)
class _Orders:
    """How far clocks have to be moved against each other."""

    least_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """(a, b) -> what b must be moved more than a, at the least."""
    rough_s: dict[tuple[int, int], float] = field(default_factory=dict)
    """The same by orders that a paused node may break: where nothing else is known."""
    delays_s: list[float] = field(default_factory=list)
    """From an epoch to a worker on the coordinator's own node."""

    def add(self, before: _Place, after: _Place, *, rough: bool = False) -> None:
        """Take that `before` was before `after`."""
        pair, found = (before[0], after[0]), self.rough_s if rough else self.least_s
        if pair[0] != pair[1]:
            found[pair] = max(found.get(pair, -math.inf), before[1] - after[1])

    def bounds_s(self, clock: int, moved_s: Mapping[int, float]) -> tuple[float, float]:
        """Return by how much `clock` is to be moved at the least and at the most."""
        least, most = -math.inf, math.inf
        for other, by_s in moved_s.items():
            least = max(least, by_s + self.least_s.get((other, clock), -math.inf))
            most = min(most, by_s - self.least_s.get((clock, other), -math.inf))
        if most == math.inf:
            rough = (by_s - self.rough_s.get((clock, o), -math.inf) for o, by_s in moved_s.items())
            most = min(rough, default=most)
        return least, most

    def estimate_s(self, least: float, most: float) -> float:
        """Return by how much to move a clock within its bounds; not at all where it may stay."""
        if least - TOLERANCE_S <= 0 <= most + TOLERANCE_S:
            return 0.0
        delay_s = min(self.delays_s, default=0.0)
        if least == -math.inf:
            return most - delay_s
        # Both bounds may be a little off: from an epoch to a worker is the shorter way.
        return least + delay_s if least > most else min(least + delay_s, most)


def by_one_clock(files: Mapping[str, Sequence[Event]]) -> list[Event]:
    """Return all events in order of time, with `t_unix` by one clock.

    It is the one that most nodes agree with; where they agree nothing is changed.

    Args:
        files: each writer's events, as it wrote them.
    """
    clocks = _clocks(files)
    moved_s = _moved_s(clocks)
    out = []
    for index, clock in enumerate(clocks):
        by_s = moved_s.get(index, 0.0)
        if abs(by_s) < TOLERANCE_S and len(clock.bases_s) == 1:
            out += clock.events
            continue
        out += [dataclasses.replace(e, t_unix=clock.time(e) + by_s) for e in clock.events]
    out.sort(key=lambda event: event.t_unix)
    return out


def _clocks(files: Mapping[str, Sequence[Event]]) -> list[_Clock]:
    clocks: list[_Clock] = []
    for name in sorted(files):  # agents before their workers: they have seen the whole time
        machine = _machine(name, files[name])
        for events in _boots(files[name]):
            mine = [c for c in clocks if c.machine == machine and c.knows(events[0])]
            if not mine:
                clocks.append(_Clock(machine, _base_s(events[0])))
                mine = clocks[-1:]
            mine[0].take(events)
    return clocks


def _machine(name: str, events: Iterable[Event]) -> str:
    """Return where a file was written: a node, else wherever its launcher was."""
    nodes = (event.node for event in events if event.node and event.event not in _BY_LAUNCHER)
    return next(nodes, f"of {name}")


def _boots(events: Sequence[Event]) -> list[Sequence[Event]]:
    """Cut a file where the monotonic clock began anew."""
    starts = [0]
    starts += [
        i for i in range(1, len(events)) if events[i].t_mono < events[i - 1].t_mono - _SAME_CLOCK_S
    ]
    return [events[a:b] for a, b in zip(starts, [*starts[1:], len(events)], strict=True) if a < b]


def _base_s(event: Event) -> float:
    return event.t_unix - event.t_mono


def _moved_s(clocks: Sequence[_Clock]) -> dict[int, float]:
    """Return clock -> by how much to move it, seconds; none for what nothing ties to others."""
    orders, first = _orders(clocks)
    if first is None:
        return {}
    moved_s = {first: 0.0}
    while True:
        # The best known one next, launchers last: they know others' times only roughly.
        ranked = []
        for index in range(len(clocks)):
            least, most = orders.bounds_s(index, moved_s)
            if index not in moved_s and math.isfinite(min(abs(least), abs(most))):
                launcher = clocks[index].machine.startswith("of ")
                ranked.append((launcher, most - least, index, least, most))
        if not ranked:
            break
        _, _, index, least, most = min(ranked)
        moved_s[index] = orders.estimate_s(least, most)
    middle = statistics.median_low(moved_s.values())
    return {index: by_s - middle for index, by_s in moved_s.items()}


def _orders(clocks: Sequence[_Clock]) -> tuple[_Orders, int | None]:
    """Return what the events say, and the clock of the first epoch's coordinator."""
    places: _Places = {}
    for index, clock in enumerate(clocks):
        for event in clock.events:
            if event.event in _TELLING:
                found = places.setdefault((event.event, event.epoch), [])
                found.append(((index, clock.time(event)), event))
    orders = _Orders()
    epochs = sorted(epoch for name, epoch in places if name == "epoch.formed" and epoch is not None)
    for epoch, later in zip(epochs, [*epochs[1:], None], strict=False):
        _order_epoch(orders, places, epoch)
        _order_end_of_epoch(orders, places, epoch, later)
        _order_faults(orders, places, epoch)
    _order_ends(orders, places, clocks)
    return orders, places["epoch.formed", epochs[0]][0][0][0] if epochs else None


def _order_epoch(orders: _Orders, places: _Places, epoch: int) -> None:
    """Take what an epoch's members have all seen."""
    started = [place for place, _ in places.get(("worker.started", epoch), ())]
    for formed, _ in places["epoch.formed", epoch]:
        for worker in started:
            orders.add(formed, worker)
            if worker[0] == formed[0] and worker[1] >= formed[1]:
                orders.delays_s.append(worker[1] - formed[1])
    ready: dict[int, float] = {}
    for name in _READY:
        for (clock, time), _ in places.get((name, epoch), ()):
            ready[clock] = min(time, ready.get(clock, time))
    for worker in started:
        for clock, time in ready.items():
            orders.add(worker, (clock, time))


def _order_end_of_epoch(orders: _Orders, places: _Places, epoch: int, later: int | None) -> None:
    """Take that workers which left by themselves precede what their coordinator does then."""
    follows = [place for place, _ in places.get(("epoch.formed", later), ())]
    stops = [place for place, _ in places.get(("job.stopped", epoch), ())]
    for place, event in places.get(("worker.exit", epoch), ()):
        if event.fields.get("code") in (EXIT_DONE, EXIT_SAVED):
            for after in follows or stops:
                orders.add(place, after)
    for place, _ in places.get(("worker.started", epoch), ()):
        for after in follows or stops:
            orders.add(place, after, rough=True)


def _order_faults(orders: _Orders, places: _Places, epoch: int) -> None:
    """Take that a fault follows the step its launcher had seen, and precedes a node's loss."""
    for fault, event in places.get(("fault.injected", epoch), ()):
        for step, done in places.get(("step.completed", epoch), ()):
            if done.step == event.step and done.rank in (0, None):
                orders.add(step, fault)
        for lost, loss in places.get(("member.lost", epoch), ()):
            if event.fields.get("action") in _KILLS and event.node == loss.fields.get("member"):
                orders.add(fault, lost)


def _order_ends(orders: _Orders, places: _Places, clocks: Sequence[_Clock]) -> None:
    """Take that nothing is before the first launcher, nor after the last one has ended."""
    begun = [(e.fields.get("attempt") or 0, place) for place, e in places.get(_STARTED, ())]
    last = max(begun)[1][0] if begun else None
    ended = [place for place, _ in places.get(_ENDED, ()) if place[0] == last]
    for index, clock in enumerate(clocks):
        times = [clock.time(event) for event in clock.events]
        if begun:
            orders.add(min(begun)[1], (index, min(times)))
        if ended:
            orders.add((index, max(times)), ended[-1])
