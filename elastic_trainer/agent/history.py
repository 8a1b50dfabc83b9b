"""Who is to blame, and is it enough: failures, budgets and what follows. Pure.

Failures are attributed to a node first; only then is the job-wide budget charged.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from elastic_trainer.agent.messages import PastFailure
from elastic_trainer.agent.notices import WorkersFailed
from elastic_trainer.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    Action,
    Kind,
)

NO_PROGRESS_LIMIT: Final = 3
"""Failures in a row at the same step, with crashes of the program, before giving up."""

_OF_THE_PROGRAM: Final = (Kind.CRASH, Kind.USER_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From the job's `elastic:` section."""

    max_restarts: int
    window_s: float
    node_failures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do after a failure."""

    evict: str | None = None
    """Node that leaves, with `reason`."""
    stop_code: int | None = None
    """The job ends with this code."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Culprit:
    """The report that an epoch's end is blamed on; `node` None: not one node's fault."""

    node: str | None
    kind: Kind
    action: Action
    detail: str
    step: int

    def __str__(self) -> str:
        """Return the cause as people say it."""
        if self.kind is Kind.NODE_LOST:
            return f"lost {self.node}"
        where = f" on {self.node}" if self.node else ""
        return f"worker failed{where}: {self.detail}"


def causes(lost: list[str], reports: list[tuple[str, WorkersFailed]]) -> list[Culprit]:
    """Return all that ended an epoch: nodes that were lost, and the cause of its failures.

    Failures that are but echoes of a lost node say nothing more. `reports` as in `culprit`,
    but may be empty.
    """
    found = [
        Culprit(node, Kind.NODE_LOST, Action.RESTART, "node lost", 0)
        for node in dict.fromkeys(lost)
    ]
    if reports:
        worst = culprit(reports)
        if worst.kind is not Kind.COLLATERAL or not found:
            found.append(worst)
    return found


def culprit(reports: list[tuple[str, WorkersFailed]]) -> Culprit:
    """Return what the failures of one epoch come down to.

    The first failure that is not collateral is the cause. When two nodes crash with
    the same words it is the program, not a node. `reports` holds (node, report) in
    the order of arrival and is not empty.
    """
    primary = [item for item in reports if item[1].failure.kind is not Kind.COLLATERAL]
    node, first = (primary or reports)[0]
    failure = first.failure
    others = {name for name, report in primary if report.failure.detail == failure.detail}
    blamed: str | None = node
    if failure.kind is Kind.COLLATERAL or (failure.kind in _OF_THE_PROGRAM and len(others) > 1):
        blamed = None
    return Culprit(blamed, failure.kind, failure.action, failure.detail, first.step)


@dataclass(frozen=True, slots=True)
class History:
    """Failures of the job, with the time (this machine's monotonic seconds) of each."""

    entries: tuple[tuple[float, PastFailure], ...] = ()

    def add(self, found: Culprit, now: float) -> History:
        """Return the history with one more failure."""
        entry = PastFailure(
            node=found.node, kind=found.kind.value, detail=found.detail, step=found.step, age_s=0.0
        )
        return History((*self.entries, (now, entry)))

    def verdict(
        self, found: Culprit, limits: Limits, now: float, barred: Collection[str] = ()
    ) -> Verdict:
        """Decide what follows the newest failure `found`, which `add` has put in already.

        Failures of `barred` nodes are not charged to the job, but they stay evidence: a
        program that fails wherever one rank goes must not cost one node after the other.
        """
        recent = [entry for when, entry in self.entries if now - when <= limits.window_s]
        if found.action is Action.STOP:
            return Verdict(stop_code=EXIT_DO_NOT_RESTART, reason=found.detail)
        if reason := _deterministic(recent, found):
            return Verdict(stop_code=EXIT_DO_NOT_RESTART, reason=reason)
        if found.action is Action.EVICT and found.node is not None:
            return Verdict(evict=found.node, reason=found.detail)
        by_node = [e for e in recent if e.node == found.node and e.kind != Kind.NODE_LOST]
        if (
            found.node is not None
            and found.kind is not Kind.NODE_LOST
            and len(by_node) >= limits.node_failures
        ):
            return Verdict(
                evict=found.node,
                reason=f"failed {len(by_node)} times, last: {found.detail}",
            )
        charged = sum(entry.node not in barred for entry in recent)
        if charged > limits.max_restarts:
            return Verdict(
                stop_code=EXIT_BUDGET_USED_UP,
                reason=f"{charged} restarts within {limits.window_s:.0f} s, "
                f"elastic.max_restarts allows {limits.max_restarts}; last: {found.detail}",
            )
        return Verdict(reason=found.detail)

    def to_wire(self, now: float) -> tuple[PastFailure, ...]:
        """Return entries with ages instead of times: clocks differ between machines."""
        return tuple(replace(entry, age_s=round(now - when, 3)) for when, entry in self.entries)

    @classmethod
    def from_wire(cls, entries: tuple[PastFailure, ...], now: float) -> History:
        """Invert `to_wire` on another machine's clock."""
        return cls(tuple((now - entry.age_s, entry) for entry in entries))


def _deterministic(recent: list[PastFailure], found: Culprit) -> str:
    """Say why a crash would come back, or return an empty string."""
    if found.kind not in _OF_THE_PROGRAM:
        return ""
    same = [e for e in recent if e.detail == found.detail and e.step == found.step]
    nodes = {entry.node for entry in same if entry.node}
    if len(nodes) > 1:
        return f"the same error on {', '.join(sorted(nodes))} at step {found.step}: {found.detail}"
    tail = recent[-NO_PROGRESS_LIMIT:]
    if (
        found.node is None
        and len(tail) == NO_PROGRESS_LIMIT
        and all(e.step == found.step and e.kind in _OF_THE_PROGRAM for e in tail)
    ):
        return f"{NO_PROGRESS_LIMIT} failures without progress at step {found.step}: {found.detail}"
    return ""
