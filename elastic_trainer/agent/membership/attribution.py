"""Failure attribution: what ended an epoch, what that counts against, and what follows. Pure.

A failure is attributed to a machine first (`attribute`); only then is a budget of the job charged
(`History.consequence`). `attribute_end` does both for the end of an epoch. All rules:
docs/failures.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from elastic_trainer.agent.membership.messages import PastFailure
from elastic_trainer.agent.membership.notices import WorkersFailed, named
from elastic_trainer.agent.membership.table import Members
from elastic_trainer.board.state import Sizes
from elastic_trainer.plan.config import ElasticSection
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    Action,
    Failure,
    Kind,
    names_an_error,
    signature,
)

NOT_OF_A_NODE: Final = (Kind.CRASH, Kind.USER_ERROR, Kind.OUT_OF_MEMORY)
"""What a program does to itself: however often one node has it, that node is healthy."""
OF_THE_PROGRAM: Final = (*NOT_OF_A_NODE, Kind.FAULT)
"""What a program may have done."""

COLLATERAL_SETTLE_S: Final = 0.1
"""How long to wait for the cause when the first word is that of a consequence."""
SETTLE_S: Final = 0.5
"""How long to wait for the other nodes' errors: one that all have is not one node's."""

Reports = Sequence[tuple[str | None, WorkersFailed]]
"""(node, report) in the order of arrival; node None: nobody could be named."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """The failure that ended an epoch, and the node it is attributed to; None: not one node's."""

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
    """Return how many seconds the others' reports are worth waiting for: an error may be shared."""
    if failure.kind is Kind.COLLATERAL:
        return COLLATERAL_SETTLE_S
    shared = (*OF_THE_PROGRAM, Kind.NODE_FAULT, Kind.INFRASTRUCTURE, Kind.SERVICE)
    return SETTLE_S if failure.kind in shared and not failure.sure else 0.0


def gather(held: WorkersFailed | None, report: WorkersFailed) -> tuple[WorkersFailed, bool]:
    """Return what a node says of its failed workers (`held`: so far), and whether to wait."""
    waits = settle_s(report.failure) > 0
    if held is None:
        return report, waits
    if held.failure.kind is Kind.COLLATERAL:
        return (held if report.failure.kind is Kind.COLLATERAL else report), waits
    if _key(held) == _key(report) and held.step == report.step:
        held = replace(held, alike=held.alike + 1)
    return held, waits


def _key(report: WorkersFailed) -> tuple[Kind, str]:
    return report.failure.kind, signature(report.failure.detail)


def attribute(lost: Sequence[str], reports: Reports, num_members: int) -> list[Attribution]:
    """Return all that ended an epoch, each node and error once.

    Lost nodes come first; failures that only echo a lost node say nothing more.
    """
    found = [_loss(node) for node in dict.fromkeys(lost)]
    primary = [item for item in reports if item[1].failure.kind is not Kind.COLLATERAL]
    if not primary:
        if reports and not found:
            first = reports[0][1]
            detail = first.failure.detail
            return [Attribution(None, Kind.COLLATERAL, Action.RESTART, detail, first.step)]
        return found
    if (shared := _shared(primary, num_members, alone=not found)) is not None:
        return [*found, shared]
    bad = {node: report for node, report in reversed(primary) if _is_bad(report)}
    if bad:  # a bad node makes any error elsewhere
        return found + [
            Attribution(node, report.failure.kind, Action.EVICT, report.failure.detail, report.step)
            for node, report in sorted(bad.items(), key=lambda item: str(item[0]))
        ]
    # Who knows that a restart cannot help is believed before others.
    primary.sort(key=lambda item: not item[1].failure.sure)
    return [*found, _first(primary, num_members)]


def _loss(node: str, host: str | None = None) -> Attribution:
    return Attribution(node, Kind.NODE_LOST, Action.RESTART, "node lost", 0, host)


def _is_bad(report: WorkersFailed) -> bool:
    failure = report.failure
    if failure.kind is Kind.CORRUPTION:
        return failure.action is Action.EVICT
    return failure.kind is Kind.NODE_FAULT


def _shared(primary: Reports, num_members: int, *, alone: bool) -> Attribution | None:
    """Return the error that most nodes have, if any: a user's is not tried again.

    The program is blamed only if nothing else went wrong (`alone`, and all errors alike).
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
            return Attribution(None, kind, Action.STOP, said, first.step)
        return None
    if kind in (Kind.NODE_FAULT, Kind.INFRASTRUCTURE, Kind.SERVICE) and num_members > 1:
        said = f"on {where} at once: {detail}"
        return Attribution(None, Kind.INFRASTRUCTURE, Action.RESTART, said, first.step)
    return None


def _first(primary: Reports, num_members: int) -> Attribution:
    """Return the first failure, and whether it is that of its node."""
    node, first = primary[0]
    failure = first.failure
    alike = {name for name, report in primary if _key(report) == _key(first)}
    charged, action = node, failure.action
    if failure.kind in OF_THE_PROGRAM and len(alike) > 1:
        charged = None
    if failure.kind is Kind.CORRUPTION:
        charged = None  # one replica is wrong, but which?
    if num_members == 1 and failure.kind is not Kind.NODE_FAULT:
        charged = None  # nothing tells the only node from the program
    if failure.kind is Kind.USER_ERROR and not failure.sure and num_members > 1 == len(alike):
        action = Action.RESTART  # the others can do what this node cannot: a file, a library
    return Attribution(charged, failure.kind, action, failure.detail, first.step)


# --- budgets ---------------------------------------------------------------------------

EXCLUDED_IN_VAIN: Final = 2
"""Machines excluded for one and the same failure without progress: on a third it is the job's."""

LONGEST_BACKOFF_S: Final = 60.0

QUARANTINE_S: Final = 60.0
"""After its second loss a machine takes no part for so long, after each further one twice as long,
at most LONGEST_QUARANTINE_S."""
LONGEST_QUARANTINE_S: Final = 3600.0

_OF_WORKERS: Final = (*OF_THE_PROGRAM, Kind.HANG, Kind.KILLED)
_NO_STRIKE: Final = (*NOT_OF_A_NODE, Kind.SERVICE, Kind.NODE_LOST)
"""Failures that cost no node its place: the program's own, a service's, and the loss of a node,
which may come back sound."""
_SHARED: Final = (Kind.INFRASTRUCTURE, Kind.SERVICE, Kind.COLLATERAL)
"""Failures of what nodes share: time may fix them, a restart at once may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consequence:
    """What to do after a failure."""

    exclude: str | None = None
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

    def add(
        self, found: Attribution, now: float, progress: int | None = None, unstepped: int = 0
    ) -> History:
        """Return the history with one more failure.

        `progress` is the newest committed step (None: of a script nobody knows), `unstepped` the
        number of nodes of an epoch that had not completed a step (0: it had).
        """
        entry = PastFailure(
            node=found.node,
            host=found.machine,
            kind=found.kind.value,
            detail=found.detail,
            step=found.step,
            age_s=0.0,
            progress=progress,
            unstepped=unstepped,
        )
        return History((*self.entries, (now, entry)))

    @property
    def progress(self) -> int | None:
        """Newest committed step that a failure reported."""
        return max((e.progress for _, e in self.entries if e.progress is not None), default=None)

    def add_loss(self, node: str, host: str, now: float) -> History:
        """Return the history with the loss of a node that ran no workers."""
        return self.add(_loss(node, host), now, self.progress)

    def losses(self) -> dict[str, list[float]]:
        """Return when each machine was lost alone, where that happened.

        Several at one moment are a matter of what they share: a rack, a switch.
        """
        lost: dict[float, set[str]] = defaultdict(set)
        for when, entry in self.entries:
            if entry.kind == Kind.NODE_LOST and entry.host is not None:
                lost[when].add(entry.host)
        times: dict[str, list[float]] = defaultdict(list)
        for when, hosts in lost.items():
            if len(hosts) == 1:
                times[hosts.pop()].append(when)
        return times

    def quarantined(self, now: float) -> dict[str, float]:
        """Return the machines that were lost again and again, and until when they take no part."""
        until = {
            host: times[-1] + min(QUARANTINE_S * 2.0 ** (len(times) - 2), LONGEST_QUARANTINE_S)
            for host, times in self.losses().items()
            if len(times) > 1
        }
        return {host: end for host, end in until.items() if end > now}

    def without(self, host: str) -> History:
        """Return the history without the failures of a machine, which the operator has repaired."""
        return History(tuple(item for item in self.entries if item[1].host != host))

    def within(self, window_s: float, now: float) -> History:
        """Return the history without what no limit counts any more."""
        return History(tuple(item for item in self.entries if now - item[0] <= window_s))

    def consequence(
        self, found: Attribution, limits: ElasticSection, now: float, excluded: Collection[str] = ()
    ) -> Consequence:
        """Decide what follows the newest failure `found`, which `add` has put in already.

        Failures of `excluded` machines are not charged to the job, but they stay evidence: a
        program that fails wherever one rank goes must not cost one machine after the other. Nor
        are the losses of a machine that is lost again and again: it is kept out (`quarantined`).
        """
        recent = self.within(limits.window_s, now).entries
        if found.action is Action.STOP:
            return Consequence(stop_code=EXIT_DO_NOT_RESTART, reason=found.detail)
        if reason := _follows_the_job(recent, found, excluded):
            return Consequence(stop_code=EXIT_DO_NOT_RESTART, reason=reason)
        if reason := _is_bad_node(recent, found, limits):
            return Consequence(exclude=found.machine, reason=reason)
        again = {host for host, times in self.losses().items() if len(times) > 1}
        charged = [
            (when, entry)
            for when, entry in recent
            if entry.host not in excluded
            and not (entry.kind == Kind.NODE_LOST and entry.host in again)
        ]
        if reason := _stands_still(charged, found, limits):
            return Consequence(stop_code=EXIT_DO_NOT_RESTART, reason=reason)
        if reason := _overdrawn(charged, found, limits):
            return Consequence(stop_code=EXIT_BUDGET_USED_UP, reason=reason)
        return Consequence(reason=found.detail)

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
    return len({when for when, _ in entries})


def _follows_the_job(
    recent: Sequence[_Entry], found: Attribution, excluded: Collection[str]
) -> str:
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
    fails_anew = found.machine in stuck.keys() - set(excluded)
    if fails_anew and len(stuck.keys() & set(excluded)) >= EXCLUDED_IN_VAIN:
        return f"the same failure on {_listed(stuck)} without progress: {found.detail}"
    return ""


def _is_bad_node(recent: Sequence[_Entry], found: Attribution, limits: ElasticSection) -> str:
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
    """Say that all these happened on one machine, for whoever decides whether it is the cause."""
    if any(e.host is None for _, e in entries):
        return ""
    machines = _machines(e for _, e in entries)
    return f", all on {_listed(machines)}" if len(machines) == 1 < len(entries) else ""


def _listed(machines: Mapping[str, str]) -> str:
    return ", ".join(sorted(machines.values()))


def _stands_still(charged: list[_Entry], found: Attribution, limits: ElasticSection) -> str:
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


def _overdrawn(charged: list[_Entry], found: Attribution, limits: ElasticSection) -> str:
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


# --- the end of an epoch ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """What is known of an epoch that has ended."""

    members: Sequence[str]
    """Ids of the agents that ran workers."""
    everyone: Members
    lost: Sequence[str]
    """Nodes that died."""
    left: Collection[str]
    """Nodes that were asked to go: their loss is nobody's failure."""
    reports: Reports
    committed: Sequence[int]
    """Steps of the checkpoints on storage."""
    stepped: bool = True
    """It had completed a step, as far as known."""
    sizes: Sizes = field(default_factory=Sizes)
    """On how many nodes the run was tried before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """What the end of an epoch comes to."""

    reason: str
    """Why the next epoch begins, for people."""
    history: History
    consequences: tuple[tuple[Attribution, Consequence], ...]
    """One for each failure, in order; each counts those before it."""
    drops: int | None = None
    """So many nodes are not tried any more: what failed is their layout. Nothing else follows."""


def attribute_end(
    end: EpochEnd, history: History, limits: ElasticSection, now: float, excluded: Collection[str]
) -> Ruling | None:
    """Attribute what ended an epoch to machines or the job; None: nothing has failed.

    `history` has the failures before it; `excluded` machines may take part no more.
    """
    found = attribute(end.lost, end.reports, len(end.members))
    if not found:
        return None
    size = len(end.members)
    if _is_of_the_size(found, end, history):
        reason = f"{counted(size, 'node')} cannot run it: {found[0].detail}"
        return Ruling(reason=reason, history=history, consequences=(), drops=size)
    reported = (report.committed for _, report in end.reports)
    steps = [*end.committed, *reported, history.progress]
    progress = max((step for step in steps if step is not None), default=None)
    asked = [item for item in found if item.kind is Kind.NODE_LOST and item.node in end.left]
    reason = ", ".join(f"{item.node} left" if item in asked else str(item) for item in found)
    history, excluded = history.within(limits.window_s, now), set(excluded)
    consequences = []
    for each in found:
        if each in asked:
            continue
        item = _on_machine(each, end)
        history = history.add(item, now, progress, 0 if end.stepped else size)
        consequence = history.consequence(item, limits, now, excluded)
        if consequence.exclude is not None:
            excluded.add(consequence.exclude)
        consequences.append((item, consequence))
    return Ruling(reason=reason, history=history, consequences=tuple(consequences))


def _is_of_the_size(found: Sequence[Attribution], end: EpochEnd, history: History) -> bool:
    """Whether a program failed because of its number of nodes: other numbers have trained.

    It failed before its first step on all ranks alike, or twice in a row: one rank's error may
    pass.
    """
    size, trained = len(end.members), end.sizes.trained
    if end.stepped or not trained or size in (0, *trained) or len(found) != 1:
        return False
    (failure,) = found
    if failure.kind not in OF_THE_PROGRAM:
        return False
    last = history.entries[-1][1] if history.entries else None
    again = (
        last is not None
        and (last.unstepped, last.kind) == (size, failure.kind)
        and signature(last.detail) == signature(failure.detail)
    )
    return failure.action is Action.STOP or again


def _on_machine(found: Attribution, end: EpochEnd) -> Attribution:
    """Return it with the machine that the node had in the epoch that ended.

    Where all nodes share one, errors are nobody's: node and program cannot be told apart.
    """
    error = found.kind is not Kind.NODE_LOST and found.action is not Action.EVICT
    if found.node is None or (error and len(end.everyone.hosts_of(end.members)) == 1):
        return replace(found, node=None)
    return replace(found, host=end.everyone.host_of(found.node))
