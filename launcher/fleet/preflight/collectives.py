"""Which nodes are broken or slow, from all-reduces within groups of them.

Groups of one round share no node and run at the same time. A node of a group that works is
cleared; every other one then works with a cleared node, so that a group that does not is its
fault. Fewer than six nodes follow a fixed plan: two bad ones can be in all groups of a round, and
then no time of that round is that of healthy nodes.

Rounds are measured one after the other, on machines that others use too: nodes that are slow are
measured once more, beside cleared ones, before they are called so.

One process on every node serves all rounds (elastic_trainer/worker/collective_check.py). Processes
and driver meet in a folder that all nodes share, which only this user can write: files of JSON.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from elastic_trainer.plan.quantities import counted
from elastic_trainer.storage.files import of_each, read_regular, write_atomic
from elastic_trainer.storage.typed import parse_json
from launcher.fleet.preflight.report import CheckResult
from launcher.platforms.retries import polled

SERVER: Final = "elastic_trainer.worker.collective_check"
"""Run on the nodes; the launcher itself does without torch."""
START_S: Final = 120.0
"""Longest wait until all nodes' processes have started."""
DEADLINE_S: Final = 60.0
"""Longest time of a round, a group's start included."""
_POLL_S: Final = 0.05
_GRACE_S: Final = 3.0
"""Time after a round's deadline in which a server's answer must be seen."""
_PATIENCE: Final = 5.0
_LEAST_S: Final = 15.0
"""A round is over once it has lasted so many times as long as its faster half, and so long."""
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
    """Nodes of groups that failed; which of them is at fault is not known."""

    def clears(self, node: str) -> bool:
        """Whether nothing is wrong with a node of these rounds."""
        return node not in self.broken | self.slow | self.suspects


@dataclass(slots=True, kw_only=True)
class Bisection:
    """Rounds of groups over `nodes`; ask `next_round`, then `tell` it each group's time. Pure."""

    nodes: Sequence[str]
    times: dict[Group, float | None] = field(default_factory=dict)
    """Group -> seconds of its collective; None: it did not end."""
    rounds: int = 0

    def tell(self, times: Mapping[Group, float | None]) -> None:
        """Take in one round's times."""
        self.times |= times
        self.rounds += 1

    def next_round(self) -> list[Group]:
        """Return the next round's groups, of ceil(log2 n) + 1 at most; none: nothing is left."""
        number = len(self.nodes)
        if number < 2 or self.rounds >= math.ceil(math.log2(number)) + 1:
            return []
        if plan := _SMALL.get(number):
            groups = plan[self.rounds] if self.rounds < len(plan) else ()
            return [tuple(self.nodes[index] for index in group) for group in groups]
        if self.rounds == 0:
            # Pairs of neighbours; of an odd number, the last three are one group.
            ends = [*range(2, number - 1, 2), number]
            pairs = zip([0, *ends], ends, strict=False)
            return [tuple(self.nodes[begin:end]) for begin, end in pairs]
        cleared, broken, slow = self._states()
        # Of each failed group one node first.
        left = [
            [node for node in group if node not in cleared | broken | slow] for group in self.times
        ]
        order = [group[index] for index in range(3) for group in left if index < len(group)]
        partners = [node for node in self.nodes if node in cleared]
        return list(zip(dict.fromkeys(order), partners, strict=False))

    def verdicts(self) -> Verdicts:
        """Return what is known now."""
        cleared, broken, slow = self._states()
        suspects = set(self.nodes) - cleared - broken - slow if len(self.nodes) > 1 else ()
        return Verdicts(
            broken=frozenset(broken), slow=frozenset(slow), suspects=frozenset(suspects)
        )

    def _states(self) -> tuple[set[str], set[str], set[str]]:
        """Return the nodes that are cleared, broken and slow."""
        ended = {group: took for group, took in self.times.items() if took is not None}
        limit = SLOW * min(ended.values(), default=0.0)
        worked = (group for group, took in ended.items() if took <= limit)
        cleared = {node for group in worked for node in group}
        broken: set[str] = set()
        slow: set[str] = set()
        for group, took in self.times.items():
            accused = set(group) - cleared
            if len(accused) == 1:
                (broken if took is None else slow).update(accused)
        return cleared, broken, slow - broken


def compare(nodes: Sequence[str], folder: Path, say: Callable[[str], None]) -> Verdicts:
    """Run all rounds over `nodes`, whose processes run SERVER with `folder`; then let them end."""

    def started() -> list[str]:
        return [node for node in nodes if (folder / f"hello-{node}.json").exists()]

    try:
        here = polled(
            started, lambda found: len(found) == len(nodes), for_s=START_S, every_s=_POLL_S
        )
        numbers = itertools.count(1)
        found = _rounds(here, folder, numbers, say)
        if found.slow:
            names = ", ".join(sorted(found.slow))
            say(f"collectives: {names} slow with every node; measuring once more")
            again = _rounds(second_pass(here, found), folder, numbers, say)
            found = confirmed(found, again)
    finally:
        (folder / "stop").touch()
    return replace(found, broken=found.broken | (frozenset(nodes) - frozenset(here)))


def second_pass(nodes: Sequence[str], found: Verdicts) -> list[str]:
    """Return the slow nodes after as many cleared ones: two at least, who are a group. Pure."""
    cleared = [node for node in nodes if found.clears(node)]
    return [*cleared[: max(2, len(found.slow))], *sorted(found.slow)]


def confirmed(found: Verdicts, again: Verdicts) -> Verdicts:
    """Return `found` with what a second pass has found `again`. Pure.

    Only who is slow in both is slow; but where a node does not end a collective any more, there may
    be nothing left to compare with, and nobody is cleared.
    """
    lost = again.broken | again.suspects
    return Verdicts(
        broken=found.broken | again.broken,
        slow=frozenset(node for node in found.slow if lost or not again.clears(node)),
        suspects=found.suspects | again.suspects,
    )


def _rounds(
    nodes: Sequence[str], folder: Path, numbers: Iterator[int], say: Callable[[str], None]
) -> Verdicts:
    bisection = Bisection(nodes=nodes)
    while groups := bisection.next_round():
        number, largest = next(numbers), max(map(len, groups))
        what = f"{counted(len(groups), 'group')} of up to {counted(largest, 'node')}"
        say(f"collectives, round {number}: {what}")
        bisection.tell(_round(groups, number, folder))
    return bisection.verdicts()


def _round(groups: Sequence[Group], number: int, folder: Path) -> dict[Group, float | None]:
    asked = {"groups": groups, "deadline_s": DEADLINE_S}
    write_atomic(folder / f"round-{number}.json", json.dumps(asked))
    members = [node for group in groups for node in group]
    answers: dict[str, float] = {}

    def seconds(node: str) -> tuple[str, float]:
        said = parse_json(read_regular(folder / f"answer-{number}-{node}.json", 4096))["seconds"]
        if not isinstance(said, int | float) or said < 0:
            raise ValueError(f"{said!r:.40} are no seconds")
        return node, said

    def look() -> int:
        waited_for = [node for node in members if node not in answers]
        answers.update(of_each(waited_for, seconds, lambda node: f"{node} in round {number}"))
        return len(members) - len(answers)

    begun, half_s = time.monotonic(), math.inf

    def is_over(left: int) -> bool:
        nonlocal half_s
        lasted = time.monotonic() - begun
        if len(answers) >= left:
            half_s = min(half_s, lasted)
        return left == 0 or lasted > max(_LEAST_S, _PATIENCE * half_s)

    polled(look, is_over, for_s=DEADLINE_S + _GRACE_S, every_s=_POLL_S)
    return {
        group: max(answers[node] for node in group) if set(group) <= answers.keys() else None
        for group in groups
    }


def finding(verdicts: Verdicts, node: str, nodes: int) -> CheckResult:
    """Return what the rounds over so many nodes tell of one. Pure."""
    level, text = "ok", "works with other nodes"
    if node in verdicts.broken:
        level = "fail"
        text = "does not end a collective with any node; take it out, look at NIC, GPUs, firewall"
    elif node in verdicts.slow:
        level = "fail"
        text = "slow with every node; look at clocks, PCIe width, link rate and other processes"
    elif node in verdicts.suspects:
        level, others = "warn", ", ".join(sorted(verdicts.suspects))
        text = f"one of these is at fault: {others}; check them together with more nodes"
    elif nodes == 2:
        text += "; two nodes cannot tell whether both are slow"
    return CheckResult(check="collectives", level=level, text=text)
