"""What happened, from the events: epochs, and the steps that count. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final, NamedTuple

from elastic_trainer.record.events import Event
from launcher.record.event import node_names, number, whole

STEPS: Final = ("step.completed", "step.skipped", "script.progress")
"""Events that show a step."""


class StepDone(NamedTuple):
    """One step, as one of STEPS tells it."""

    step: int
    epoch: int
    t: float
    loss: float | None
    tokens: int
    step_s: float | None
    skipped: bool
    """Its batch was used up without an update; then it has no loss."""
    grad_norm: float | None = None
    mfu: float | None = None
    """0 to 1; None: the accelerator's peak is not known."""


@dataclass(slots=True, kw_only=True)
class EpochSpan:
    """One epoch of membership."""

    epoch: int
    formed_t: float
    members: Sequence[str] = ()
    """Names of the nodes that run workers, in rank order."""
    spares: Sequence[str] = ()
    layout: str = "?"
    resume_step: int | None = None
    """The step whose state it started from; None before its trainers are ready."""
    restored_from: str | None = None
    """`memory`, `storage`, or another run's checkpoint; None: initial values, or not known."""
    steps: dict[int, StepDone] = field(default_factory=dict)
    """Steps completed in it, redone ones included, each of the lowest rank that reported it."""
    committed: int = 0
    """The newest step committed in it; 0: none."""
    by: str | None = None
    """How a script's steps are known, see `heartbeat.Source`; None: no script's, or an older
    record's."""
    from_scratch: bool = False
    """A script began at the run's first step again."""

    @property
    def resume_known(self) -> bool:
        """Whether `resume_step` is where it has resumed, and not where it is taken to have."""
        return self.resume_step is not None and self.by != "unsure"

    def has(self, node: str | None) -> bool:
        """Whether the node is a member or a spare."""
        return node in self.members or node in self.spares

    @property
    def last_step(self) -> int:
        """The newest step completed in it, else the one it started from (0: none)."""
        return max(self.steps, default=self.resume_step or 0)


def epochs(events: Iterable[Event]) -> list[EpochSpan]:
    """Return the epochs of a record, `events` in order of time, as they were formed."""
    spans: dict[int, EpochSpan] = {}
    ranks: dict[tuple[int, int], int] = {}
    """(epoch, step) -> the lowest rank that has reported it."""
    told = {
        *("epoch.formed", "trainer.started", "training.skipped", "step.committed"),
        *("script.restarted", *STEPS),
    }
    for event in events:
        if event.epoch is None or event.event not in told:
            continue
        fields, step = event.fields, event.step
        span = spans.setdefault(event.epoch, EpochSpan(epoch=event.epoch, formed_t=event.t_unix))
        if event.event == "epoch.formed":
            span.formed_t = min(span.formed_t, event.t_unix)
            span.members = node_names(fields.get("members"))
            span.spares = node_names(fields.get("spares"))
            span.layout = str(fields.get("layout", span.layout))
        elif event.event in ("trainer.started", "training.skipped"):
            _fill_started(span, event)
        elif step is None:
            continue
        elif event.event == "script.restarted":
            span.from_scratch = span.from_scratch or whole(event, "from_scratch") > 0
        elif event.event == "step.committed":
            span.committed = max(span.committed, step)
        elif event.event != "script.progress" or _shows_more(span, event, step):
            rank = event.rank or 0
            if rank <= ranks.setdefault((event.epoch, step), rank):
                ranks[event.epoch, step] = rank
                span.steps[step] = step_done(event, step)
    return sorted(spans.values(), key=lambda span: span.epoch)


def _fill_started(span: EpochSpan, event: Event) -> None:
    resume, source = event.fields.get("resume_step", event.step), event.fields.get("restored_from")
    if isinstance(resume, int) and not span.steps:  # else it begins another training
        span.resume_step = resume
        span.restored_from = source if isinstance(source, str) else None
    if span.layout == "?":
        span.layout = str(event.fields.get("layout", "?"))


def _shows_more(span: EpochSpan, event: Event, step: int) -> bool:
    """Take from a script's counter where the epoch began; return whether `step` is news of it.

    The counter says again where the epoch began when it knows better; steps that the script has
    reported itself stay as they are.
    """
    if first := whole(event, "first"):
        span.resume_step, span.by = first - 1, str(event.fields.get("by"))
        span.steps = {done: each for done, each in span.steps.items() if done >= first}
    return step not in span.steps and (span.resume_step is None or step > span.resume_step)


def step_done(event: Event, step: int) -> StepDone:
    """Return what `event`, one of STEPS, tells of `step`."""
    skipped = event.event == "step.skipped"
    return StepDone(
        step=step,
        epoch=event.epoch or 0,
        t=event.t_unix,
        loss=None if skipped else number(event, "loss"),
        tokens=whole(event, "tokens"),
        step_s=number(event, "step_s"),
        skipped=skipped,
        grad_norm=number(event, "grad_norm"),
        mfu=number(event, "mfu"),
    )


def lineage(spans: Sequence[EpochSpan]) -> list[StepDone]:
    """Return the steps that count, one for each step number, in step order.

    An epoch that starts from step r undoes what earlier epochs did beyond r, so
    a step's last execution counts.
    """
    effective: dict[int, StepDone] = {}
    undone_after = inf
    for span in reversed(spans):
        if not span.steps:
            continue
        for step, done in span.steps.items():
            if step <= undone_after:
                effective.setdefault(step, done)
        start = span.resume_step if span.resume_step is not None else min(span.steps) - 1
        undone_after = min(undone_after, start)
    return [effective[step] for step in sorted(effective)]
