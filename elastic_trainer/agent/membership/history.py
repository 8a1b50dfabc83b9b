"""Is it enough: the failures of a job, its budgets, and what follows each. Pure.

Failures are attributed to a node first (`cause.py`); only then is a job-wide budget charged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from elastic_trainer.agent.membership.cause import NEVER_THE_NODES, OF_THE_PROGRAM, Culprit
from elastic_trainer.agent.membership.messages import PastFailure
from elastic_trainer.agent.membership.notices import named
from elastic_trainer.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    Action,
    Kind,
    signature,
)

PUT_OUT_FOR_NOTHING: Final = 2
"""Machines put out for one and the same failure without progress; on a third it follows the job."""

LONGEST_BACKOFF_S: Final = 60.0

_OF_WORKERS: Final = (*OF_THE_PROGRAM, Kind.HANG, Kind.KILLED)
_NO_STRIKE: Final = (*NEVER_THE_NODES, Kind.SERVICE, Kind.NODE_LOST)
"""Failures that cost no node its place: the program's own, a service's, and the loss of a node,
which may come back sound."""
_SHARED: Final = (Kind.INFRASTRUCTURE, Kind.SERVICE, Kind.COLLATERAL)
"""Failures of what nodes share: time may mend them, a restart at once may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From the job's `elastic:` section; counts within the last `window_s` seconds."""

    max_restarts: int
    """Restarts of any class: lost nodes, killed workers, storage, network, and the two below."""
    window_s: float
    node_failures: int
    """Failures that cost a node its place."""
    max_crashes: int = 10
    """Restarts after errors of the program, memory included."""
    max_hangs: int = 20
    no_progress: int = 3
    """Failures of the program, or hangs, without a newly committed step between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to do after a failure."""

    evict: str | None = None
    """Machine that leaves, with `reason`."""
    stop_code: int | None = None
    """The job ends with this code."""
    reason: str = ""


_Entry = tuple[float, PastFailure]


@dataclass(frozen=True, slots=True)
class History:
    """Failures of the job, with the time (this machine's monotonic seconds) of each.

    Those of one moment are one incident: a rack that dies costs one restart.
    """

    entries: tuple[_Entry, ...] = ()

    def add(self, found: Culprit, now: float, progress: int | None = None) -> History:
        """Return the history with one more failure.

        Args:
            found: the failure.
            now: when.
            progress: newest committed step; None: nobody knows (a script of others).
        """
        entry = PastFailure(
            node=found.node,
            host=found.machine,
            kind=found.kind.value,
            detail=found.detail,
            step=found.step,
            age_s=0.0,
            progress=progress,
        )
        return History((*self.entries, (now, entry)))

    @property
    def progress(self) -> int | None:
        """Newest committed step of which a failure told."""
        return max((e.progress for _, e in self.entries if e.progress is not None), default=None)

    def without(self, host: str) -> History:
        """Return the history without the failures of a machine, which the operator has mended."""
        return History(tuple(item for item in self.entries if item[1].host != host))

    def within(self, window_s: float, now: float) -> History:
        """Return the history without what no limit counts any more."""
        return History(tuple(item for item in self.entries if now - item[0] <= window_s))

    def verdict(
        self, found: Culprit, limits: Limits, now: float, barred: Collection[str] = ()
    ) -> Verdict:
        """Decide what follows the newest failure `found`, which `add` has put in already.

        Failures of `barred` machines are not charged to the job, but they stay evidence: a
        program that fails wherever one rank goes must not cost one machine after the other.
        """
        recent = self.within(limits.window_s, now).entries
        if found.action is Action.STOP:
            return Verdict(stop_code=EXIT_DO_NOT_RESTART, reason=found.detail)
        if reason := _follows_the_job(recent, found, barred):
            return Verdict(stop_code=EXIT_DO_NOT_RESTART, reason=reason)
        if reason := _is_bad_node(recent, found, limits):
            return Verdict(evict=found.machine, reason=reason)
        charged = [item for item in recent if item[1].host not in barred]
        if reason := _stands_still(charged, found, limits):
            return Verdict(stop_code=EXIT_DO_NOT_RESTART, reason=reason)
        if reason := _overdrawn(charged, found, limits):
            return Verdict(stop_code=EXIT_BUDGET_USED_UP, reason=reason)
        return Verdict(reason=found.detail)

    def backoff_s(self) -> float:
        """Return how long to wait before the next epoch: 0, 0, 2, 4, … 60 s.

        Only where what all nodes share has failed again without progress: a storage that is
        gone for minutes must not use up a budget in seconds.
        """
        incidents: set[float] = set()
        for when, entry in reversed(self.entries):
            if Kind(entry.kind) not in _SHARED or entry.progress != self.entries[-1][1].progress:
                break
            incidents.add(when)
        return 0.0 if len(incidents) < 2 else min(2.0 ** (len(incidents) - 1), LONGEST_BACKOFF_S)

    def to_wire(self, now: float) -> tuple[PastFailure, ...]:
        """Return entries with ages instead of times: clocks differ between machines."""
        return tuple(replace(entry, age_s=round(now - when, 3)) for when, entry in self.entries)

    @classmethod
    def from_wire(cls, entries: tuple[PastFailure, ...], now: float) -> History:
        """Invert `to_wire` on another machine's clock."""
        return cls(tuple((now - entry.age_s, entry) for entry in entries))


def _incidents(entries: Iterable[_Entry]) -> int:
    """Count the moments at which something failed."""
    return len({when for when, _ in entries})


def _follows_the_job(recent: Sequence[_Entry], found: Culprit, barred: Collection[str]) -> str:
    """Say why a failure would come back on any node, or return an empty string."""
    if found.kind not in _OF_WORKERS:
        return ""
    sign = signature(found.detail)
    alike = [e for _, e in recent if e.kind == found.kind and signature(e.detail) == sign]
    at_step = _machines(e for e in alike if e.step == found.step)
    if found.kind in OF_THE_PROGRAM and len(at_step) > 1:
        return f"the same error on {_listed(at_step)} at step {found.step}: {found.detail}"
    newest = recent[-1][1].progress if recent else None
    stuck = _machines(e for e in alike if newest is not None and e.progress == newest)
    fails_anew = found.machine in stuck.keys() - set(barred)
    if fails_anew and len(stuck.keys() & set(barred)) >= PUT_OUT_FOR_NOTHING:
        return f"the same failure on {_listed(stuck)} without progress: {found.detail}"
    return ""


def _is_bad_node(recent: Sequence[_Entry], found: Culprit, limits: Limits) -> str:
    """Say why the machine of the newest failure must leave, or return an empty string."""
    if found.node is None:
        return ""
    if found.action is Action.EVICT:
        return found.detail
    if found.kind in _NO_STRIKE:
        return ""
    times = sum(e.host == found.machine and Kind(e.kind) not in _NO_STRIKE for _, e in recent)
    enough = times >= limits.node_failures
    return f"failed {times} times, last: {found.detail}" if enough else ""


def _machines(entries: Iterable[PastFailure]) -> dict[str, str]:
    """Return the machines on which these happened, and what people call them, by the newest."""
    return {e.host: named(e.node, e.host) for e in entries if e.node and e.host}


def _all_on_one(entries: Sequence[_Entry]) -> str:
    """Say that all these happened on one machine, for whoever decides whether it is to blame."""
    if any(e.host is None for _, e in entries):
        return ""
    machines = _machines(e for _, e in entries)
    return f", all on {_listed(machines)}" if len(machines) == 1 < len(entries) else ""


def _listed(machines: Mapping[str, str]) -> str:
    return ", ".join(sorted(machines.values()))


def _stands_still(charged: list[_Entry], found: Culprit, limits: Limits) -> str:
    """Say that the program fails again and again at one place, or return an empty string."""
    kinds = (*OF_THE_PROGRAM, Kind.HANG, Kind.CORRUPTION)
    newest = charged[-1][1].progress if charged else None
    if found.kind not in kinds or newest is None:
        return ""
    same = [(t, e) for t, e in charged if e.progress == newest and Kind(e.kind) in kinds]
    failures = _incidents(same)
    if failures < limits.no_progress:
        return ""
    return (
        f"{failures} failures without progress since step {newest} was committed "
        f"(elastic.no_progress allows {limits.no_progress - 1}){_all_on_one(same)}; "
        f"last: {found.detail}"
    )


def _overdrawn(charged: list[_Entry], found: Culprit, limits: Limits) -> str:
    """Say which budget is used up, or return an empty string."""
    classes: tuple[tuple[str, str, tuple[Kind, ...], int], ...] = (
        ("restarts after errors of the program", "max_crashes", OF_THE_PROGRAM, limits.max_crashes),
        ("restarts after hangs", "max_hangs", (Kind.HANG,), limits.max_hangs),
        ("restarts", "max_restarts", tuple(Kind), limits.max_restarts),
    )
    for what, key, kinds, allowed in classes:
        counted = [item for item in charged if Kind(item[1].kind) in kinds]
        used = _incidents(counted)
        if found.kind in kinds and used > allowed:
            return (
                f"{used} {what} within {limits.window_s:.0f} s, "
                f"elastic.{key} allows {allowed}{_all_on_one(counted)}; last: {found.detail}"
            )
    return ""
