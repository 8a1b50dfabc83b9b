"""What a run's events add up to for Prometheus: totals, newest values, times. Pure.

No series is per rank or per node: at 16,384 ranks a run has some sixty. Events name the culprit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.record.events import Event
from launcher.record.event import node_names, number, whole

STEP_BUCKETS_S: Final = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0)
"""Upper bounds of a step's duration."""
_BOUNDS: Final = (*STEP_BUCKETS_S, float("inf"))
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
    """Exit code of the run, once it has ended."""
    values: dict[str, float] = field(default_factory=dict)
    """Newest: step, epoch, loss, grad_norm, mfu, nodes, spares."""
    times: dict[str, float] = field(default_factory=dict)
    """Unix seconds of the newest: step_completed, snapshot_copied, checkpoint_committed."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of the last start or recovery, by phase."""
    steps: Counter[str] = field(default_factory=Counter)
    """Outcome -> steps."""
    tokens: int = 0
    totals: Counter[str] = field(default_factory=Counter)
    """Counter of COUNTED -> events."""
    buckets: Counter[float] = field(default_factory=Counter)
    """Steps at most so long, seconds; not cumulative."""
    step_s: float = 0.0
    """Sum."""
    losses: set[tuple[int | None, str]] = field(default_factory=set)
    """Epoch and member of each."""
    furthest: int = 0
    """Newest step that was ever completed."""

    def add(self, event: Event) -> None:  # noqa: C901  one flat table of cases
        """Take one event; those of one writer come in its order."""
        if event.event in COUNTED:
            self.totals[COUNTED[event.event]] += 1
        match event.event:
            case "step.completed":
                self._take_step(event)
            case "step.skipped":
                self.steps["skipped"] += 1
                self.furthest = max(self.furthest, event.step or 0)
            case "step.committed" if event.fields.get("source") != "storage":
                self.times["snapshot_copied"] = event.t_unix
            case "checkpoint.committed":
                self.times["checkpoint_committed"] = event.t_unix
            case "epoch.formed":
                self._take_epoch(event)
            case "epoch.aborted":
                self.state = "recovering"
            case "member.lost":  # counted once: of a coordinator more than one may tell
                loss = (event.epoch, str(event.fields.get("member")))
                self.totals[NODES_LOST] += loss not in self.losses
                self.losses.add(loss)
            case "membership.parked":
                self.state = "parked"
            case "recovery.phase":
                if (seconds := number(event, "seconds")) is not None:
                    self.phases[str(event.fields.get("phase"))] = seconds
            case "run.ended":
                self.state, self.exit_code = "ended", whole(event, "code")
                self.values["nodes"] = self.values["spares"] = 0

    def _take_step(self, event: Event) -> None:
        step = event.step or 0
        self.steps["redone" if step <= self.furthest else "completed"] += 1
        self.furthest = max(self.furthest, step)
        self.values["step"] = step
        self.state = "training"
        self.times["step_completed"] = max(event.t_unix, self.times.get("step_completed", 0.0))
        self.tokens += whole(event, "tokens")
        for name in ("loss", "grad_norm", "mfu"):
            if (value := number(event, name)) is not None:
                self.values[name] = value
        if (seconds := number(event, "step_s")) is not None:
            self.step_s += seconds
            self.buckets[_BOUNDS[bisect_left(STEP_BUCKETS_S, seconds)]] += 1

    def _take_epoch(self, event: Event) -> None:
        self.state, self.exit_code = "recovering" if self.furthest else "starting", None
        self.phases.clear()
        # A coordinator that died has not said that its epoch is over.
        self.totals[RESTARTS] += "epoch" in self.values
        self.values["epoch"] = event.epoch or 0
        self.values["nodes"] = len(node_names(event.fields.get("members")))
        self.values["spares"] = len(node_names(event.fields.get("spares")))
