"""Slow ranks: each rank's own time in a step beside that of its peers. Pure.

Only the parts of a step in which a rank works count, not those in which it waits, for
there all others take as long as the slowest. Times are those of the host: what only a
device is slow at shows where the host waits for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_trainer.agent.membership.notices import RankPace
from elastic_trainer.worker.heartbeat import StepPart

OWN_PARTS: Final = (StepPart.DATA, StepPart.FORWARD, StepPart.BACKWARD, StepPart.OPTIMIZER)
"""The order of `RankPace.own_s`."""
FACTOR: Final = 1.5
"""A part that takes this many times what it takes the median of the peers is slow, …"""
SHARE: Final = 0.1
"""… if this share of a step's own time is lost by it, …"""
LEAST_S: Final = 0.005
"""… and so many seconds a step, …"""
TIMES: Final = 3
"""… in so many reports in a row."""


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that has been slower than its peers for a while."""

    rank: int
    node: str
    section: str
    """The part in which it loses most."""
    ratio: float
    own_s: float
    """Seconds a step that it takes for that part."""


@dataclass(slots=True)
class _Known:
    node: str
    pace: RankPace
    in_a_row: int = 0


class Stragglers:
    """Compares the ranks of one epoch; make a new one for the next."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._starts: dict[str, Mapping[str, float]] = {}

    def started(
        self, node: str, phases: Mapping[str, float], *, of: int
    ) -> dict[str, tuple[float, str]]:
        """Take the seconds of each phase of a node's start.

        Return the longest of each, and whose it was, once each `of` so many nodes has started.
        """
        self._starts[node] = phases
        found: dict[str, tuple[float, str]] = {}
        for name, timed in self._starts.items() if len(self._starts) == of else ():
            for phase, seconds in timed.items():
                found[phase] = max(found.get(phase, (0.0, name)), (seconds, name))
        return found

    def take(self, node: str, paces: Sequence[RankPace]) -> list[Slow]:
        """Take a node's report and return those of its ranks that turn out slow, each once."""
        found = []
        for pace in paces:
            known = self._known.setdefault(pace.rank, _Known(node, pace))
            known.pace = pace
        for pace in paces:
            known = self._known[pace.rank]
            slow = self._compare(known)
            known.in_a_row = known.in_a_row + 1 if slow else 0
            if slow is not None and known.in_a_row == TIMES:
                found.append(slow)
        return found

    def _compare(self, known: _Known) -> Slow | None:
        own = known.pace
        peers = [
            other.pace.own_s
            for rank, other in self._known.items()
            if rank != own.rank and other.pace.lane == own.lane
        ]
        if not peers:
            return None
        usual = [statistics.median(column) for column in zip(*peers, strict=True)]
        lost = [mine - theirs for mine, theirs in zip(own.own_s, usual, strict=True)]
        worst = max(range(len(lost)), key=lost.__getitem__)
        mine, theirs = own.own_s[worst], usual[worst]
        if lost[worst] < max(LEAST_S, SHARE * sum(usual)) or mine < FACTOR * theirs:
            return None
        ratio = mine / theirs if theirs > 0 else float(FACTOR)
        section = OWN_PARTS[worst].name.lower()
        return Slow(own.rank, known.node, section, round(ratio, 2), round(mine, 6))
