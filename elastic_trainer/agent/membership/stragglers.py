"""Slow ranks: each rank's own time in a step beside that of its peers; parts of a step. Pure.

Only the parts of a step in which a rank works count, not those in which it waits, for
there all others take as long as the slowest. Times are those of the host: what only a
device is slow at shows where the host waits for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from elastic_trainer.agent.membership.notices import RankPace
from elastic_trainer.worker.heartbeat import AXES, StepPart

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
ROUNDS: Final = 6
"""Of reports of all nodes, from one record of the step's parts to the next."""


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
        self._came: set[str] = set()
        """Nodes that have reported since the last round."""
        self._rounds = 0

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

    def parts(self, node: str, *, of: int) -> dict[str, Any] | None:
        """Return the fields of `step.parts` when it is due, with the report of `node`.

        It is once each `of` so many nodes has reported, and then every `ROUNDS` times; never of
        scripts, which tell no parts.
        """
        self._came.add(node)
        if not of or len(self._came) < of:  # a successor does not know the members' number
            return None
        self._came.clear()
        self._rounds += 1
        if self._rounds % ROUNDS != 1:
            return None
        ranks = [(known.node, known.pace) for known in self._known.values()]
        stages = stages_of(ranks)
        if not any(stage["compute"] for stage in stages):
            return None
        return {"stages": stages, "apart": apart_of(ranks)}

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


# -- Parts of a step, over all ranks --------------------------------------------------------------


def parts_of(pace: RankPace) -> dict[str, float]:
    """Return part of a step -> seconds of a rank.

    `compute` is forward and backward, without the collectives of the axes that follow it: these are
    missing where they were not timed. `dp` waits for parameters and gradients, `pp` for stages.
    """
    data, forward, backward, _ = pace.own_s
    inside = dict(zip(AXES, pace.inside_s, strict=False))
    compute = max(0.0, forward + backward - sum(inside.values()))
    waits = dict(zip(("dp", "pp"), pace.waits_s, strict=True))
    return {"compute": compute, **inside, **waits, "data": data}


def stages_of(ranks: Sequence[tuple[str, RankPace]]) -> list[dict[str, float]]:
    """Return part -> seconds a step, the median of ranks, for each place in the pipeline in order.

    `ranks` has node and pace of each; a part counts if all ranks of a place know it.
    """
    lanes: dict[int, list[dict[str, float]]] = {}
    for _, pace in ranks:
        lanes.setdefault(pace.lane, []).append(parts_of(pace))
    return [_medians(found) for _, found in sorted(lanes.items())]


def apart_of(ranks: Sequence[tuple[str, RankPace]]) -> dict[str, str]:
    """Return part -> node that takes `FACTOR` times what it takes the others of its lane."""
    lanes: dict[int, dict[str, list[dict[str, float]]]] = {}
    for node, pace in ranks:
        lanes.setdefault(pace.lane, {}).setdefault(node, []).append(parts_of(pace))
    apart: dict[str, tuple[float, str]] = {}
    for nodes in lanes.values():
        medians = {node: _medians(found) for node, found in nodes.items()}
        if len(medians) < 2:
            continue
        for part in _shared(list(medians.values())):
            # The slowest alone can be the one: this is asked of thousands of nodes.
            *others, (most, node) = sorted((each[part], node) for node, each in medians.items())
            usual = statistics.median(seconds for seconds, _ in others)
            if most - usual >= LEAST_S and most >= FACTOR * usual:
                apart[part] = max(apart.get(part, (0.0, "")), (most - usual, node))
    return {part: node for part, (_, node) in sorted(apart.items())}


def _shared(found: Sequence[Mapping[str, float]]) -> list[str]:
    return [part for part in (found[0] if found else ()) if all(part in each for each in found)]


def _medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    parts = _shared(found)
    return {part: round(statistics.median(each[part] for each in found), 6) for part in parts}
