"""Hang detection: by progress of step, section and counter, never by activity. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastic_trainer.heartbeat import Beat, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """A worker that made no progress for longer than its ceiling."""

    local_rank: int
    section: Section
    step: int
    idle_s: float
    ceiling_s: float


@dataclass(slots=True)
class _Watched:
    beat: Beat
    since: float
    """When the reading last changed."""
    first_step: int | None = None
    """Completed steps when it was first seen in the steady loop."""
    steady: bool = False


class HangWatch:
    """Watches the workers of one epoch; make a new one for the next.

    Args:
        hang_ceiling_s: longest time without progress in the steady loop.
        start_ceiling_s: the same until the second step of the epoch is done (imports,
            restore, compile), and while saving or evaluating.
        only_beating: watch a worker from its first beat on; for scripts that may know
            nothing of heartbeats.
    """

    def __init__(
        self, *, hang_ceiling_s: float, start_ceiling_s: float, only_beating: bool = False
    ) -> None:
        self._hang_ceiling_s, self._start_ceiling_s = hang_ceiling_s, start_ceiling_s
        self._only_beating = only_beating
        self._watched: dict[int, _Watched] = {}

    def observe(self, now: float, beats: Mapping[int, Beat]) -> list[Hung]:
        """Take one reading of each worker and return those that hang, longest first.

        Args:
            now: monotonic seconds.
            beats: local rank -> reading, of the workers that run.
        """
        hung = []
        for local_rank, beat in beats.items():
            watched = self._watched.setdefault(local_rank, _Watched(beat, now))
            if beat != watched.beat:
                watched.beat, watched.since = beat, now
            if beat.section is Section.STEP:
                if watched.first_step is None:
                    watched.first_step = beat.step
                watched.steady = watched.steady or beat.step > watched.first_step
            if self._only_beating and beat.counter == 0:
                continue
            idle_s, ceiling_s = now - watched.since, self._ceiling_s(watched)
            if idle_s > ceiling_s:
                hung.append(
                    Hung(
                        local_rank=local_rank,
                        section=beat.section,
                        step=beat.step,
                        idle_s=idle_s,
                        ceiling_s=ceiling_s,
                    )
                )
        return sorted(hung, key=lambda worker: -worker.idle_s)

    def _ceiling_s(self, watched: _Watched) -> float:
        # The second step may compile again, and is the first to wait for slow peers.
        if watched.steady and watched.beat.section is Section.STEP:
            return self._hang_ceiling_s
        return self._start_ceiling_s
