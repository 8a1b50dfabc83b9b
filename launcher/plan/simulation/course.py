"""One course of events: what happens to a fleet, and what the job makes of it. Pure.

From one event to the next in closed form: neither steps nor checkpoints are gone through. A failure
costs its detection, a restart, and the work since the newest snapshot in memory; or since the
newest checkpoint on storage, which must be read, where there are no snapshots, a node and the one
that keeps its copy were lost together or while the copy was made again, or all nodes ended. Nodes
that are lost come back once repaired, spares are lost like others, and the rung is the largest that
the healthy nodes fill. With fewer nodes than the smallest rung needs the job waits, at first with
its state in memory.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from launcher.plan.simulation.assumptions import Assumptions
from launcher.plan.simulation.fleet import Fleet
from launcher.spec.errors import UserError

CAUSES: Final = (
    "useful",
    "redone",
    "detection",
    "restart",
    "waiting",
    "smaller",
    "slow",
    "checkpoint",
)
"""What time goes to, in seconds of all nodes at the top rung's speed; they sum to all of it."""
DAY_S: Final = 86400.0
MOST_HITS: Final = 1_000_000
"""Events of a history: a few seconds for each setting."""


class Hit(NamedTuple):
    """Something that happens to the fleet, with what chance decides about it."""

    t: float
    kind: str
    place: float
    """Which node: from 0 to the slots of the history; beyond the healthy ones nobody is hit."""
    since: float
    """Part of the time between snapshots that has passed, 0 to 1."""
    luck: float
    """Decides whether copies are lost, 0 to 1."""
    repair_s: float


def history(assumed: Assumptions, slots: int, seed: int) -> list[Hit]:
    """Return what happens to `slots` nodes, in order of time.

    Each kind has a stream of random numbers of its own, so that settings can be compared on the
    same failures.

    Raises:
        UserError: HF685, more than `MOST_HITS` are to be expected.
    """
    hits: list[Hit] = []
    rates = list(_rates(assumed, slots))
    expected = assumed.days * sum(per_day for _, per_day in rates)
    if expected > MOST_HITS:
        message = f"{expected:,.0f} failures in {assumed.days:g} days; assume fewer days, or rarer"
        raise UserError("HF685", f"{message} failures (at most {MOST_HITS:,})")
    for kind, per_day in rates:
        rng, t = random.Random(f"{seed} {kind}"), 0.0
        while per_day and (t := t + rng.expovariate(per_day / DAY_S)) < assumed.days * DAY_S:
            place, since, luck = (rng.random() for _ in range(3))
            repair_s = rng.expovariate(1.0) * assumed.repair_h * 3600
            hits.append(Hit(t, kind, place * slots, since, luck, repair_s))
    return sorted(hits)


def _rates(assumed: Assumptions, slots: int) -> Iterator[tuple[str, float]]:
    """Yield what happens, and how often a day."""
    for kind in ("node_losses", "switch_losses", "process_faults", "slow_nodes"):
        yield kind, getattr(assumed, kind) * slots / 1000
    for kind in ("planned_stops", "job_losses"):
        yield kind, getattr(assumed, kind)


def spent(fleet: Fleet, hits: Sequence[Hit]) -> dict[str, float]:
    """Return what the time went to, by cause, under these events."""
    course = Course(fleet)
    for hit in hits:
        course.until(hit.t)
        course.meet(hit)
    course.until(fleet.assumed.days * DAY_S)
    return course.spent


class Course:
    """A job in the course of events."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.spent = dict.fromkeys(CAUSES, 0.0)
        self._now = 0.0
        self._healthy = fleet.nodes + fleet.spares
        self._rung = fleet.rung(self._healthy)
        """Index of the rung; None: the job waits for nodes."""
        self._waits_since = 0.0
        self._pause: list[tuple[str, float]] = []
        """What is left of a pause, the last part first: (cause, seconds)."""
        self._in_memory = True
        """The newest state need not be read from storage."""
        self._changes: list[tuple[float, int, int]] = []
        """A heap: time, healthy nodes more, slow nodes more."""
        self._slow = 0
        self._cycle = 0.0
        """Seconds since the last checkpoint began to be written, pauses left out."""
        self._at_risk = 0.0
        """Work since then; work is in seconds at full speed."""
        self._in_flight = 0.0
        """Work that the checkpoint holds which is being written."""
        self._fresh = 0.0
        """Work since the last start."""

    def until(self, t: float) -> None:
        """Let time pass."""
        while self._changes and self._changes[0][0] <= t:
            at, nodes, slow = heapq.heappop(self._changes)
            self._pass(at)
            self._slow += slow
            self._healthy += nodes
            self._change_rung(exchange=slow < 0)
        self._pass(t)

    def meet(self, hit: Hit) -> None:
        """Let something happen now."""
        members = 0 if self._rung is None else self.fleet.sizes[self._rung]
        if hit.kind == "planned_stops":
            self._stop_as_planned()
        elif hit.kind == "job_losses":
            self._fail(hit, lost=True)
        elif hit.kind in ("node_losses", "switch_losses") and hit.place < self._healthy:
            several = hit.kind == "switch_losses"
            count = min(round(self.fleet.assumed.switch_nodes) if several else 1, self._healthy)
            self._healthy -= count
            heapq.heappush(self._changes, (hit.t + hit.repair_s, count, 0))
            if hit.place < members or self._healthy < members:
                self._fail(hit, lost=self._loses_copies(hit, members, several=several))
            else:
                self._change_rung()
        elif hit.kind == "process_faults" and hit.place < members:
            self._fail(hit, lost=False)
        elif hit.kind == "slow_nodes" and hit.place < members:
            self._slow += 1
            found_t = hit.t + self.fleet.assumed.slow_s
            heapq.heappush(self._changes, (found_t, -1, -1))
            heapq.heappush(self._changes, (found_t + hit.repair_s, 1, 0))

    def _pass(self, t: float) -> None:
        left, self._now = t - self._now, t
        if self._rung is None:
            self.spent["waiting"] += left
            return
        while self._pause and left > 0:
            cause, seconds = self._pause.pop()
            used = min(left, seconds)
            self.spent[cause] += used
            left -= used
            if used < seconds:
                self._pause.append((cause, seconds - used))
        if left > 0:
            self._train(left, self.fleet.speeds[self._rung])

    def _train(self, seconds: float, rung_speed: float) -> None:
        every, stall_s = self.fleet.interval_s, self.fleet.assumed.stall_s
        busy = every - stall_s
        speed = rung_speed * (self.fleet.assumed.slow_speed if self._slow else 1.0)
        cycles, cycle = divmod(self._cycle + seconds, every)
        done, upto = min(self._cycle, busy), min(cycle, busy)
        worked = cycles * busy + upto - done
        if cycles:
            whole = busy * speed
            self._in_flight = whole if cycles > 1 else self._at_risk + (busy - done) * speed
            self._at_risk = upto * speed
        else:
            self._at_risk += worked * speed
        if cycle >= self.fleet.write_s:
            self._in_flight = 0.0
        self._cycle, self._in_memory = cycle, True
        self._fresh += worked * speed
        self.spent["useful"] += worked * speed
        self.spent["smaller"] += worked * (1 - rung_speed)
        self.spent["slow"] += worked * (rung_speed - speed)
        self.spent["checkpoint"] += seconds - worked

    def _loses_copies(self, hit: Hit, members: int, *, several: bool) -> bool:
        """Return whether a lost node's state is in no memory any more.

        A node alone has no copy. Until copies are made again after a loss, that of either neighbour
        in the chain of copies takes the only one.
        """
        if several:
            return hit.luck < self.fleet.copies_lost
        if members == 1:
            return True
        return self._fresh <= self.fleet.copy_s and hit.luck * (members - 1) < 2

    def _fail(self, hit: Hit, *, lost: bool) -> None:
        """End the epoch, with what a failure costs."""
        fleet, rung = self.fleet, self._rung
        if lost or fleet.snapshot_s is None:
            self._in_memory = False
        work = self._at_risk + self._in_flight
        if not self._in_memory:
            self._lose(work)
        else:
            speed = 0.0 if rung is None else fleet.speeds[rung]
            assert fleet.snapshot_s is not None
            back_s = hit.since * fleet.snapshot_s + fleet.copy_s
            self._lose(min(back_s * speed, self._fresh, work))
        self._change_rung()
        if self._rung is not None:
            queued_s = fleet.assumed.requeue_s if hit.kind == "job_losses" else 0.0
            self._start(queued_s, detect_s=fleet.assumed.detect_s)

    def _lose(self, work: float) -> None:
        """Take work for redone, and what was being written to storage for void."""
        self._at_risk, self._in_flight = self._at_risk + self._in_flight - work, 0.0
        busy = self.fleet.interval_s - self.fleet.assumed.stall_s
        self._cycle = min(self._cycle, busy) if self._in_memory else 0.0
        self.spent["useful"] -= work
        self.spent["redone"] += work

    def _stop_as_planned(self) -> None:
        """Save, end, and start again from storage."""
        if self._rung is None:
            return
        if self._in_memory:
            self._at_risk = self._in_flight = self._cycle = 0.0
        saved_s = self.fleet.write_s if self._in_memory else 0.0
        self._in_memory = False
        self._start(self.fleet.assumed.requeue_s, saved_s=saved_s)

    def _start(
        self,
        queued_s: float = 0.0,
        *,
        detect_s: float = 0.0,
        saved_s: float = 0.0,
        restart_s: float | None = None,
    ) -> None:
        """Begin a pause; one that goes on is over."""
        restart_s = self.fleet.assumed.restart_s if restart_s is None else restart_s
        read_s = 0.0 if self._in_memory else self.fleet.read_s
        parts = (
            ("restart", restart_s + read_s),
            ("waiting", queued_s),
            ("checkpoint", saved_s),
            ("detection", detect_s),
        )
        self._pause = [part for part in parts if part[1]]
        self._fresh = 0.0

    def _change_rung(self, *, exchange: bool = False) -> None:
        """Take the rung that healthy nodes fill; `exchange`: a member leaves at a step's end."""
        before, self._rung = self._rung, self.fleet.rung(self._healthy)
        if self._rung is None:
            if before is not None:
                self._waits_since, self._pause = self._now, []
            return
        if before is None:
            waited_s = self._now - self._waits_since
            if waited_s <= self.fleet.join_timeout_s:
                self._start()
            else:
                self._in_memory = False
                self._lose(self._at_risk + self._in_flight)
                self._start(self.fleet.assumed.requeue_s)
        elif not self._pause and (exchange or self._rung != before):
            self._start(restart_s=self.fleet.grow_s)
