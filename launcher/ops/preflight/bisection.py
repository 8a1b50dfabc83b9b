"""Which nodes are broken or slow, from collectives within groups of them. Pure.

Groups of one round share no node and run at the same time. The first round is pairs. A node of
a pair that works is cleared; every other one then works with a cleared node, so that a pair that
does not is its fault. The last round is all nodes that are not convicted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

SLOW: Final = 3.0
"""A pair is slow beyond so many times the lower quartile of all pairs."""

Group = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What follows from the groups so far."""

    broken: frozenset[str] = frozenset()
    slow: frozenset[str] = frozenset()
    suspects: frozenset[str] = frozenset()
    """Of groups that failed; who of them is at fault is not known."""
    together: bool | None = None
    """Whether all other nodes together work; None: they have not been tried."""


@dataclass(slots=True, kw_only=True)
class Bisection:
    """Rounds of groups over `nodes`; ask `next_round`, then `tell` it each group's time."""

    nodes: Sequence[str]
    times: dict[Group, float | None] = field(default_factory=dict)
    """Group -> seconds of its collective; None: it did not end."""
    missing: set[str] = field(default_factory=set)
    """Nodes that never started: broken without a round."""

    def tell(self, times: Mapping[Group, float | None]) -> None:
        """Take in one round's times."""
        self.times |= times

    def next_round(self) -> list[Group]:
        """Return the next round's groups; none: all that can be known is known."""
        nodes = [node for node in self.nodes if node not in self.missing]
        cleared, broken, slow = self._states()
        open_ = [node for node in nodes if node not in cleared | broken | slow]
        pairs = _with_cleared(open_, [node for node in nodes if node in cleared], self._failed())
        if not cleared:
            pairs = self._among(open_)
        if pairs:
            return pairs
        rest = tuple(node for node in nodes if node in cleared)
        return [rest] if len(rest) > 2 and rest not in self.times else []

    def verdicts(self) -> Verdicts:
        """Return what is known now."""
        cleared, broken, slow = self._states()
        known = cleared | broken | slow
        rest = tuple(node for node in self.nodes if node in cleared)
        together = self.times[rest] is not None if len(rest) > 2 and rest in self.times else None
        return Verdicts(
            broken=frozenset(broken | self.missing),
            slow=frozenset(slow),
            suspects=frozenset(set(self.nodes) - known - self.missing),
            together=together,
        )

    def _states(self) -> tuple[set[str], set[str], set[str]]:
        """Return the nodes that are cleared, broken and slow."""
        pairs = {group: time for group, time in self.times.items() if len(group) == 2}
        ended = sorted(time for time in pairs.values() if time is not None)
        limit = SLOW * ended[(len(ended) - 1) // 4] if ended else 0.0
        cleared = {
            node
            for group, time in pairs.items()
            if time is not None and time <= limit
            for node in group
        }
        broken: set[str] = set()
        slow: set[str] = set()
        for group, time in pairs.items():
            accused = set(group) - cleared
            if len(accused) == 1:
                (broken if time is None else slow).update(accused)
        return cleared, broken, slow - broken

    def _failed(self) -> list[Group]:
        cleared = self._states()[0]
        return [group for group in self.times if len(group) == 2 and not set(group) <= cleared]

    def _among(self, nodes: Sequence[str]) -> list[Group]:
        """Pair `nodes` with one another, nobody with a partner that it has had."""
        left, pairs = list(nodes), []
        while left:
            one = left.pop(0)
            partner = next((x for x in left if _pair(one, x, self.nodes) not in self.times), None)
            if partner is not None:
                left.remove(partner)
                pairs.append(_pair(one, partner, self.nodes))
        return pairs


def _with_cleared(
    open_: Sequence[str], cleared: Sequence[str], failed: Iterable[Group]
) -> list[Group]:
    """Pair open nodes with a cleared one each.

    Where those do not suffice, one of each failed pair goes first: if it works, the other one
    is at fault.
    """
    first: list[str] = []
    seen: set[str] = set()
    for group in failed:
        if group[0] in open_ and not seen & set(group):
            first.append(group[0])
            seen |= set(group)
    order = first + [node for node in open_ if node not in first]
    return list(zip(order, cleared, strict=False))


def _pair(one: str, other: str, order: Sequence[str]) -> Group:
    return (one, other) if order.index(one) < order.index(other) else (other, one)
