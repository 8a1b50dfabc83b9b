"""Who is to blame for the end of an epoch: one node, the program, or what all nodes share. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from elastic_trainer.agent.membership.notices import WorkersFailed
from elastic_trainer.failures import Action, Failure, Kind, names_an_error, signature

NEVER_THE_NODES: Final = (Kind.CRASH, Kind.USER_ERROR, Kind.OUT_OF_MEMORY)
"""What a program does to itself: however often one node has it, that node is healthy."""
OF_THE_PROGRAM: Final = (*NEVER_THE_NODES, Kind.FAULT)
"""What a program may have done."""

COLLATERAL_SETTLE_S: Final = 0.1
"""How long to wait for the cause when the first word is that of a consequence."""
SETTLE_S: Final = 0.5
"""How long to wait for the other nodes' errors: one that all have is not one node's."""

Reports = Sequence[tuple[str | None, WorkersFailed]]
"""(node, report) in the order of arrival; node None: nobody could be named."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The report that an epoch's end is blamed on; `node` None: not one node's fault."""

    node: str | None
    kind: Kind
    action: Action
    detail: str
    step: int
    host: str | None = None
    """Machine of the node; None: called as the node."""

    @property
    def machine(self) -> str | None:
        """What the failure counts against; None: no machine."""
        return self.host or self.node

    def __str__(self) -> str:
        """Return the cause as people say it."""
        if self.kind is Kind.NODE_LOST:
            return f"lost {self.node}"
        where = f" on {self.node}" if self.node else ""
        return f"worker failed{where}: {self.detail}"


def settle_s(failure: Failure) -> float:
    """Return how long the others' reports are worth waiting for, in seconds.

    Dead or hung workers say all at once. An error may be shared, and what to do then differs.
    """
    if failure.kind is Kind.COLLATERAL:
        return COLLATERAL_SETTLE_S
    return SETTLE_S if _may_be_of_all(failure) else 0.0


def gather(held: WorkersFailed | None, report: WorkersFailed) -> tuple[WorkersFailed, bool]:
    """Return what a node has to say of its failed workers, and whether to wait for more.

    Args:
        held: what it had to say before the newest failure; None: nothing.
        report: the newest.
    """
    waits = report.failure.kind is Kind.COLLATERAL or _may_be_of_all(report.failure)
    if held is None:
        return report, waits
    consequence = report.failure.kind is Kind.COLLATERAL
    if held.failure.kind is Kind.COLLATERAL:
        return (held if consequence else report), waits
    if _key(held) == _key(report) and held.step == report.step:
        held = replace(held, alike=held.alike + 1)
    return held, waits


def _key(report: WorkersFailed) -> tuple[Kind, str]:
    return report.failure.kind, signature(report.failure.detail)


def _may_be_of_all(failure: Failure) -> bool:
    shared = (*OF_THE_PROGRAM, Kind.NODE_FAULT, Kind.INFRASTRUCTURE, Kind.SERVICE)
    return failure.kind in shared and not failure.sure


def causes(lost: Sequence[str], reports: Reports, num_members: int) -> list[Culprit]:
    """Return all that ended an epoch, each node and error once.

    Lost nodes come first; failures that are but echoes of a lost node say nothing more.

    Args:
        lost: nodes that died.
        reports: what the others said, if anything.
        num_members: nodes of the epoch.
    """
    found = [
        Culprit(node, Kind.NODE_LOST, Action.RESTART, "node lost", 0)
        for node in dict.fromkeys(lost)
    ]
    primary = [item for item in reports if item[1].failure.kind is not Kind.COLLATERAL]
    if not primary:
        if reports and not found:
            first = reports[0][1]
            found.append(
                Culprit(None, Kind.COLLATERAL, Action.RESTART, first.failure.detail, first.step)
            )
        return found
    if (shared := _shared(primary, num_members, alone=not found)) is not None:
        return [*found, shared]
    bad = {node: report for node, report in reversed(primary) if _is_bad(report)}
    if bad:  # a bad node makes any error elsewhere
        return found + [
            Culprit(node, report.failure.kind, Action.EVICT, report.failure.detail, report.step)
            for node, report in sorted(bad.items(), key=lambda item: str(item[0]))
        ]
    # Who knows that a restart cannot help is believed before others.
    primary.sort(key=lambda item: not item[1].failure.sure)
    return [*found, _first(primary, num_members)]


def _is_bad(report: WorkersFailed) -> bool:
    failure = report.failure
    if failure.kind is Kind.CORRUPTION:
        return failure.action is Action.EVICT
    return failure.kind is Kind.NODE_FAULT


def _shared(primary: Reports, num_members: int, *, alone: bool) -> Culprit | None:
    """Return the error that most nodes have, if any: a user's is not tried again.

    Of the program it is only when nothing else has happened (`alone`, and all errors alike):
    whatever else went wrong may have caused it.
    """
    groups: dict[tuple[Kind, str], dict[str | None, WorkersFailed]] = defaultdict(dict)
    for node, report in primary:
        groups[_key(report)].setdefault(node, report)
    (kind, _), group = max(groups.items(), key=lambda item: len(item[1]))
    first = next(iter(group.values()))
    detail, steps = first.failure.detail, {report.step for report in group.values()}
    if num_members == 1:
        most = first.alike == first.of > 1
        where = f"all {first.of} workers"
    else:
        most = len(group) > 1 and 2 * len(group) > num_members
        where = f"{len(group)} of {num_members} nodes"
    if not most:
        return None
    if kind in OF_THE_PROGRAM:
        if len(groups) == len(steps) == 1 and alone and names_an_error(detail):
            said = f"the same error on {where} at step {first.step}: {detail}"
            return Culprit(None, kind, Action.STOP, said, first.step)
        return None
    if kind in (Kind.NODE_FAULT, Kind.INFRASTRUCTURE, Kind.SERVICE) and num_members > 1:
        said = f"on {where} at once: {detail}"
        return Culprit(None, Kind.INFRASTRUCTURE, Action.RESTART, said, first.step)
    return None


def _first(primary: Reports, num_members: int) -> Culprit:
    """Return the first failure, and whether it is that of its node."""
    node, first = primary[0]
    failure = first.failure
    alike = {name for name, report in primary if _key(report) == _key(first)}
    blamed, action = node, failure.action
    if failure.kind in OF_THE_PROGRAM and len(alike) > 1:
        blamed = None
    if failure.kind is Kind.CORRUPTION:
        blamed = None  # one of those that differ, but which?
    if num_members == 1 and failure.kind is not Kind.NODE_FAULT:
        blamed = None  # nothing tells the only node from the program
    if failure.kind is Kind.USER_ERROR and not failure.sure and num_members > 1 == len(alike):
        action = Action.RESTART  # the others can do what this node cannot: a file, a library
    return Culprit(blamed, failure.kind, action, failure.detail, first.step)
