"""What a run's events add up to for Prometheus: totals, newest values, times. Pure.

Nothing is per rank, and per node there is nothing either: at 16,384 ranks a run has some sixty
series. Events name the culprit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.record.events import Event
from launcher.record.event import node_names, number, whole

STEP_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
"""Upper bounds of a step's duration."""
OUTCOMES: Final = ("completed", "redone", "skipped")
COUNTED: Final = {
    "member.evicted": "nodes_excluded",
    "worker.hung": "hangs",
    "worker.slow": "slow_ranks",
    "checkpoint.failed": "checkpoint_failures",
    "snapshot.failed": "snapshot_failures",
    "numbers.anomaly": "anomalies",
    "numbers.rollback": "rollbacks",
    "board.failed": "board_errors",
    "storage.stalled": "storage_stalls",
}
"""Event -> counter, without `_total`."""
RESTARTS: Final = "restarts"
NODES_LOST: Final = "nodes_lost"
TOTALS: Final = (RESTARTS, NODES_LOST, *COUNTED.values())
STATES: Final = ("starting", "training", "recovering", "parked", "ended")


@dataclass(slots=True)
class RunMetrics:
    """Sums of the events that were added; from what there was when the first one was."""

    state: str = "starting"
    exit_code: int | None = None
    """Of the run, once it has ended."""
    values: dict[str, float] = field(default_factory=dict)
    """Newest: step, epoch, loss, grad_norm, mfu, nodes, spares."""
    times: dict[str, float] = field(default_factory=dict)
    """Of the newest: step_completed, snapshot_copied, checkpoint_committed; unix seconds."""
    phases: dict[str, float] = field(default_factory=dict)
    """Of the last start or recovery, seconds."""
    steps: Counter[str] = field(default_factory=Counter)
    """By outcome."""
    tokens: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    """By counter of COUNTED."""
    buckets: Counter[float] = field(default_factory=Counter)
    """Steps at most so long, seconds; not cumulative."""
    step_s: float = 0.0
    """Sum."""
    losses: set[tuple[int | None, str]] = field(default_factory=set)
    """Epoch and member of each."""
    furthest: int = 0
    """Newest step that was ever completed."""

    def add(self, event: Event) -> None:
        """Take one event; those of one writer come in its order."""
        if event.event in COUNTED:
            self.totals[COUNTED[event.event]] += 1
        if (take := _TAKES.get(event.event)) is not None:
            take(self, event)


def _step(run: RunMetrics, event: Event) -> None:
    step = event.step or 0
    run.steps["redone" if step <= run.furthest else "completed"] += 1
    run.furthest = max(run.furthest, step)
    run.values["step"] = step
    run.state = "training"
    run.times["step_completed"] = max(event.t_unix, run.times.get("step_completed", 0.0))
    run.tokens += whole(event, "tokens")
    for name in ("loss", "grad_norm", "mfu"):
        if (value := number(event, name)) is not None:
            run.values[name] = value
    if (seconds := number(event, "step_s")) is not None:
        run.step_s += seconds
        bounds = (bound for bound in STEP_BUCKETS_S if seconds <= bound)
        run.buckets[next(bounds, float("inf"))] += 1


def _skipped(run: RunMetrics, event: Event) -> None:
    run.steps["skipped"] += 1
    run.furthest = max(run.furthest, event.step or 0)


def _committed(run: RunMetrics, event: Event) -> None:
    if event.fields.get("source") != "storage":
        run.times["snapshot_copied"] = event.t_unix


def _checkpoint(run: RunMetrics, event: Event) -> None:
    run.times["checkpoint_committed"] = event.t_unix


def _formed(run: RunMetrics, event: Event) -> None:
    run.state, run.exit_code = "recovering" if run.furthest else "starting", None
    run.phases.clear()
    # A coordinator that died has not said that its epoch is over.
    run.totals[RESTARTS] += "epoch" in run.values
    run.values["epoch"] = event.epoch or 0
    run.values["nodes"] = len(node_names(event.fields.get("members")))
    run.values["spares"] = len(node_names(event.fields.get("spares")))


def _lost(run: RunMetrics, event: Event) -> None:
    """Count it once: of a coordinator more than one may tell."""
    loss = (event.epoch, str(event.fields.get("member")))
    run.totals[NODES_LOST] += loss not in run.losses
    run.losses.add(loss)


def _aborted(run: RunMetrics, _: Event) -> None:
    run.state = "recovering"


def _parked(run: RunMetrics, _: Event) -> None:
    run.state = "parked"


def _phase(run: RunMetrics, event: Event) -> None:
    if (seconds := number(event, "seconds")) is not None:
        run.phases[str(event.fields.get("phase"))] = seconds


def _ended(run: RunMetrics, event: Event) -> None:
    run.state, run.exit_code = "ended", whole(event, "code")
    run.values["nodes"] = run.values["spares"] = 0


_TAKES: Final[dict[str, Callable[[RunMetrics, Event], None]]] = {
    "step.completed": _step,
    "step.skipped": _skipped,
    "step.committed": _committed,
    "checkpoint.committed": _checkpoint,
    "epoch.formed": _formed,
    "epoch.aborted": _aborted,
    "member.lost": _lost,
    "membership.parked": _parked,
    "recovery.phase": _phase,
    "run.ended": _ended,
}
