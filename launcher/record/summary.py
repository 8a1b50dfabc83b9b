"""Events and ledger audit -> the content of summary.json. Pure.

Seconds are rounded to milliseconds. Definitions:

- `steps`: the newest step that counts; the run's first one is `start_step` + 1.
- `started_from`: `RUN@STEP` of another run, whose state this one began with.
- `wall_s`: time between `run.started` and `run.ended` (or the last event),
  summed over the attempts; the time in between, when nothing ran, is left out.
- `steps_redone`: executions that do not count; of a `command` as far as it shows its steps,
  null where nothing tells with which step it began after a restart.
- `committed_steps_redone`: how many of them had been committed, in memory or storage: 0 unless
  state was lost or damaged, or the group went back for wrong numbers.
- `steps_skipped`: steps that count whose batch was used up without an update.
- `fallbacks`: the epochs that began with an older state than was committed, and with which.
- `from_scratch`: the epochs in which a `command` began at its first step again, each with the
  newest step of the epoch before.
- `layouts`: which layout ran the steps that count, one entry per epoch.
- `growths`: the epochs with more nodes than the one before, whose end was not a failure.
- `restarts`: how many epochs followed another one within an attempt.
- `goodput`: time of the steps that counted / `wall_s`. A step that was redone
  counts once, with its last execution; start-up, pauses and saves do not count.
- `tokens_per_s`: tokens of the steps that counted / the time of those steps.
- `predicted_tokens_per_s`: what was planned for the layouts of those steps; null: nothing, as of a
  script, or of a GPU without figures.
- `sources`: of a mix, how many samples each corpus has given; not there without one.
- `state`: finished, saved, stopped (as asked, before anything was saved), interrupted, failed,
  parked or running.
- `excluded`: machines that were excluded and not readmitted, with the node each was then.
- Of a `command` the `steps` are those it has shown (docs/scripts.md); what needs every step is
  null.
- `failures[].host`: the machine of the node, which differs where nodes are pods; null: not known.
- `failures[].runbook`: the command that prints what to do about it.
- `failures[].recovered_s`: from the fault's own moment when it was injected,
  else from its detection, to the first step completed in a later epoch; the
  seconds in `phases` are the longest over the nodes, and `other_s` is what
  they do not explain. Times of several nodes are compared as their clocks say them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import EXIT_SAVED, Kind
from elastic_trainer.record.sample_ledger import SampleAudit
from launcher.record.failures import RunFailure, excluded_machines, failures
from launcher.record.status import predicted_rate, saved_nothing, steps_asked
from launcher.record.timeline import EpochSpan, StepDone, epochs, lineage

SUMMARY_VERSION = 1
_NEEDS_EVERY_STEP = ("committed_steps_redone", "tokens", "tokens_per_s", "goodput")


def summarise(
    events: Sequence[Event],
    *,
    config: TrainConfig | None = None,
    audit: SampleAudit | None = None,
    code: int | None = None,
    lost: str = Kind.NODE_LOST,
) -> dict[str, Any]:
    """Return what summary.json holds, as defined at the top of this module.

    `events` are in order of time; `audit` is the ledger's account of samples, without which both
    numbers are null; `code` is the run's exit code, None while it is running; `lost` is the
    platform's kind of a node's loss.
    """
    seen = Counter(event.event for event in events)
    begun = [event.t_unix for event in events if event.event == "run.started"]
    origin = next(iter(begun), events[0].t_unix if events else 0.0)
    spans = epochs(events)
    counted = lineage(spans)
    failed = failures(events, spans, lost)
    first_step_t = min((done.t for span in spans for done in span.steps.values()), default=None)
    attempts = {bisect_right(begun, span.formed_t) for span in spans} - {0}
    wall_s, busy_s = _wall_seconds(events), _busy_seconds(counted)
    tokens = sum(done.tokens for done in counted)
    start = config.start_from if config else None
    start_step = start.step if start else 0
    saved = {event.step for event in events if event.event == "checkpoint.committed"}
    summary: dict[str, Any] = {
        "version": SUMMARY_VERSION,
        "name": config.name if config else None,
        "run_id": config.run_id if config else None,
        "state": _state(seen, events, code),
        "code": code,
        "start_step": start_step,
        "started_from": start.name if start else None,
        "steps": counted[-1].step if counted else start_step,
        "steps_asked": steps_asked(config) if config else None,
        "steps_redone": sum(len(span.steps) for span in spans) - len(counted),
        "committed_steps_redone": _committed_steps_redone(spans),
        "fallbacks": _fallbacks(spans),
        "from_scratch": _from_scratch(spans),
        "steps_skipped": sum(done.skipped for done in counted),
        "final_loss": next((s.loss for s in reversed(counted) if s.loss is not None), None),
        "layouts": _layouts(spans, counted),
        "failures": [failure.to_json(origin) for failure in failed],
        "excluded": [each.to_json() for each in excluded_machines(events)],
        "growths": _growths(spans, failed),
        "samples_lost": audit.lost if audit else None,
        "samples_repeated": audit.repeated if audit else None,
        "restarts": max(0, len(spans) - max(len(attempts), 1)),
        "attempts": len(begun),
        "nodes_at_end": list(spans[-1].members) if spans else [],
        "spares_at_end": list(spans[-1].spares) if spans else [],
        "checkpoints_committed": sorted(step for step in saved if step is not None),
        "checkpoints_failed": seen["checkpoint.failed"],
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, busy_s, 1),
        "predicted_tokens_per_s": _predicted_rate(config, spans, counted),
        "goodput": _ratio(busy_s, wall_s, 4),
        "startup_s": None if first_step_t is None else round(first_step_t - origin, 3),
        "wall_s": round(wall_s, 3),
    }
    if audit and audit.sources:
        summary["sources"] = audit.sources
    if config and config.command and not seen["step.completed"]:
        # A script's steps are seen about once a second: what needs each of them is not known.
        summary |= dict.fromkeys(_NEEDS_EVERY_STEP)
        summary["steps_redone"] = _shown_again(spans)
    return summary


def rates(events: Sequence[Event], config: TrainConfig) -> tuple[float | None, float | None]:
    """Return tokens/s of the steps that count and what was planned for them, as in the summary.

    None where a script's steps are not all seen, or nothing was planned.
    """
    if config.command is not None:
        return None, None
    spans = epochs(events)
    counted = lineage(spans)
    tokens = sum(done.tokens for done in counted)
    return _ratio(tokens, _busy_seconds(counted), 1), _predicted_rate(config, spans, counted)


def _predicted_rate(
    config: TrainConfig | None, spans: Iterable[EpochSpan], counted: Sequence[StepDone]
) -> float | None:
    if config is None or not counted:
        return None
    rates = {span.epoch: predicted_rate(config, span.layout) for span in spans}
    seconds = 0.0
    for done in counted:
        rate = rates.get(done.epoch)
        if rate is None:
            return None
        seconds += done.tokens / rate
    return _ratio(sum(done.tokens for done in counted), seconds, 1)


def _committed_steps_redone(spans: Sequence[EpochSpan]) -> int:
    """Return how often a step was executed that an epoch before had committed."""
    before = accumulate((span.committed for span in spans), max, initial=0)
    return sum(
        step <= newest for span, newest in zip(spans, before, strict=False) for step in span.steps
    )


def _fallbacks(spans: Iterable[EpochSpan]) -> list[dict[str, Any]]:
    """Return the epochs that began before the newest committed step.

    What an epoch has gone back from counts no more: the next one does not go back from it again.
    """
    found, newest = [], 0
    for span in spans:
        if span.resume_step is not None and span.resume_step < newest:
            found.append(
                {
                    "epoch": span.epoch,
                    "committed": newest,
                    "back_to": span.resume_step,
                    "source": span.restored_from or "initial values",
                }
            )
            newest = span.resume_step
        newest = max(newest, span.committed)
    return found


def _shown_again(spans: Iterable[EpochSpan]) -> int | None:
    """Return the steps that a script did again after restarts; None: nothing tells."""
    shown = [span for span in spans if span.steps]
    if not shown or not all(after.resume_known for after in shown[1:]):
        return None
    return sum(
        max(0, before.last_step - (after.resume_step or 0)) for before, after in pairwise(shown)
    )


def _from_scratch(spans: Iterable[EpochSpan]) -> list[dict[str, int]]:
    shown = (span for span in spans if span.steps)
    return [
        {"epoch": after.epoch, "newest": before.last_step}
        for before, after in pairwise(shown)
        if after.from_scratch
    ]


def _layouts(spans: Iterable[EpochSpan], counted: Iterable[StepDone]) -> list[dict[str, Any]]:
    by_epoch = {span.epoch: span for span in spans}
    found: list[dict[str, Any]] = []
    for epoch, group in groupby(counted, key=lambda done: done.epoch):
        steps, span = [done.step for done in group], by_epoch[epoch]
        # A script is looked at once a second: an epoch ran all steps up to the next one's first.
        begun = steps[0] if span.by is None or span.resume_step is None else span.resume_step + 1
        if found and span.by is not None:
            found[-1]["to_step"] = begun - 1
        found.append(
            {
                "epoch": epoch,
                "layout": span.layout,
                "nodes": list(span.members),
                "from_step": begun,
                "to_step": steps[-1],
            }
        )
    return found


def _growths(spans: Iterable[EpochSpan], failed: Iterable[RunFailure]) -> list[dict[str, Any]]:
    ended_by_failure = {failure.epoch for failure in failed if failure.recovered_s != 0.0}
    found = []
    for before, after in pairwise(spans):
        if before.epoch in ended_by_failure or len(after.members) <= len(before.members):
            continue
        pause_s, had = None, {*before.members}
        if before.steps and after.steps:
            last_t = max(done.t for done in before.steps.values())
            pause_s = round(min(done.t for done in after.steps.values()) - last_t, 3)
        found.append(
            {
                "epoch": after.epoch,
                "step": before.last_step,
                "joined": [node for node in after.members if node not in had],
                "layout": after.layout,
                "pause_s": pause_s,
            }
        )
    return found


def _wall_seconds(events: Iterable[Event]) -> float:
    total, running = 0.0, True
    for before, event in pairwise(events):
        running = before.event == "run.started" or (running and before.event != "run.ended")
        if running and event.event != "run.started":
            total += event.t_unix - before.t_unix
    return total


def _busy_seconds(counted: Sequence[StepDone]) -> float:
    """Return the time of the steps; one without `step_s` lasts since the step before it."""
    total = sum(done.step_s or 0.0 for done in counted)
    return total + sum(
        done.t - before.t
        for before, done in pairwise(counted)
        if done.step_s is None and before.epoch == done.epoch
    )


def _state(seen: Collection[str], events: Iterable[Event], code: int | None) -> str:
    if "trainer.finished" in seen and code in (0, None):
        return "finished"
    if code == EXIT_SAVED:
        return "stopped" if saved_nothing(seen) else "saved"
    if code is not None:
        return {0: "finished", 130: "interrupted"}.get(code, "failed")
    # Before its first epoch an attempt's nodes are still to come: it is not parked.
    marks = ("run.started", "epoch.formed", "membership.parked")
    order = [name for name, _ in groupby(e.event for e in events if e.event in marks)]
    return "parked" if order[-2:] == ["epoch.formed", "membership.parked"] else "running"


def _ratio(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole > 0 else None
