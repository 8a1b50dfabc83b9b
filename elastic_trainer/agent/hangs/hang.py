"""Hang detection: by progress of step, section and counter, never by activity. Pure.

How long a worker of the steady loop may stand still is learned from the gaps between its
marks, for each part of a step and again in each epoch, so for each layout. Time in which a
worker could not run, for want of a processor, extends that; it is never progress.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.agent.membership.hang_diagnosis import ANSWER_S
from elastic_trainer.worker.heartbeat import BUCKETS, WAITING, Beat, Pace, Section, StepPart, edge_s

P99_FACTOR: Final = 4.0
LONGEST_FACTOR: Final = 2.0
"""Times the longest gap of the steady state: what happened once, harmlessly, may be rare."""
STEP_FACTOR: Final = 2.0
"""Times a whole step: who stands still for less delays nobody by much."""
WINDOW_S: Final = 600.0
"""Limits follow what happened in the last one or two of these."""
FAST_BEATS: Final = 10
"""A script with as many has done its second step: what comes before that is fewer."""
STOPPED_S: Final = 1.0
"""A stopped process makes no progress whatever it was doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What depends on the device that workers compute on, and no run can teach."""

    hang_floor_s: float
    """Shortest limit of the steady loop that is learned."""
    kill_deadline_s: float
    """How long killed workers may take to end."""
    connect_s: float = math.inf
    """Limit while they connect, and in the first step for ranks that wait for others: scripts
    connect then."""
    pins: bool = False
    """The first snapshot of an epoch allocates pinned memory: it has the ceiling for a limit."""


CPU: Final = DeviceLimits(hang_floor_s=2.0, kill_deadline_s=10.0)
CUDA: Final = DeviceLimits(hang_floor_s=30.0, kill_deadline_s=60.0, connect_s=600.0, pins=True)
"""Floor: with NCCL_IB_TIMEOUT=22 an adapter waits 4.096 us x 2^22 = 17.2 s before it tries again,
and may live through that. Kill: the driver frees a GPU's and pinned memory before the process ends.
Connecting: NCCL took 200 s with 98,304 GPUs (FT-HSDP, arXiv 2602.00277); three times that. None was
measured here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProgress:
    """How long a worker has made no progress, and how long it may."""

    local_rank: int
    beat: Beat
    idle_s: float
    """Less the time in which it waited for a processor."""
    limit_s: float
    ceiling_s: float
    """What the limit can never exceed."""
    state: str
    """Letter of its process as in /proc/PID/stat; empty: not looked at."""

    @property
    def hangs(self) -> bool:
        """Whether it stands still for too long."""
        return self.idle_s > self.limit_s

    @property
    def nearly(self) -> bool:
        """Whether it soon will: time to ask who else does not answer."""
        return self.idle_s > max(self.limit_s - ANSWER_S, self.limit_s / 2)


@dataclass(slots=True)
class _Watched:
    beat: Beat
    since: float
    """When the reading last changed."""
    held_s: float = 0.0
    """What `held` said then."""
    first_step: int | None = None
    """Completed steps when it was first seen in the steady loop."""
    steady_since: float | None = None
    steady_step: int = 0
    before: Pace | None = None
    """When it became steady: what it did until then, compiling perhaps, teaches nothing. Later
    between one and two windows ago."""
    middle: Pace | None = None
    """What `before` becomes next."""
    turned: float = 0.0
    """When `middle` was set."""
    pace: Pace | None = None

    @property
    def is_steady(self) -> bool:
        return self.steady_since is not None and self.beat.section is Section.STEP


class HangWatch:
    """Watches the workers of one epoch; make a new one for the next.

    `hang_ceiling_s` is the longest time without progress in the steady loop, starved or not;
    `start_ceiling_s` the same until the epoch's second step is done (imports, restore, compile),
    and while saving or evaluating. `only_beating` watches a worker from its first beat on, for
    scripts that may know nothing of heartbeats.
    """

    def __init__(
        self,
        *,
        hang_ceiling_s: float,
        start_ceiling_s: float,
        device: DeviceLimits = CPU,
        only_beating: bool = False,
    ) -> None:
        self._hang_ceiling_s, self._start_ceiling_s = hang_ceiling_s, start_ceiling_s
        self._device, self._floor_s = device, min(device.hang_floor_s, hang_ceiling_s)
        self._only_beating = only_beating
        self._watched: dict[int, _Watched] = {}
        self._learned: dict[StepPart, float] = {}

    def observe(
        self,
        now: float,
        beats: Mapping[int, Beat],
        *,
        held: Mapping[int, float] | None = None,
        states: Mapping[int, str] | None = None,
    ) -> list[WorkerProgress]:
        """Take one reading of each worker and return how each stands, by local rank.

        `now` leaves out pauses of this process itself. Of each worker `held` is the seconds in all
        that it was kept from running, `states` the state of its process, where known.
        """
        held, states = held or {}, states or {}
        found = []
        for local_rank, beat in sorted(beats.items()):
            held_s = held.get(local_rank, 0.0)
            watched = self._watched.setdefault(local_rank, _Watched(beat, now, held_s))
            if beat != watched.beat:
                watched.beat, watched.since, watched.held_s = beat, now, held_s
            self._settle(watched, now)
            if self._only_beating and beat.counter == 0:
                continue
            wall_s, ceiling_s = now - watched.since, self._ceiling_s(watched)
            starved_s = held_s - watched.held_s if wall_s <= ceiling_s else 0.0
            state = states.get(local_rank, "")
            limit_s = self._limit_s(watched, ceiling_s)
            found.append(
                WorkerProgress(
                    local_rank=local_rank,
                    beat=beat,
                    idle_s=max(0.0, wall_s - starved_s),
                    limit_s=min(limit_s, STOPPED_S) if state == "T" else limit_s,
                    ceiling_s=ceiling_s,
                    state=state,
                )
            )
        return found

    def learn(self, now: float, paces: Mapping[int, Pace]) -> None:
        """Take the workers' histograms; call it now and then, after `observe`."""
        steady = []
        for local_rank, pace in paces.items():
            watched = self._watched.get(local_rank)
            if watched is None or watched.steady_since is None:
                continue
            if watched.before is None:
                watched.before, watched.middle, watched.turned = pace, pace, now
            elif now - watched.turned > WINDOW_S:
                watched.before, watched.middle, watched.turned = watched.middle, pace, now
            watched.pace = pace
            steady.append(watched)
        steps = sum(watched.beat.step - watched.steady_step for watched in steady)
        seconds = sum(now - (watched.steady_since or now) for watched in steady)
        gaps = [
            [sum(column) for column in zip(*(_since(w, part) for w in steady), strict=True)]
            for part in StepPart
        ]
        self._learned = learned_limits(gaps, seconds / steps if steps else 0.0)

    def _settle(self, watched: _Watched, now: float) -> None:
        beat = watched.beat
        if beat.section is not Section.STEP or watched.steady_since is not None:
            return
        if watched.first_step is None:
            watched.first_step = beat.step
        # A script may make many steps between two looks, and then hang for good.
        fast = self._only_beating and beat.counter >= FAST_BEATS
        # The second step may compile again, and is the first to wait for slow peers.
        if beat.step > watched.first_step or fast:
            watched.steady_since, watched.steady_step = now, beat.step

    def _ceiling_s(self, watched: _Watched) -> float:
        compiles = watched.beat.part is StepPart.COMPILE
        steady = watched.is_steady and not compiles
        return self._hang_ceiling_s if steady else self._start_ceiling_s

    def _limit_s(self, watched: _Watched, ceiling_s: float) -> float:
        beat = watched.beat
        waits = beat.section is Section.FIRST_STEP and beat.part in WAITING
        if waits or beat.section is Section.CONNECTING:
            return min(ceiling_s, self._device.connect_s)
        pins = self._device.pins and beat.part is StepPart.SNAPSHOT and not beat.committed_step
        teaches = watched.is_steady and beat.part is not StepPart.COMPILE and not pins
        if not teaches or self._only_beating:  # a script's evaluation looks like a step
            return ceiling_s
        longest = max(self._learned.values(), default=ceiling_s)  # parts that took no time yet
        return min(ceiling_s, max(self._floor_s, self._learned.get(beat.part, longest)))


def _since(watched: _Watched, part: StepPart) -> list[int]:
    assert watched.before is not None
    assert watched.pace is not None
    return [
        new - old
        for new, old in zip(watched.pace.gaps[part], watched.before.gaps[part], strict=True)
    ]


def learned_limits(gaps: Sequence[Sequence[int]], step_s: float) -> dict[StepPart, float]:
    """Return the limit of each part that has shown what is usual: `gaps` has their histograms."""
    return {
        StepPart(part): max(STEP_FACTOR * step_s, gap_limit_s(buckets))
        for part, buckets in enumerate(gaps)
        if any(buckets) and part != StepPart.COMPILE
    }


def gap_limit_s(buckets: Sequence[int]) -> float:
    """Return the limit that follows from a histogram that is not empty."""
    assert len(buckets) <= BUCKETS
    need = math.ceil(0.99 * sum(buckets))
    seen = p99 = longest = 0
    for bucket, count in enumerate(buckets):
        if not count:
            continue
        if seen < need:
            p99 = bucket
        seen, longest = seen + count, bucket
    return max(P99_FACTOR * edge_s(p99), LONGEST_FACTOR * edge_s(longest))
