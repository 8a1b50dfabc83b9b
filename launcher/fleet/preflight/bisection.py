"""Which nodes are broken or slow, from collectives within groups of them. Pure.

Groups of one round share no node and run at the same time. A node of a group that works is
cleared; every other one then works with a cleared node, so that a group that does not is its
fault. Fewer than six nodes follow a fixed plan: two bad ones can be in all groups of a round, and
then no time of that round is that of healthy nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

SLOW: Final = 3.0
"""A group is slow beyond so many times the fastest group."""
_SMALL: Final[Mapping[int, tuple[tuple[tuple[int, ...], ...], ...]]] = {
    2: (((0, 1),),),
    3: (((0, 1),), ((0, 2),), ((1, 2),)),
    4: (((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))),
    5: (
        ((0, 1), (2, 3, 4)),
        ((0, 2), (1, 3, 4)),
        ((0, 3), (1, 2, 4)),
        ((0, 4), (1, 2, 3)),
    ),
}
"""Nodes -> rounds of groups (indices) that tell any two bad nodes (of three nodes: any one)."""

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What follows from the groups so far."""

    broken: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    """Of groups that failed; who of them is at fault is not known."""


def most_rounds(nodes: int) -> int:
    """Return the bound: ceil(log2 n) + 1, none for fewer than two nodes."""
    return math.ceil(math.log2(nodes)) + 1 if nodes > 1 else 0


@dataclass(slots=True, kw_only=True)
class Bisection:
    """Rounds of groups over `nodes`; ask `next_round`, then `tell` it each group's time."""

    nodes: Sequence[str]
    times: dict[Group, float | None] = field(default_factory=dict)
    """Group -> seconds of its collective; None: it did not end."""
    rounds: int = 0

    def tell(self, times: Mapping[Group, float | None]) -> None:
        """Take in one round's times."""
        self.times |= times
        self.rounds += 1

    def next_round(self) -> list[Group]:
        """Return the next round's groups; none: all that can be known is known."""
        if self.rounds >= most_rounds(len(self.nodes)):
            return []
        if plan := _SMALL.get(len(self.nodes)):
            groups = plan[self.rounds] if self.rounds < len(plan) else ()
            return [tuple(self.nodes[index] for index in group) for group in groups]
        if self.rounds == 0:
            return _pairs(self.nodes)
        cleared, broken, slow = self._states()
        known = cleared | broken | slow
        partners = [node for node in self.nodes if node in cleared]
        return list(zip(self._open(known), partners, strict=False))

    def verdicts(self) -> Verdicts:
        """Return what is known now."""
        cleared, broken, slow = self._states()
        suspects = set(self.nodes) - cleared - broken - slow
        if len(self.nodes) < 2:
            suspects = set()
        return Verdicts(
            broken=frozenset(broken), slow=frozenset(slow), suspects=frozenset(suspects)
        )

    def _states(self) -> tuple[set[str], set[str], set[str]]:
        """Return the nodes that are cleared, broken and slow."""
        limit = SLOW * min((time for time in self.times.values() if time is not None), default=0.0)
        cleared = {
            node
            for group, time in self.times.items()
            if time is not None and time <= limit
            for node in group
        }
        broken: set[str] = set()
        slow: set[str] = set()
        for group, time in self.times.items():
            accused = set(group) - cleared
            if len(accused) == 1:
                (broken if time is None else slow).update(accused)
        return cleared, broken, slow - broken

    def _open(self, known: set[str]) -> list[str]:
        """Return the open nodes, one of each failed group first."""
        left = [
            [node for node in group if node not in known]
            for group in self.times
            if not set(group) <= known
        ]
        order = [group[index] for index in range(3) for group in left if index < len(group)]
        return list(dict.fromkeys(order))


def _pairs(nodes: Sequence[str]) -> list[Group]:
    """Return pairs of neighbours; of an odd number, the last three are one group."""
    ends = [*range(2, len(nodes) - 1, 2), len(nodes)]
    return [tuple(nodes[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
