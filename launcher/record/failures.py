"""What failed in a run and what became of it, from the events. Pure.

One failure leaves many traces: workers of other nodes fail with it, several
nodes miss the same one, some only after the next epoch has begun. Here they
become one `RunFailure` each, with its time and its phases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import Kind
from elastic_trainer.record.signatures import Signature, signature_of
from launcher.record.event import named, node_names, number, worker_rank
from launcher.record.timeline import EpochSpan

PHASES: Final = (
    "detect",
    "abort",
    "kill_workers",
    "form_epoch",
    "fork",
    "process_group",
    "model",
    "restore",
    "first_step",
)
"""The order in which a recovery passes them (docs/events.md)."""
_ENDING_PHASES: Final = {"detect", "abort", "kill_workers"}
"""Phases that end the old epoch; they may carry its number or the new one's."""
_EVIDENCE: Final = {
    "fault.injected",
    "member.lost",
    "worker.hung",
    "worker.exit",
    "script.restarted",
    "epoch.aborted",
}
_NODE_KILLS: Final = ("kill-node", "kill-coordinator", "kill-agent")
_IF_NOTICED: Final = ("pause-node", "pause-worker", "spin-worker", "wedge-worker", "starve-worker")
_INJECTED: Final[dict[str, str]] = {
    **dict.fromkeys(_NODE_KILLS, Kind.NODE_LOST),
    **dict.fromkeys(("kill-zygote", "kill-worker"), Kind.KILLED),
    **dict.fromkeys(_IF_NOTICED, ""),
}
"""Action of an injected fault -> the kind of failure it makes; empty: none, unless noticed."""
_WEIGHT: Final = {
    Kind.NODE_LOST: 3,
    Kind.HANG: 2,
    Kind.OUT_OF_MEMORY: 2,
    Kind.NODE_FAULT: 2,
    Kind.KILLED: 1,
    "": -1,
}
"""The heaviest of the kinds that one node's failure seems to be is reported."""
EXCLUSIONS: Final = ("member.evicted", "member.readmitted")
"""Events that say which machines are excluded."""


@dataclass(slots=True, kw_only=True)
class RunFailure:
    """One node or worker that failed, and what the run made of it."""

    kind: str
    node: str | None
    host: str | None = None
    """The machine that the node was on; None: not known."""
    rank: int | None = None
    step: int
    """The newest step completed when it happened."""
    epoch: int
    next_epoch: int | None = None
    """The one that it recovered with; None: it did not."""
    injected: str | None = None
    """Action of the injected fault behind it."""
    detail: str = ""
    t: float
    """The fault's own moment when it was injected, else that of its detection."""
    detected_s: float | None = None
    recovered_s: float | None = None
    """Time to the first step completed in a later epoch; None: never."""
    phases: dict[str, float] = field(default_factory=dict)
    steps_redone: int | None = 0
    """None: nothing tells (a script's)."""
    from_scratch: bool = False
    """It did not recover its progress: a script began at its first step again."""
    lost: str = Kind.NODE_LOST
    """What the platform calls the loss of a node."""

    @property
    def signature(self) -> Signature:
        """Its class, what to do, and its runbook."""
        kind = self.lost if self.kind == Kind.NODE_LOST else self.kind
        return signature_of(kind, self.detail)

    def to_json(self, origin: float) -> dict[str, Any]:
        """Return plain JSON types; `at_s` is its time since `origin`."""
        plain = ("kind", "node", "host", "rank", "step", "epoch", "next_epoch", "injected")
        other_s = None
        if self.recovered_s is not None:
            other_s = round(max(0.0, self.recovered_s - sum(self.phases.values())), 3)
        return {
            **{name: getattr(self, name) for name in plain},
            "detail": self.detail,
            "runbook": self.signature.of.runbook,
            "at_s": round(self.t - origin, 3),
            "detected_s": None if self.detected_s is None else round(self.detected_s, 3),
            "recovered_s": None if self.recovered_s is None else round(self.recovered_s, 3),
            "phases": {phase: round(seconds, 3) for phase, seconds in self.phases.items()},
            "other_s": other_s,
            "steps_redone": self.steps_redone,
            "from_scratch": self.from_scratch,
        }


def failures(
    events: Sequence[Event], spans: Sequence[EpochSpan], lost: str = Kind.NODE_LOST
) -> list[RunFailure]:
    """Return the failures in order of time; `lost` is the platform's kind of a node's loss.

    For each epoch the evidence about it is gathered by node: injected faults,
    `member.lost`, `worker.hung`, `worker.exit`. Workers that failed only because
    a peer did are signs that something is wrong, but no failures. A node that
    was not a member when it went cost nothing: its recovery took 0 s.
    """
    came: dict[str | None, list[Event]] = defaultdict(list)
    timed: dict[int | None, list[Event]] = defaultdict(list)
    ends: list[Event] = []
    for event in events:
        if event.event == "recovery.phase":
            (ends if _is_by_time(event) else timed[event.epoch]).append(event)
        elif (who := _come(event)) is not None:
            came[who].append(event)
    found: list[RunFailure] = []
    for index, evidence in enumerate(_by_epoch(events, spans)):
        span, later = spans[index], spans[index + 1 :]
        after = next((each for each in later if each.steps), None)
        for failure in _failures_of(evidence, span, later[0].formed_t if later else inf):
            if failure.node is not None and span.members and failure.node not in span.members:
                failure.detected_s, failure.recovered_s = failure.detected_s or 0.0, 0.0
            elif after is not None:
                _measure(failure, span, after, timed[after.epoch], ends)
            before = [event for event in came[failure.node] if event.t_unix <= failure.t]
            failure.host = before[-1].fields.get("host") if before else None
            failure.lost = lost
            found.append(failure)
    return sorted(found, key=lambda failure: failure.t)


def _by_epoch(events: Iterable[Event], spans: Sequence[EpochSpan]) -> list[list[Event]]:
    """Return the evidence about each of the epochs: an event's own, else that of its time.

    A node may be missed only when the next epoch, formed without it because its peers' workers
    failed, has begun: that is news of the last epoch that had it. What a writer misses that has no
    part in the epoch of that time is the job: a node that was paused and wakes up takes everybody
    else for lost.
    """
    found: list[list[Event]] = [[] for _ in spans]
    formed = [span.formed_t for span in spans]
    numbered = {span.epoch: index for index, span in enumerate(spans)}
    killed: dict[str | None, int] = {}
    """Node that was killed on purpose and has not come back -> index of its epoch."""
    for event in events if spans else ():
        if (come := _come(event)) is not None:
            killed.pop(come, None)
        if event.event not in _EVIDENCE:
            continue
        index = max(bisect_right(formed, event.t_unix) - 1, 0)
        if event.event != "fault.injected":
            now = spans[index]
            if now.members and event.node is not None and not now.has(event.node):
                continue
            index = index if event.epoch is None else numbered.get(event.epoch, index)
        elif event.fields.get("action") in _NODE_KILLS:
            killed[event.node] = index
        if event.event == "member.lost":
            member = _member(event)
            had = (i for i in range(index, -1, -1) if spans[i].has(member))
            index = killed.get(member, next(had, index))
        victims = node_names(event.fields.get("victims"))
        if victims and all(killed.get(node, index) < index for node in victims):
            continue  # aborted for nodes that were dead before it was formed: no news
        found[index].append(event)
    return found


def _failures_of(evidence: Sequence[Event], span: EpochSpan, ended_t: float) -> list[RunFailure]:
    """Merge the evidence about one epoch, which ended at `ended_t`, into one Failure per node."""
    aborts = [event for event in evidence if event.event == "epoch.aborted"]
    victims = [node for event in aborts for node in node_names(event.fields.get("victims"))]
    by_node: dict[str | None, RunFailure] = {}
    for event in evidence:
        failure = _failure_of(event, span, victims)
        if failure is None:
            continue
        known = by_node.setdefault(failure.node, failure)
        if known is not failure and failure.injected is None:
            if known.detected_s is None:
                known.detected_s = failure.t - known.t
            known.kind = max(known.kind, failure.kind, key=lambda kind: _WEIGHT.get(kind, 0))
            known.detail = known.detail or failure.detail
    found = [failure for failure in by_node.values() if failure.kind]
    signs = [e for e in evidence if e.event not in ("fault.injected", "worker.exit")]
    exits = [e for e in evidence if e.event == "worker.exit" and e.fields.get("kind")]
    if not found and aborts:  # its cause is unknown
        kinds = [event.fields.get("kind") for event in (*aborts, *exits)]
        kind = str(next(filter(None, kinds), "unknown"))
        node = next(iter(node_names(aborts[0].fields.get("victims"))), None)
        found = [_new(aborts[0], span, kind=kind, node=node)]
    noticed = [event.t_unix for event in (*signs, *exits)]
    for failure in found:
        # Detected by its own evidence, unless others acted before it.
        own_t = inf if failure.detected_s is None else failure.t + failure.detected_s
        if own_t <= ended_t:
            continue
        if failure.injected:
            first = min((t for t in noticed if t >= failure.t), default=own_t)
            failure.detected_s = None if first == inf else first - failure.t
        else:
            failure.t, failure.detected_s = min(noticed, default=own_t), 0.0
    return found


def _failure_of(event: Event, span: EpochSpan, victims: Sequence[str]) -> RunFailure | None:
    fields, kind = event.fields, str(event.fields.get("kind") or "")
    match event.event:
        case "fault.injected" if (action := str(fields.get("action"))) in _INJECTED:
            return _new(event, span, kind=_INJECTED[action], node=event.node, injected=action)
        case "member.lost":
            return _new(event, span, kind=Kind.NODE_LOST, node=_member(event))
        case "worker.hung":
            found = _new(event, span, kind=Kind.HANG, node=_member(event) or event.node)
            where = f"in {fields.get('section')} for {fields.get('idle_s')} s"
            found.detail = found.detail or f"no progress {where}"
            return found
        case "script.restarted" if fields.get("stops"):
            return _new(event, span, kind=Kind.USER_ERROR, node=event.node)
        case "worker.exit" if kind not in ("", Kind.COLLATERAL):
            if not victims or event.node in victims:
                return _new(event, span, kind=kind, node=event.node)
    return None


def _come(event: Event) -> str | None:
    """Return the node that has come, or come back; None: it tells of none."""
    if event.event in ("coordinator.elected", "agent.started"):
        return event.node
    return _member(event) if event.event == "member.joined" else None


def _member(event: Event) -> str | None:
    member = event.fields.get("member")
    return member if isinstance(member, str) else None


def _new(
    event: Event, span: EpochSpan, *, kind: str, node: str | None, injected: str | None = None
) -> RunFailure:
    done = (done.step for done in span.steps.values() if done.t <= event.t_unix)
    return RunFailure(
        kind=str(kind),
        node=node,
        rank=worker_rank(event),
        step=max(done, default=span.resume_step or 0),
        epoch=span.epoch,
        injected=injected,
        detail=str(event.fields.get("detail") or event.fields.get("reason") or ""),
        t=event.t_unix,
        detected_s=0.0 if injected is None else None,
    )


def _is_by_time(phase: Event) -> bool:
    """Whether only its time tells which failure a phase belongs to.

    Who times the end of an epoch himself names the old one; the coordinator knows it afterwards,
    and names the new one.
    """
    return str(phase.fields.get("phase")) in _ENDING_PHASES and _member(phase) is None


def _measure(
    failure: RunFailure,
    span: EpochSpan,
    after: EpochSpan,
    timed: Iterable[Event],
    ends: Iterable[Event],
) -> None:
    """Fill in how the run recovered from `failure` of `span`, with the steps of `after`.

    `timed` are the phases of `after`, `ends` those that end an epoch. Of a phase that several nodes
    timed the longest counts. `detect` and `form_epoch` span several nodes, so no one of them can
    time them: unless an event says better they are the time from the fault to its first evidence,
    and from there to the new epoch, less what else is known of that time.
    """
    recovered_t = min(done.t for done in after.steps.values())
    failure.recovered_s, failure.next_epoch = recovered_t - failure.t, after.epoch
    failure.from_scratch = after.from_scratch
    if span.steps and after.by is not None and not after.resume_known:
        failure.steps_redone = None
    elif span.steps and after.resume_step is not None:
        failure.steps_redone = max(0, span.last_step - after.resume_step)
    slowest: dict[str, float] = {}
    for event in (*timed, *(e for e in ends if failure.t <= e.t_unix <= recovered_t)):
        phase, seconds = str(event.fields.get("phase")), number(event, "seconds")
        if seconds is not None:
            slowest[phase] = max(slowest.get(phase, 0.0), seconds)
    if failure.detected_s is not None:
        slowest.setdefault("detect", failure.detected_s)
    known = sum(slowest.get(phase, 0.0) for phase in _ENDING_PHASES)
    slowest.setdefault("form_epoch", max(0.0, after.formed_t - failure.t - known))
    order = [phase for phase in PHASES if phase in slowest]
    failure.phases = {phase: slowest[phase] for phase in dict.fromkeys([*order, *slowest])}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedMachine:
    """A machine that the run excluded; its next submission does without it."""

    host: str
    """The platform's name of it."""
    member: str
    """The node it was then, as the run calls it; on Kubernetes a pod."""
    reason: str

    def __str__(self) -> str:
        """Return it for people."""
        return f"{named(self.host, self.member)}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """Return plain JSON types."""
        return asdict(self)


def excluded_machines(events: Iterable[Event], *, since_unix: float = 0.0) -> list[ExcludedMachine]:
    """Return the machines that were excluded and not readmitted, by name; each once.

    Its pod may be on another one by now; the machine stays excluded until the operator readmits it.
    What was excluded before `since_unix` is left out.
    """
    found: dict[str, ExcludedMachine] = {}
    for event in events:
        member = event.fields.get("member")
        if event.event not in EXCLUSIONS or not isinstance(member, str):
            continue
        host = str(event.fields.get("host") or member)
        if event.event == "member.readmitted":
            found.pop(host, None)
        elif event.t_unix >= since_unix:
            reason = str(event.fields.get("reason") or "no reason was written")
            found[host] = ExcludedMachine(host=host, member=member, reason=reason)
    return [found[host] for host in sorted(found)]
