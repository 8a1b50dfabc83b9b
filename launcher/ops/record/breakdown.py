"""What failed in a run and what became of it, from the events. Pure.

One failure leaves many traces: workers of other nodes fail with it, several
nodes miss the same one, some only after the next epoch has begun. Here they
become one `Failure` each, with its clock and its phases.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic_trainer.events import Event
from elastic_trainer.failures import Kind
from launcher.ops.record.timeline import EpochSpan, host_at, node_names, starts, worker_rank

PHASES = (
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
"""The order in which a recovery passes them (DESIGN.md, Recovery)."""
_ENDING_PHASES = {"detect", "abort", "kill_workers"}
"""Phases that end the old epoch; they may carry its number or the new one's."""


@dataclass(slots=True, kw_only=True)
class Failure:
    """One node or worker that failed, and what the run made of it."""

    kind: str
    node: str | None
    rank: int | None
    epoch: int
    step: int
    """The newest step completed when it happened."""
    t: float
    """The fault's own moment when it was injected, else that of its detection."""
    injected: str | None = None
    """Action of the injected fault behind it."""
    host: str | None = None
    """The machine that the node was on; None: not known."""
    detail: str = ""
    detected_s: float | None = None
    recovered_s: float | None = None
    """To the first step completed in a later epoch; None: never."""
    next_epoch: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    steps_redone: int = 0


def failures(events: Sequence[Event], spans: Sequence[EpochSpan]) -> list[Failure]:
    """Return the failures in order of time.

    For each epoch the evidence about it is gathered by node: injected faults,
    `member.lost`, `worker.hung`, `worker.exit`. Workers that failed only because
    a peer did are signs that something is wrong, but no failures. A node that
    was not a member when it went cost nothing: its recovery took 0 s.
    """
    evidence: list[list[Event]] = [[] for _ in spans]
    killed: dict[str | None, int] = {}
    """Node that was killed on purpose and has not come back -> index of its epoch."""
    for event in events:
        if event.event == "agent.started":
            killed.pop(event.node, None)
        if event.event not in _EVIDENCE or not spans or _is_outsider(event, spans):
            continue
        home = _home(event, spans)
        if event.fields.get("action") in ("kill-node", "kill-coordinator", "kill-agent"):
            killed[event.node] = home
        if event.event == "member.lost":
            home = killed.get(event.fields.get("member"), home)
        if event.event == "epoch.aborted" and _old_news(event, killed, home):
            continue
        evidence[home].append(event)
    out: list[Failure] = []
    for index, span in enumerate(spans):
        later = spans[index + 1 :]
        ended_t = later[0].formed_t if later else float("inf")
        for failure in _victims(evidence[index], span, ended_t):
            _measure(failure, span, later, events)
            out.append(failure)
    started = starts(events)
    for failure in out:
        failure.host = host_at(started, failure.node, failure.t)
    out.sort(key=lambda failure: failure.t)
    return out


_EVIDENCE = {"fault.injected", "member.lost", "worker.hung", "worker.exit", "epoch.aborted"}
_MAKES_FAILURE = {
    "kill-node": Kind.NODE_LOST,
    "kill-coordinator": Kind.NODE_LOST,
    "kill-agent": Kind.NODE_LOST,
    "kill-zygote": Kind.KILLED,
    "kill-worker": Kind.KILLED,
    "pause-node": "",  # one only if somebody notices
    "pause-worker": "",
    "spin-worker": "",
    "wedge-worker": "",
    "starve-worker": "",
}
_WEIGHT = {
    Kind.NODE_LOST: 3,
    Kind.HANG: 2,
    Kind.OUT_OF_MEMORY: 2,
    Kind.NODE_FAULT: 2,
    Kind.KILLED: 1,
    "": -1,
}


def _old_news(event: Event, killed: Mapping[str | None, int], home: int) -> bool:
    """Whether the epoch was aborted for nodes that were dead before it was formed."""
    victims = node_names(event.fields.get("victims"))
    return bool(victims) and all(killed.get(node, home) < home for node in victims)


def _is_outsider(event: Event, spans: Sequence[EpochSpan]) -> bool:
    """Whether the writer has no part in the epoch of that time: what it misses is the job itself.

    A node that was paused and wakes up takes everybody else for lost.
    """
    if event.event == "fault.injected" or event.node is None:
        return False
    now = spans[max(bisect_right([span.formed_t for span in spans], event.t_unix) - 1, 0)]
    return bool(now.members) and event.node not in (*now.members, *now.spares)


def _home(event: Event, spans: Sequence[EpochSpan]) -> int:
    """Return the index of the epoch that `event` is evidence about: its own, else by time.

    A node may be missed only when the next epoch, formed without it because its
    peers' workers failed, has begun: that is news of the last epoch that had it.
    """
    index = max(bisect_right([span.formed_t for span in spans], event.t_unix) - 1, 0)
    if event.epoch is not None and event.event != "fault.injected":
        index = next((i for i, span in enumerate(spans) if span.epoch == event.epoch), index)
    if event.event == "member.lost":
        member = event.fields.get("member")
        had = (i for i in range(index, -1, -1) if member in (*spans[i].members, *spans[i].spares))
        return next(had, index)
    return index


def _victims(evidence: Sequence[Event], span: EpochSpan, ended_t: float) -> list[Failure]:
    """Merge the evidence about one epoch, which ended at `ended_t`, into one Failure per node."""
    blamed: set[str] = set()
    for event in evidence:
        if event.event == "epoch.aborted":
            blamed.update(node_names(event.fields.get("victims")))
    found: dict[str | None, Failure] = {}
    for event in evidence:
        failure = _failure_of(event, span, blamed)
        if failure is None:
            continue
        known = found.setdefault(failure.node, failure)
        if known is not failure and failure.injected is None:
            _merge(known, failure)
    out = [failure for failure in found.values() if failure.kind]
    signs = [event for event in evidence if _is_sign(event)]
    if not out:
        out = _unexplained(signs, span)
    for failure in out:
        _date(failure, [sign.t_unix for sign in signs], ended_t)
    return out


def _is_sign(event: Event) -> bool:
    """Whether `event` shows that somebody noticed something."""
    if event.event == "worker.exit":
        return bool(event.fields.get("kind"))
    return event.event != "fault.injected"


def _failure_of(event: Event, span: EpochSpan, blamed: set[str]) -> Failure | None:
    fields = event.fields
    failure = Failure(
        kind="",
        node=event.node,
        rank=worker_rank(event),
        epoch=span.epoch,
        step=_step_at(span, event.t_unix),
        t=event.t_unix,
        detail=str(fields.get("detail") or fields.get("reason") or ""),
    )
    match event.event:
        case "fault.injected":
            failure.injected = str(fields.get("action"))
            failure.kind = str(_MAKES_FAILURE.get(failure.injected, ""))
            return failure if failure.injected in _MAKES_FAILURE else None
        case "member.lost":
            failure.kind, failure.rank = str(Kind.NODE_LOST), None
            failure.node = fields.get("member")
        case "worker.hung":
            failure.kind, failure.node = str(Kind.HANG), fields.get("member", event.node)
            if not failure.detail:
                stands = f"in {fields.get('section')} for {fields.get('idle_s')} s"
                failure.detail = f"no progress {stands}"
        case "worker.exit":
            failure.kind = str(fields.get("kind") or "")
            if failure.kind in ("", Kind.COLLATERAL) or (blamed and event.node not in blamed):
                return None
        case _:
            return None
    failure.detected_s = 0.0
    return failure


def _unexplained(signs: Sequence[Event], span: EpochSpan) -> list[Failure]:
    """Return the failure behind an epoch that was aborted while nobody else was to blame."""
    for sign in signs:
        if sign.event != "epoch.aborted":
            continue
        node = next(iter(node_names(sign.fields.get("victims"))), None)
        kind = next((str(s.fields["kind"]) for s in signs if s.event == "worker.exit"), "unknown")
        return [
            Failure(
                kind=kind,
                node=node,
                rank=None,
                epoch=span.epoch,
                step=_step_at(span, sign.t_unix),
                t=sign.t_unix,
                detail=str(sign.fields.get("reason") or ""),
                detected_s=0.0,
            )
        ]
    return []


def _step_at(span: EpochSpan, t: float) -> int:
    """Return the newest step completed by `t`."""
    done = (done.step for done in span.steps.values() if done.t <= t)
    return max(done, default=span.resume_step or 0)


def _merge(known: Failure, later: Failure) -> None:
    """Add a later piece of evidence about the same node."""
    if known.detected_s is None:
        known.detected_s = later.t - known.t
    if _WEIGHT.get(later.kind, 0) > _WEIGHT.get(known.kind, 0):
        known.kind = later.kind
    known.detail = known.detail or later.detail


def _date(failure: Failure, signs: Sequence[float], ended_t: float) -> None:
    """Set when the failure was detected: by its own evidence, unless others acted before it."""
    own_t = float("inf") if failure.detected_s is None else failure.t + failure.detected_s
    if own_t <= ended_t:
        return
    since = failure.t if failure.injected else 0.0
    first = min((t for t in signs if t >= since), default=own_t)
    if failure.injected:
        failure.detected_s = None if first == float("inf") else first - failure.t
    else:
        failure.t, failure.detected_s = first, 0.0


def _measure(
    failure: Failure, span: EpochSpan, later: Sequence[EpochSpan], events: Sequence[Event]
) -> None:
    """Fill in what the run made of `failure`."""
    if failure.node is not None and span.members and failure.node not in span.members:
        failure.detected_s = failure.detected_s or 0.0
        failure.recovered_s = 0.0
        return
    after = next((after for after in later if after.steps), None)
    if after is None:
        return
    first = min(after.steps.values(), key=lambda done: done.t)
    failure.recovered_s = first.t - failure.t
    failure.next_epoch = after.epoch
    if span.steps and after.resume_step is not None:
        failure.steps_redone = max(0, span.last_step - after.resume_step)
    failure.phases = _phases(events, failure, after, first.t)


def _phases(
    events: Sequence[Event], failure: Failure, after: EpochSpan, recovered_t: float
) -> dict[str, float]:
    """Return seconds by phase; where several nodes timed one, the longest.

    `detect` and `form_epoch` span several nodes, so no one of them can time them:
    unless an event says better they are the time from the fault to its first
    evidence, and from there to the new epoch, less what else is known of that time.
    `fork` begins where the epoch is formed: until its last node has heard of it, and ended
    the workers of the epoch before, no fork begins there.
    """
    slowest: dict[str, float] = {}
    for event in events:
        if event.event != "recovery.phase":
            continue
        phase, seconds = str(event.fields.get("phase")), event.fields.get("seconds")
        ending = phase in _ENDING_PHASES
        ours = (event.epoch == failure.next_epoch and not ending) or (
            ending and failure.t <= event.t_unix <= recovered_t
        )
        if ours and isinstance(seconds, int | float):
            if phase == "fork":
                seconds = max(seconds, event.t_unix - after.formed_t)
            slowest[phase] = max(slowest.get(phase, 0.0), float(seconds))
    if failure.detected_s is not None:
        slowest.setdefault("detect", failure.detected_s)
    known = sum(slowest.get(phase, 0.0) for phase in _ENDING_PHASES)
    slowest.setdefault("form_epoch", max(0.0, after.formed_t - failure.t - known))
    ordered = {phase: slowest.pop(phase) for phase in PHASES if phase in slowest}
    return {**ordered, **slowest}
