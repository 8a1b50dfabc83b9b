"""Which of many findings is the root cause, and what to do. Pure.

The nearest to the cause wins: what the kernel says before what a program raises, that before
time-outs, those before "connection closed by peer", those before summaries (`signatures.Rank`).
Among equals the earliest wins. What training went on after is not blamed, nor is a warning
unless something failed. Where nothing is found, all is well only if something shows it. Of a run of
ours the agents' record says what failed first and where; its logs may say why.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from elastic_trainer.record.failures import EXIT_DONE, EXIT_SAVED
from elastic_trainer.record.signatures import FailureClass, Rank, Remedy, classes
from launcher.doctor.scan import LogLine, Match, Scanned, TimedOut

HEALTHY: Final = "healthy"
UNKNOWN: Final = "unknown"
_EVIDENCE: Final = 5
_BEFORE_S: Final = 600.0
_AFTER_S: Final = 300.0
"""A fault of the machine explains a failure from 10 min before to 5 min after it (Meta's RSC)."""
_COMPARABLE_S: Final = 200 * 86400.0
"""Times further apart are of logs without a year, and say nothing."""
_RECORDED: Final = 0.9
"""Confidence in what the agents recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What went wrong, and what to do."""

    name: str
    """Class; "healthy": something shows that all is well; "unknown": nothing shows
    whether it is."""
    title: str
    action: Remedy
    confidence: float
    """0 to 1: how sure the class is."""
    why: str
    fix: str = ""
    rank: int | None = None
    node: str | None = None
    """First failing rank and its node, where known."""
    evidence: tuple[LogLine, ...] = ()
    also: tuple[str, ...] = ()
    """Other classes seen, which are consequences or were survived."""
    runbook: str | None = None
    unread: tuple[str, ...] = ()
    """What could not be read, with the reason."""
    survived: bool = False
    """The run went on after it, or ended well."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "class": self.name,
            "title": self.title,
            "action": str(self.action),
            "confidence": round(self.confidence, 2),
            "why": self.why,
            "fix": self.fix or None,
            "first_rank": self.rank,
            "first_node": self.node,
            "evidence": [
                {"file": each.file, "line": each.line, "text": each.text} for each in self.evidence
            ],
            "also": list(self.also),
            "runbook": self.runbook,
            "unread": list(self.unread),
            "survived": self.survived,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A failure of a run, as its agents recorded it."""

    found: Match
    places: frozenset[str]
    """Names of its node and machine; empty: not known."""
    epoch: int
    collateral: bool = False
    """Only a peer's failure is known to be behind it."""
    recovered_s: float | None
    """Until the next step was completed; None: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsRecord:
    """What the agents of a run recorded."""

    failures: Sequence[Recorded] = ()
    """Sorted by time."""
    code: int | None = None
    """Exit code of the attempt; None: it has not ended, or nobody knows."""
    trains: bool = False
    """Some step was completed."""

    @property
    def went_on(self) -> bool:
        """Whether nothing that is recorded keeps the run from its goal."""
        if self.code is not None:
            return self.code in (EXIT_DONE, EXIT_SAVED)
        return bool(self.failures) and not self.open

    @property
    def open(self) -> list[Recorded]:
        """The failures of the newest epoch that was not recovered from."""
        if self.code in (EXIT_DONE, EXIT_SAVED):
            return []
        found = [each for each in self.failures if each.recovered_s is None]
        return [each for each in found if each.epoch == found[-1].epoch]


@dataclass(slots=True)
class _Evidence:
    found: list[Match] = field(default_factory=list)
    survived: list[Match] = field(default_factory=list)


def judge(logs: Sequence[Scanned], record: AgentsRecord | None = None) -> Diagnosis:
    """Return the root cause of what `logs`, and the record of the run they are of, tell."""
    record = record or AgentsRecord()
    seen = _sorted_out(logs, record)
    failed = [each for each in seen.found if not each.warned]
    if failed and any(each.signature.action is not Remedy.NONE for each in failed):
        failed += [each for each in seen.found if each.warned]
    failed = _near_in_time(failed)
    told = [each.found for each in record.failures]
    if record.open:
        first = min(record.open, key=lambda each: (each.collateral, each.found.t_unix or 0.0))
        others = [*seen.found, *seen.survived, *told]
        return _of_record(first, logs, seen.found, others, survived=False)
    if record.went_on:
        last = record.failures[-1] if record.failures else None
        failed = [
            each
            for each in failed
            if each.signature.action is not Remedy.NONE
            and (last is None or not _may_explain(each, last))
        ]
        if last is not None and not failed:
            lines = [*seen.found, *seen.survived]
            return _of_record(last, logs, lines, [*lines, *told], survived=True)
    if not failed:
        return _same_samples(logs) or _no_failure(logs, seen, record)
    root = min(failed, key=_order)
    alike = sorted((each for each in failed if each.signature.of is root.signature.of), key=_order)
    return _diagnosis(root, alike, logs, [*failed, *seen.survived])


def _of_record(
    recorded: Recorded,
    logs: Sequence[Scanned],
    lines: Sequence[Match],
    others: Sequence[Match],
    *,
    survived: bool,
) -> Diagnosis:
    """Return the diagnosis of a recorded failure, with what the logs add about its cause."""
    own = recorded.found
    nearer = [
        each
        for each in lines
        if not each.warned
        and each.signature.rank < own.signature.rank
        and _may_explain(each, recorded)
    ]
    root = min([own, *nearer], key=_order)
    same = [
        each for each in lines if each.signature.of is root.signature.of and not each.warned
        and (each is root or _in_place(each, recorded))
    ]  # fmt: skip
    alike = [root, *sorted((each for each in same if each is not root), key=_order)]
    found = _diagnosis(root, alike, logs, others)
    node = own.node if root is own or root.node is None else root.node
    rank = own.rank if root is own or root.rank is None else root.rank
    shown = found.evidence if own in found.evidence else (*found.evidence[: _EVIDENCE - 1], own)
    why = found.why
    if survived:
        after = recorded.recovered_s
        why += " The run went on" + (f" {after:.1f} s later." if after else ".")
    return replace(
        found,
        rank=rank if found.rank is None or root is own else found.rank,
        node=node,
        why=why,
        evidence=shown,
        survived=survived,
        confidence=max(found.confidence, _RECORDED),
    )


def _in_place(each: Match, recorded: Recorded) -> bool:
    own = recorded.found
    if each.node is not None and recorded.places and each.node not in recorded.places:
        return False
    return each.rank is None or own.rank is None or each.rank == own.rank


def _may_explain(each: Match, recorded: Recorded) -> bool:
    """Whether a line of the logs may say why what is recorded happened."""
    own = recorded.found
    if each.t_unix is not None and own.t_unix is not None:
        late = each.t_unix - own.t_unix
        if abs(late) < _COMPARABLE_S and not -_BEFORE_S <= late <= _AFTER_S:
            return False
    if _in_place(each, recorded):
        return True
    # A bare exit or a stall may have its cause on another rank.
    return own.signature.rank >= Rank.SIGN and each.signature.rank <= Rank.ERROR


def _diagnosis(
    root: Match,
    alike: Sequence[Match],
    logs: Sequence[Scanned],
    lines: Iterable[Match],
) -> Diagnosis:
    others = dict.fromkeys(
        each.signature.of.name for each in lines if each.signature.of is not root.signature.of
    )
    of, why, action = root.signature.of, root.signature.why, root.signature.action
    rank, node = _first_place(root, alike)
    if of.name in ("nccl_timeout", "hang"):
        why, action, rank = _explained(logs, why, action, rank)
    same = _same_samples(logs)
    if same is not None and root.signature.rank >= Rank.SIGN:
        return same
    return Diagnosis(
        name=of.name,
        title=of.title,
        action=action,
        confidence=_confidence(root, alike, others),
        why=why,
        fix=of.fix,
        rank=rank,
        node=node,
        evidence=_shown(alike),
        also=tuple(others),
        runbook=of.runbook,
    )


def _sorted_out(logs: Iterable[Scanned], record: AgentsRecord) -> _Evidence:
    seen = _Evidence()
    for log in logs:
        for each in log.found:
            progressed = each.line < log.went_on
            survived = progressed and not each.signature.lasting
            if record.went_on and (record.code is not None or not each.signature.lasting):
                # Of a run that reached its end only wrong numbers count.
                survived = progressed or each.signature.action is not Remedy.ROLLBACK
            (seen.survived if survived else seen.found).append(each)
    return seen


def _order(each: Match) -> tuple[Any, ...]:
    rank: float = each.signature.rank
    if each.warned:  # what may be harmless comes after what something failed by
        rank = max(rank, Rank.SIGN) + 0.5
    # Lines without a time sort among themselves, by log and line; one line's as the table has them.
    place = list(classes()).index(each.signature.of.name)
    return (rank, each.t_unix is None, each.t_unix or 0.0, each.order, place)


def _near_in_time(failed: Sequence[Match]) -> list[Match]:
    """Leave out machine faults that are too far from the job's own failure to be its cause."""
    own = [f.t_unix for f in failed if f.signature.rank is not Rank.MACHINE and f.t_unix]
    if not own:
        return list(failed)
    first = min(own)
    return [
        each
        for each in failed
        if each.signature.rank is not Rank.MACHINE
        or each.t_unix is None
        or abs(each.t_unix - first) > _COMPARABLE_S
        or -_BEFORE_S <= each.t_unix - first <= _AFTER_S + max(own) - first
    ]


def _shown(alike: Sequence[Match]) -> tuple[Match, ...]:
    """Return the first lines of evidence, each once, none weaker than the root's."""
    lines = {each.order: each for each in reversed(alike)}
    best = alike[0].signature.rank
    shown = sorted((each for each in lines.values() if each.signature.rank == best), key=_order)
    return tuple(shown[:_EVIDENCE])


def _first_place(root: Match, alike: Sequence[Match]) -> tuple[int | None, str | None]:
    rank = next((f.rank for f in (root, *alike) if f.rank is not None), None)
    node = next((f.node for f in (root, *alike) if f.node is not None), None)
    return rank, node


def _confidence(root: Match, alike: Sequence[Match], others: Collection[str]) -> float:
    base = {
        Rank.MACHINE: 0.95,
        Rank.CAUSE: 0.9,
        Rank.ERROR: 0.75,
        Rank.SIGN: 0.6,
        Rank.CONSEQUENCE: 0.5,
        Rank.SUMMARY: 0.4,
    }[root.signature.rank]
    return max(
        0.1, base - 0.02 * min(len(others), 5) + 0.01 * min(len(alike), 4) - 0.2 * root.warned
    )


def _no_failure(logs: Sequence[Scanned], seen: _Evidence, record: AgentsRecord) -> Diagnosis:
    """Return that all is well where something shows it, else that nobody can tell."""
    if not (record.went_on or record.trains):
        suspects = [line for log in logs for line in log.suspects]
        if not any(log.went_on for log in logs):
            suspects += [each for each in seen.found if each.warned]
        if suspects or not any(log.signs for log in logs):
            return _unknown(logs, suspects)
    passed = sorted({each.signature.of.name for each in (*seen.survived, *seen.found)})
    why = "No failure found."
    if passed:
        why += f" Signs of {', '.join(passed)}, which training went on after."
    trained = record.went_on or record.trains or any(log.went_on for log in logs)
    return Diagnosis(
        name=HEALTHY,
        title="Healthy",
        action=Remedy.NONE,
        confidence=0.8 if trained else 0.5,
        why=why,
        also=tuple(passed),
    )


def _unknown(logs: Sequence[Scanned], suspects: Sequence[LogLine]) -> Diagnosis:
    """Return that the doctor does not know, with the lines that look most like errors."""
    title = "Nothing to read"
    if not any(log.num_bytes for log in logs):
        why = "nothing was written"
    elif all(log.binary for log in logs if log.num_bytes):
        why = "these files are binary, not logs"
    else:
        title = "Not known"
        why = "No line has a known failure, and none shows a step or a clean end."
        if suspects:
            why = "No line has a known failure; these look most like one."
    return Diagnosis(
        name=UNKNOWN,
        title=title,
        action=Remedy.NONE,
        confidence=0.0,
        why=why,
        fix="Give the doctor the logs of all ranks, of the batch script and of the nodes' kernels.",
        evidence=tuple(suspects[:_EVIDENCE]),
    )


def _explained(
    logs: Iterable[Scanned], why: str, action: Remedy, rank: int | None
) -> tuple[str, Remedy, int | None]:
    """Say more of a collective's time-out, from what all ranks wrote about it."""
    groups: dict[str, dict[int, TimedOut]] = defaultdict(dict)
    for log in logs:
        for work in log.works:
            groups[work.group].setdefault(work.rank, work)
    for works in groups.values():
        if len(works) < 2:
            continue
        by_number: dict[int, dict[tuple[str, int | None], list[int]]] = defaultdict(dict)
        for work in works.values():
            call = (work.operation, work.elements)
            by_number[work.number].setdefault(call, []).append(work.rank)
        for number, calls in sorted(by_number.items()):
            if len(calls) > 1:
                text = "; ".join(
                    f"rank {_ranks(ranks)}: {operation}" + (f" of {n} elements" if n else "")
                    for (operation, n), ranks in calls.items()
                )
                said = (
                    f"Ranks call different collectives as number {number} ({text}): a branch of "
                    "the program depends on the rank (saving, evaluating or logging on one rank "
                    "only, an uneven number of batches)."
                )
                fewest = min(calls.values(), key=len)
                return said, Remedy.FIX_USER, min(fewest)
        numbers = {each.rank: each.enqueued or each.number for each in works.values()}
        least = min(numbers.values())
        if least < max(numbers.values()):
            late = [each for each, number in numbers.items() if number == least]
            said = (
                f"Rank {_ranks(late)} is at collective {least}, others at "
                f"{max(numbers.values())}: the others wait for it. {why}"
            )
            return said, action, min(late)
        missing = sorted(set(range(max(works) + 1)) - set(works))
        if missing and len(missing) < len(works):
            said = (
                f"Rank {_ranks(missing)} did not run out of time in the collective that the "
                f"others wait in: it never joined. {why}"
            )
            return said, action, missing[0]
    return why, action, rank


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _same_samples(logs: Sequence[Scanned]) -> Diagnosis | None:
    """Return the diagnosis of ranks that read the same data, if at least two steps show it."""
    by_step: dict[int, dict[int, str]] = defaultdict(dict)
    for log in logs:
        for (rank, step), value in log.samples.items():
            by_step[step][rank] = value
    several = [ranks for ranks in by_step.values() if len(ranks) > 1]
    if len(several) < 2 or any(len(set(ranks.values())) > 1 for ranks in several):
        return None
    if len({next(iter(ranks.values())) for ranks in several}) == 1:
        return None  # a constant, as the path of the data
    of: FailureClass = classes()["same_data"]
    return Diagnosis(
        name=of.name,
        title=of.title,
        action=of.action,
        confidence=0.85,
        why=f"{len(several)} steps: ranks {_ranks(list(several[0]))} read the same. {of.why}",
        fix=of.fix,
        rank=min(several[0]),
        runbook=of.runbook,
    )
