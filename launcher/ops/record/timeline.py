"""What happened, from the events: epochs and the steps that count. Pure.

Times are `t_unix` of the writers, by one clock where `RunRecord.by_one_clock` gave the events:
they are comparable to well under the pauses that are measured here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastic_trainer.config import TrainConfig
from elastic_trainer.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """One `step.completed` or `step.skipped`, of the lowest rank that reported it."""

    step: int
    epoch: int
    t: float
    loss: float | None
    tokens: int
    step_s: float | None
    skipped: bool = False
    """Its batch was used up without an update; then it has no loss."""


@dataclass(slots=True, kw_only=True)
class EpochSpan:
    """One epoch of membership."""

    epoch: int
    formed_t: float
    members: tuple[str, ...] = ()
    """Names of the nodes that run workers, in rank order."""
    spares: tuple[str, ...] = ()
    layout: str = "?"
    coordinator: str | None = None
    reason: str = ""
    resume_step: int | None = None
    """The step whose state it started from; None before its trainers are ready."""
    restored_from: str | None = None
    """`memory`, `storage`, or another run's checkpoint; None: initial values, or not known."""
    steps: dict[int, StepDone] = field(default_factory=dict)
    """Steps completed in it, redone ones included."""

    @property
    def last_step(self) -> int:
        """The newest step completed in it, else the one it started from (0: none)."""
        return max(self.steps, default=self.resume_step or 0)


def node_names(raw: Any) -> tuple[str, ...]:
    """Return node names from an event's member list (names, or mappings with `node`)."""
    if not isinstance(raw, list | tuple):
        return ()
    return tuple(str(item["node"]) if isinstance(item, dict) else str(item) for item in raw)


def layouts_of(config: TrainConfig | None) -> dict[int, str]:
    """Return the ladder of `config` as num_nodes of the rung -> layout; empty without one."""
    return {rung.num_nodes: str(rung.layout) for rung in config.ladder.rungs} if config else {}


def worker_rank(event: Event) -> int | None:
    """Return the global rank of the worker an event is about, whoever wrote the event."""
    rank = event.fields.get("worker_rank", event.rank)
    return rank if isinstance(rank, int) else None


def named(node: Any, host: Any) -> str:
    """Return a node and its machine for people: one name where both are called alike."""
    return str(node) if host in (None, "", node) else f"{node} ({host})"


def starts(events: Iterable[Event]) -> list[Event]:
    """Return the starts of agents, which tell the machine of each node."""
    return [event for event in events if event.event == "agent.started"]


def host_at(started: Sequence[Event], node: str | None, t_unix: float) -> str | None:
    """Return the machine that a node was on at a time; None: nobody has said.

    Args:
        started: what `starts` returned, in order of time.
        node: its name, which a pod may take to another machine.
        t_unix: when, by the clock of the record.
    """
    known = (e for e in reversed(started) if e.node == node and e.t_unix <= t_unix)
    found = next(known, None)
    host = None if found is None else found.fields.get("host")
    return host if isinstance(host, str) else None


_TELLING = ("epoch.formed", "trainer.started", "step.completed", "step.skipped", "script.progress")


def epochs(events: Iterable[Event], layouts: Mapping[int, str] | None = None) -> list[EpochSpan]:
    """Return the epochs in the order in which they were formed.

    Args:
        events: the record, in order of time.
        layouts: the ladder, as num_nodes of the rung -> layout; without it an
            epoch's layout is known from its first trainer on.
    """
    spans: dict[int, EpochSpan] = {}
    ranks: dict[tuple[int, int], int] = {}
    for event in events:
        if event.epoch is None:
            continue
        if event.event not in _TELLING:
            continue
        span = spans.setdefault(event.epoch, EpochSpan(epoch=event.epoch, formed_t=event.t_unix))
        if event.event == "epoch.formed":
            _fill_formed(span, event, layouts or {})
        elif event.event == "trainer.started":
            _fill_started(span, event)
        elif event.event == "script.progress" and _is_known(event, span):
            continue
        elif event.step is not None:
            key, rank = (event.epoch, event.step), event.rank or 0
            if rank <= ranks.get(key, rank):
                ranks[key] = rank
                span.steps[event.step] = _step_done(event, event.epoch, event.step)
    return sorted(spans.values(), key=lambda span: span.epoch)


def _is_known(event: Event, span: EpochSpan) -> bool:
    """Whether a script's counter tells of no step of this epoch that it has not told better."""
    resumed = span.resume_step is not None and (event.step or 0) <= span.resume_step
    return resumed or event.step in span.steps


def _fill_formed(span: EpochSpan, event: Event, layouts: Mapping[int, str]) -> None:
    span.formed_t = min(span.formed_t, event.t_unix)
    span.members = node_names(event.fields.get("members"))
    span.spares = node_names(event.fields.get("spares"))
    planned = layouts.get(event.fields.get("rung", 0), span.layout)
    span.layout = str(event.fields.get("layout", planned))
    span.coordinator = event.fields.get("coordinator") or event.node
    span.reason = str(event.fields.get("reason", ""))


def _fill_started(span: EpochSpan, event: Event) -> None:
    resume = event.fields.get("resume_step", event.step)
    if isinstance(resume, int):
        span.resume_step = resume
        source = event.fields.get("restored_from")
        span.restored_from = source if isinstance(source, str) else None
    if span.layout == "?":
        span.layout = str(event.fields.get("layout", "?"))


def _step_done(event: Event, epoch: int, step: int) -> StepDone:
    skipped = event.event == "step.skipped"
    loss = None if skipped else event.fields.get("loss")
    step_s = event.fields.get("step_s")
    return StepDone(
        step=step,
        epoch=epoch,
        t=event.t_unix,
        loss=float(loss) if isinstance(loss, int | float) else None,
        tokens=int(event.fields.get("tokens") or 0),
        step_s=float(step_s) if isinstance(step_s, int | float) else None,
        skipped=skipped,
    )


def lineage(spans: Sequence[EpochSpan]) -> list[StepDone]:
    """Return the steps that count, one for each step number, in step order.

    An epoch that starts from step r undoes what earlier epochs did beyond r, so
    a step's last execution counts.
    """
    effective: dict[int, StepDone] = {}
    for span in spans:
        if not span.steps:
            continue
        start = span.resume_step if span.resume_step is not None else min(span.steps) - 1
        for step in [step for step in effective if step > start]:
            del effective[step]
        effective.update(span.steps)
    return [effective[step] for step in sorted(effective)]
