"""Events and ledger audit -> the content of summary.json. Pure.

Seconds are rounded to milliseconds. Definitions:

- `steps`: the newest step that counts; the run's first one is `start_step` + 1.
- `started_from`: `RUN@STEP` of another run, whose state this one began with.
- `wall_s`: time between `run.started` and `run.ended` (or the last event),
  summed over the attempts; the time in between, when nothing ran, is left out.
- `steps_redone`: executions that do not count. `committed_steps_redone`: those of them
  that had been committed, in memory or storage: 0 unless state was lost or damaged, or the
  group went back for wrong numbers.
- `steps_skipped`: of the steps that count, those whose batch was used up without an update.
- `goodput`: time of the steps that counted / `wall_s`. A step that was redone
  counts once, with its last execution; start-up, pauses and saves do not count.
- `tokens_per_s`: tokens of the steps that counted / the time of those steps.
- `put_out`: machines that were put out and not let in again, with the node each was then.
- Of a `command` the `steps` are those it has shown (docs/scripts.md); what needs every step is
  null.
- `failures[].host`: the machine of the node, which differs where nodes are pods; null: not known.
- `failures[].recovered_s`: from the fault's own moment when it was injected,
  else from its detection, to the first step completed in a later epoch; the
  seconds in `phases` are the longest over the nodes, and `other_s` is what
  they do not explain.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from elastic_trainer.command import UNKNOWN_STEPS
from elastic_trainer.config import TrainConfig
from elastic_trainer.events import Event
from elastic_trainer.ledger_audit import LedgerAudit
from launcher.ops.record import breakdown, timeline
from launcher.ops.record.put_out import put_out
from launcher.ops.record.timeline import EpochSpan, StepDone

SUMMARY_VERSION = 1


def summarise(
    events: Sequence[Event],
    *,
    config: TrainConfig | None = None,
    audit: LedgerAudit | None = None,
    code: int | None = None,
) -> dict[str, Any]:
    """Return what summary.json holds, as defined at the top of this module.

    Args:
        events: the record, in order of time.
        config: the run's job.json, for the name and the number of steps asked for.
        audit: the ledger's account of samples; None: there is no ledger, so both are null.
        code: exit code of the run; None while it is running.
    """
    spans = timeline.epochs(events, timeline.layouts_of(config))
    counted = timeline.lineage(spans)
    failures = breakdown.failures(events, spans)
    wall_s = wall_seconds(events)
    busy_s = _busy_seconds(counted)
    executed = sum(len(span.steps) for span in spans)
    started = _first(events, "run.started")
    start = config.start_from if config else None
    first_step_t = min((done.t for span in spans for done in span.steps.values()), default=None)
    origin = started.t_unix if started else (events[0].t_unix if events else 0.0)
    tokens = sum(done.tokens for done in counted)
    summary = {
        "version": SUMMARY_VERSION,
        "name": config.name if config else None,
        "run_id": config.run_id if config else None,
        "state": _state(events, code),
        "code": code,
        "start_step": start.step if start else 0,
        "started_from": start.name if start else None,
        "steps": counted[-1].step if counted else start.step if start else 0,
        "steps_asked": _steps_asked(config),
        "steps_redone": executed - len(counted),
        "committed_steps_redone": committed_steps_redone(events, spans),
        "fallbacks": fallbacks(events, spans),
        "steps_skipped": sum(done.skipped for done in counted),
        "final_loss": next((s.loss for s in reversed(counted) if s.loss is not None), None),
        "layouts": layout_ranges(spans, counted),
        "failures": [_failure(failure, origin) for failure in failures],
        "put_out": [each.to_json() for each in put_out(events, since_unix=0.0)],
        "growths": growths(spans, failures),
        "samples_lost": audit.lost if audit else None,
        "samples_repeated": audit.repeated if audit else None,
        "restarts": _restarts(spans, events),
        "attempts": sum(event.event == "run.started" for event in events),
        "nodes_at_end": list(spans[-1].members) if spans else [],
        "spares_at_end": list(spans[-1].spares) if spans else [],
        "checkpoints_committed": _steps_of(events, "checkpoint.committed"),
        "checkpoints_failed": sum(event.event == "checkpoint.failed" for event in events),
        "tokens": tokens,
        "tokens_per_s": _ratio(tokens, busy_s, 1),
        "goodput": _ratio(busy_s, wall_s, 4),
        "startup_s": None if first_step_t is None else round(first_step_t - origin, 3),
        "wall_s": round(wall_s, 3),
    }
    return summary | (_NOT_OF_SCRIPTS if _is_sparse(events, config) else {})


def _is_sparse(events: Sequence[Event], config: TrainConfig | None) -> bool:
    """Whether a script showed its steps about once a second: what counts each is not known."""
    is_script = config is not None and bool(config.command)
    return is_script and all(event.event != "step.completed" for event in events)


_NOT_OF_SCRIPTS = dict.fromkeys(
    ("steps_redone", "committed_steps_redone", "tokens", "tokens_per_s", "goodput")
)


def committed_steps_redone(events: Sequence[Event], spans: Sequence[EpochSpan]) -> int:
    """Return how many steps ran again though `step.committed` had said that they would not.

    Args:
        events: the record, in order of time.
        spans: the epochs, in order.
    """
    return sum(
        sum(step <= newest for step in span.steps)
        for span, newest in zip(spans, _committed_before(events, spans), strict=True)
    )


def fallbacks(events: Sequence[Event], spans: Sequence[EpochSpan]) -> list[dict[str, Any]]:
    """Return the epochs that began with an older state than was committed, and with which."""
    return [
        {
            "epoch": span.epoch,
            "committed": newest,
            "back_to": span.resume_step,
            "source": span.restored_from or "initial values",
        }
        for span, newest in zip(spans, _committed_before(events, spans), strict=True)
        if span.resume_step is not None and span.resume_step < newest
    ]


def _committed_before(events: Sequence[Event], spans: Sequence[EpochSpan]) -> list[int]:
    """Return the newest committed step before each epoch; 0: none."""
    committed: dict[int, int] = {}
    for event in events:
        if event.event == "step.committed" and event.step and event.epoch is not None:
            committed[event.epoch] = max(event.step, committed.get(event.epoch, 0))
    found, newest = [], 0
    for span in spans:
        found.append(newest)
        newest = max(newest, committed.get(span.epoch, 0))
    return found


def _steps_asked(config: TrainConfig | None) -> int | None:
    """Return the number of steps asked for; None where only a script knows."""
    if config is None or (config.command and config.train.steps == UNKNOWN_STEPS):
        return None
    return config.train.steps


def layout_ranges(spans: Sequence[EpochSpan], counted: Sequence[StepDone]) -> list[dict[str, Any]]:
    """Return which layout ran the steps that counted, one entry per epoch, in step order."""
    by_epoch = {span.epoch: span for span in spans}
    out: list[dict[str, Any]] = []
    for done in counted:
        if out and out[-1]["epoch"] == done.epoch:
            out[-1]["to_step"] = done.step
            continue
        span = by_epoch[done.epoch]
        out.append(
            {
                "epoch": done.epoch,
                "layout": span.layout,
                "nodes": list(span.members),
                "from_step": done.step,
                "to_step": done.step,
            }
        )
    return out


def growths(
    spans: Sequence[EpochSpan], failures: Sequence[breakdown.Failure]
) -> list[dict[str, Any]]:
    """Return the epochs with more nodes than the one before, whose end was no failure."""
    failed = {failure.epoch for failure in failures if failure.recovered_s != 0.0}
    out = []
    for before, after in itertools.pairwise(spans):
        joined = [node for node in after.members if node not in before.members]
        if before.epoch in failed or len(after.members) <= len(before.members):
            continue
        pause_s = None
        if before.steps and after.steps:
            first = min(done.t for done in after.steps.values())
            pause_s = round(first - max(done.t for done in before.steps.values()), 3)
        out.append(
            {
                "epoch": after.epoch,
                "step": before.last_step,
                "joined": joined,
                "layout": after.layout,
                "pause_s": pause_s,
            }
        )
    return out


def wall_seconds(events: Sequence[Event]) -> float:
    """Return the time during which the run had agents, in seconds."""
    total, since, last = 0.0, None, 0.0
    for event in events:
        if event.event == "run.started":
            total += 0.0 if since is None else last - since
            since = event.t_unix
        elif event.event == "run.ended" and since is not None:
            total += event.t_unix - since
            since = None
        elif since is None and total == 0.0:
            since = event.t_unix
        last = event.t_unix
    return total + (0.0 if since is None else last - since)


def _busy_seconds(counted: Sequence[StepDone]) -> float:
    """Return the time of the steps; one without `step_s` lasts since the step before it."""
    total = 0.0
    for index, done in enumerate(counted):
        if done.step_s is not None:
            total += done.step_s
        elif index and counted[index - 1].epoch == done.epoch:
            total += done.t - counted[index - 1].t
    return total


def _failure(failure: breakdown.Failure, origin: float) -> dict[str, Any]:
    explained = sum(failure.phases.values())
    recovered_s = failure.recovered_s
    return {
        "kind": failure.kind,
        "node": failure.node,
        "host": failure.host,
        "rank": failure.rank,
        "step": failure.step,
        "epoch": failure.epoch,
        "next_epoch": failure.next_epoch,
        "injected": failure.injected,
        "detail": failure.detail,
        "at_s": round(failure.t - origin, 3),
        "detected_s": None if failure.detected_s is None else round(failure.detected_s, 3),
        "recovered_s": None if recovered_s is None else round(recovered_s, 3),
        "phases": {phase: round(seconds, 3) for phase, seconds in failure.phases.items()},
        "other_s": None if recovered_s is None else round(max(0.0, recovered_s - explained), 3),
        "steps_redone": failure.steps_redone,
    }


def _restarts(spans: Sequence[EpochSpan], events: Sequence[Event]) -> int:
    """Return how many epochs followed another one within an attempt."""
    starts = [event.t_unix for event in events if event.event == "run.started"]
    first_of_attempt = 0
    for index, start in enumerate(starts):
        end = starts[index + 1] if index + 1 < len(starts) else float("inf")
        first_of_attempt += any(start <= span.formed_t < end for span in spans)
    return max(0, len(spans) - max(first_of_attempt, 1))


def _state(events: Sequence[Event], code: int | None) -> str:
    """Return finished, saved, interrupted, failed, parked or running."""
    if any(event.event == "trainer.finished" for event in events) and code in (0, None):
        return "finished"
    if code is not None:
        return {0: "finished", 91: "saved", 130: "interrupted"}.get(code, "failed")
    parked = False
    for event in reversed(events):
        parked = parked or event.event == "membership.parked"
        if event.event == "epoch.formed":
            return "parked" if parked else "running"
        if event.event == "run.started":  # before the first epoch nodes are still to come
            break
    return "running"


def _steps_of(events: Sequence[Event], name: str) -> list[int]:
    return sorted(
        {event.step for event in events if event.event == name and event.step is not None}
    )


def _first(events: Sequence[Event], name: str) -> Event | None:
    return next((event for event in events if event.event == name), None)


def _ratio(part: float, whole: float, digits: int) -> float | None:
    return round(part / whole, digits) if whole > 0 else None
