"""Folds a run's record and ledger into its summary, its cost and what a report shows."""

from __future__ import annotations

import contextlib
import pwd
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.events import Event
from elastic_trainer.record.sample_ledger import SampleAudit, audit
from elastic_trainer.storage.files import of_each, read_regular, write_json
from launcher.platforms.background import SUMMARY
from launcher.record import timeline
from launcher.record.cost import EVENTS, AttemptTime, GpuTime, attempts, gpu_time_by_month, total
from launcher.record.event import number
from launcher.record.files import RunRecord, events_named
from launcher.record.summary import rates, summarise
from launcher.runs import run_dir as run_dirs
from launcher.runs.runs import StoredRun, lost_kind, submit_times
from launcher.spec.errors import UserError, reason_of

Curve = Sequence[tuple[int, float]]
"""(step, loss), in step order."""


@dataclass(kw_only=True)
class ReportData:
    """Everything a report shows."""

    title: str
    summary: Mapping[str, Any]
    loss: Curve
    validation: Curve
    """The last of each step."""
    redone: Sequence[Curve]
    """Steps that were done but did not count, one curve per epoch."""
    progress: Sequence[tuple[float, int]]
    """(seconds since the run's start, step), in order of time, redone ones included."""
    speed: Mapping[str, Curve]
    """What is drawn below the loss: label of the axis -> (step, value)."""
    spent: GpuTime
    attempts: Sequence[AttemptTime]
    extra: Mapping[str, Curve]
    """Curves of other runs to compare with: label -> curve."""
    compared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Summaries of other runs to compare with: label -> summary."""
    refresh_s: int | None = None
    """The page is loaded again after so long; None: never."""
    notes: Sequence[tuple[str, str]] = ()
    """(heading, text) shown below the charts; the text may have several lines."""


def report_data(
    events: Sequence[Event],
    summary: Mapping[str, Any],
    *,
    title: str,
    gpus_per_node: int = 1,
    extra: Mapping[str, Curve] | None = None,
    notes: Sequence[tuple[str, str]] = (),
) -> ReportData:
    """Fold the record of a run, in order of time, and its summary into what its report shows."""
    spans = timeline.epochs(events)
    counted = timeline.lineage(spans)
    counts = {(done.epoch, done.step) for done in counted}
    redone = []
    for span in spans:
        lost = [(s.step, s.loss) for s in span.steps.values() if (s.epoch, s.step) not in counts]
        curve = sorted((step, loss) for step, loss in lost if loss is not None)
        redone += [curve] if curve else []
    origin = next((e.t_unix for e in events if e.event == "run.started"), None)
    done = sorted((s for span in spans for s in span.steps.values()), key=lambda s: s.t)
    origin = origin if origin is not None else (done[0].t if done else 0.0)
    validated = {
        event.step: loss
        for event in events
        if event.event == "validation.completed"
        and event.step is not None
        and (loss := number(event, "loss")) is not None
    }
    return ReportData(
        title=title,
        summary=summary,
        loss=[(s.step, s.loss) for s in counted if s.loss is not None],
        validation=sorted(validated.items()),
        redone=redone,
        progress=[(s.t - origin, s.step) for s in done],
        speed=_speed(counted),
        spent=total(gpu_time_by_month(events, gpus_per_node=gpus_per_node).values()),
        attempts=attempts(events),
        extra=extra or {},
        notes=notes,
    )


def loss_curve(events: Sequence[Event]) -> Curve:
    """Return the loss of the steps that count."""
    counted = timeline.lineage(timeline.epochs(events))
    return [(done.step, done.loss) for done in counted if done.loss is not None]


def _speed(counted: Sequence[timeline.StepDone]) -> dict[str, Curve]:
    curves = {
        "gradient norm": [(s.step, s.grad_norm) for s in counted if s.grad_norm is not None],
        "step time (s)": [(s.step, s.step_s) for s in counted if s.step_s is not None],
        "MFU": [(s.step, s.mfu) for s in counted if s.mfu is not None],
    }
    return {label: curve for label, curve in curves.items() if curve}


def thin(points: Sequence[Any]) -> list[Any]:
    """Return at most about 2,000 points, the last one among them."""
    stride = -(-len(points) // 2000) or 1
    kept = list(points[::stride])
    if points and kept[-1] != points[-1]:
        kept.append(points[-1])
    return kept


def differences(run: Curve, other: Curve) -> list[tuple[int, float]]:
    """Return (step, relative distance of the losses) for the steps that both have."""
    there = dict(other)
    return [(k, abs(loss - there[k]) / abs(there[k])) for k, loss in run if there.get(k)]


def kind_text(failure: Mapping[str, Any]) -> str:
    """Return the failure's kind in words: `node_lost` as `node lost`."""
    return str(failure["kind"]).replace("_", " ")


def seconds_or_dash(value: float | None) -> str:
    """Return seconds for people; a dash for None."""
    return "-" if value is None else f"{value:.2f} s"


# -- GPU-hours ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """What one run has spent."""

    run: str
    user: str
    """The run directory's owner."""
    months: dict[str, GpuTime]
    """`2026-11` -> what was spent in it, UTC."""
    tokens_per_s: float | None
    """Of the steps that count."""
    predicted_tokens_per_s: float | None
    """What was planned for them."""


def owner_of(run: StoredRun) -> str:
    """Return the user whom the run directory belongs to; `?`: it has gone."""
    uid = "?"
    with contextlib.suppress(OSError, KeyError):
        uid = str(run.path.stat().st_uid)
        return pwd.getpwuid(int(uid)).pw_name
    return uid


def costs(runs: Iterable[StoredRun]) -> tuple[list[RunCost], list[str]]:
    """Return what each of `runs` has spent so far, and why some cannot be read."""
    found, problems = [], []
    for run in runs:
        try:
            config, events = run_dirs.load(run.path), list(events_named(run.path, EVENTS))
            months = gpu_time_by_month(
                events, gpus_per_node=config.gpus_per_node, submitted=submit_times(run.path)
            )
            measured, predicted = rates(events, config)
        except Exception as error:  # noqa: BLE001  whatever is wrong with one, the others count
            problems.append(f"{run.shown}: {reason_of(error)}")
            continue
        found.append(
            RunCost(
                run=run.path.name,
                user=owner_of(run),
                months=months,
                tokens_per_s=measured,
                predicted_tokens_per_s=predicted,
            )
        )
    return found, problems


def grouped(found: Sequence[RunCost], by: str, *, since: str = "") -> dict[str, GpuTime]:
    """Return the spending by `run`, `user` or `month`, without months before `since`."""
    groups: dict[str, list[GpuTime]] = {}
    for each in found:
        for month, spent in each.months.items():
            name = {"run": each.run, "user": each.user, "month": month}[by]
            if month >= since:
                groups.setdefault(name, []).append(spent)
    return {name: total(spent) for name, spent in sorted(groups.items())}


def current_summary(run_dir: Path) -> tuple[dict[str, Any], list[Event]]:
    """Return the summary of a run as of now, and the events it was made from.

    Raises:
        UserError: HF613 not a run directory, or nothing has happened in it yet.
    """
    config = run_dirs.load(run_dir)
    events = RunRecord(run_dir).poll()
    if not events:
        raise UserError("HF613", f"{run_dir} has no events yet: start it with holdfast run")
    ends = [event for event in events if event.event in ("run.started", "run.ended")]
    code = ends[-1].fields.get("code") if ends and ends[-1].event == "run.ended" else None
    audited = audit_ledger(run_dir, config)
    code = code if isinstance(code, int) else None
    lost = lost_kind(run_dir)
    return summarise(events, config=config, audit=audited, code=code, lost=lost), events


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all."""
    write_json(run_dir / SUMMARY, summary, indent=1)


def audit_ledger(run_dir: Path, config: TrainConfig) -> SampleAudit | None:
    """Return the ledger's account of samples; None: no ledger was written."""
    files = sorted((run_dir / "ledger").glob("*.jsonl"))
    if not files:
        return None
    texts = (content.decode("ascii", "replace") for content in of_each(files, read_regular))
    # Complete lines only: a run that continues may be writing its last one.
    lines = (
        [each for each in text.splitlines(keepends=True) if each.endswith("\n")] for text in texts
    )
    start_step = config.start_from.step if config.start_from else 0
    return audit(lines, global_batch=config.train.global_batch, start_step=start_step)
