"""The metrics of all runs of a folder, for Prometheus, from their records: no node is asked.

Totals are the run's: a coordinator's death, a requeue or a lost node changes nothing.
"""

from __future__ import annotations

import ipaddress
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_trainer.plan.config import METRICS_TARGETS
from elastic_trainer.storage.files import read_regular, write_atomic
from elastic_trainer.storage.typed import parse_json
from launcher.record.cost import gpu_time_since
from launcher.record.files import RunRecord
from launcher.record.run_metrics import OUTCOMES, STATES, STEP_BUCKETS_S, TOTALS, RunMetrics
from launcher.record.timeline import epochs
from launcher.runs import run_dir as run_dirs
from launcher.runs.reports.data import owner_of
from launcher.runs.runs import StoredRun, find_users_runs
from launcher.spec.errors import UserError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

GOODPUT_S: Final = 3600.0
"""Window of the goodput."""
_MOST_BYTES: Final = 4 << 20
"""A run's list of agents: 16,384 take less than 1 MB."""
FORGET_S: Final = 6 * 3600.0
"""How long the series of a run stay after its end, for alerts to see them."""


class _Followed:
    def __init__(self, run: StoredRun) -> None:
        self.name, self.user = run.path.name, owner_of(run)
        self.metrics = RunMetrics()
        self.goodput: float | None = None
        self.spent: dict[str, float] = {}
        self.ended_unix: float | None = None
        self._record = RunRecord(run.path, newest=("step.committed", "recovery.phase"))
        self._gpus = run_dirs.load(run.path).gpus_per_node

    def poll(self, now_unix: float) -> None:
        fresh = self._record.poll()
        for event in fresh:
            self.metrics.add(event)
            self.ended_unix = event.t_unix if self.metrics.state == "ended" else None
        if not fresh and self.is_old(now_unix):
            self._record.events.clear()
            return
        self._record.forget(now_unix - GOODPUT_S)
        events, since_t = self._record.events, now_unix - GOODPUT_S
        spent = gpu_time_since(events, epochs(events), since_t, gpus_per_node=self._gpus)
        self.spent, total = spent.by_cause, spent.allocated
        self.goodput = self.spent["productive"] / total if total else None

    def is_old(self, now_unix: float) -> bool:
        """Whether it has ended so long ago that nobody is shown it."""
        return self.ended_unix is not None and now_unix - self.ended_unix >= FORGET_S

    def labelled(self) -> dict[str, Mapping[str, float]]:
        """Return the values of _LABELLED by label."""
        metrics, names = self.metrics, {"nodes": "in", "spares": "spare"}
        return {
            "run_state": {name: float(metrics.state == name) for name in STATES},
            "nodes": {names[key]: metrics.values[key] for key in names if key in metrics.values},
            "recovery_phase_seconds": metrics.phases,
            "gpu_seconds": self.spent,
        }

    def gauges(self) -> dict[str, float | None]:
        """Return the values of _GAUGES, and others; no sample where one is missing or None."""
        times = {f"{name}_timestamp_seconds": t for name, t in self.metrics.times.items()}
        known = {"exit_code": self.metrics.exit_code, "goodput_ratio": self.goodput}
        return {**known, **self.metrics.values, **times}


class RunsCollector:
    """A collector of prometheus-client: reads the runs of a folder and of users' folders in it."""

    def __init__(self, folder: Path, *, wall: Callable[[], float] = time.time) -> None:
        self._folder, self._wall = folder, wall
        self._runs: dict[Path, _Followed] = {}
        self._lock = threading.Lock()
        self.problems: list[str] = []
        """What the newest poll could not read."""

    def poll(self) -> None:
        """Read what is new. Runs that cannot be read are left out and told in `problems`."""
        found, problems = find_users_runs(self._folder)
        now = self._wall()
        followed = dict(self._runs)
        for run in found:
            try:
                if run.path not in followed:
                    followed[run.path] = _Followed(run)
                followed[run.path].poll(now)
            except Exception as error:  # noqa: BLE001  whatever is wrong with one, the others show
                problems.append(f"{run.path}: {error}")
        there = {run.path for run in found}
        with self._lock:
            self._runs = {path: each for path, each in followed.items() if path in there}
            self.problems = problems

    def collect(self) -> Iterator[Metric]:
        """Yield all families; each has no sample rather than a wrong one."""
        from prometheus_client.core import GaugeMetricFamily

        with self._lock:
            now = self._wall()
            shown = [each for each in self._runs.values() if not each.is_old(now)]
            unread = len(self.problems)
        yield GaugeMetricFamily("holdfast_unread_runs", "Runs that cannot be read.", unread)
        yield from _newest(shown)
        yield from _totals(shown)

    def agents(self) -> list[str]:
        """Return where the agents of the runs that have not ended serve their metrics."""
        with self._lock:
            live = [path for path, each in self._runs.items() if each.ended_unix is None]
        return sorted(target for path in live for target in agents_of(path))

    def registry(self) -> CollectorRegistry:
        """Return a registry of this collector alone."""
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry


_LABELLED: Final = {
    "run_state": ("1 for the state it is in.", "state"),
    "nodes": ("Nodes of the epoch.", "state"),
    "recovery_phase_seconds": ("Of the last start or recovery.", "phase"),
    "gpu_seconds": ("GPU time of the last hour.", "cause"),
}
"""Name of a gauge -> help, and its label besides the run."""
_GAUGES: Final = {
    "exit_code": "Of a run that has ended.",
    "goodput_ratio": "Productive part of the last hour's GPU time.",
    "step": "Newest completed step.",
    "epoch": "Epoch of membership.",
    "loss": "Loss of the newest step.",
    "grad_norm": "Gradient norm of the newest step, before clipping.",
    "mfu": "Model FLOP utilisation of the newest step.",
    "step_completed_timestamp_seconds": "When the newest step was completed.",
    "snapshot_copied_timestamp_seconds": "When the newest snapshot was committed in memory.",
    "checkpoint_committed_timestamp_seconds": (
        "When the newest checkpoint was committed on storage."
    ),
}
"""Name of a gauge -> help."""


def _newest(runs: list[_Followed]) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily("holdfast_run", "A run and its owner.", labels=["run"])
    for each in runs:
        info.add_metric([each.name], {"user": each.user})
    yield info
    for name, (text, label) in _LABELLED.items():
        gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=["run", label])
        for each in runs:
            for key, value in each.labelled()[name].items():
                gauge.add_metric([each.name, key], value)
        yield gauge
    for name, text in _GAUGES.items():
        gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=["run"])
        for each in runs:
            if (only := each.gauges().get(name)) is not None:
                gauge.add_metric([each.name], only)
        yield gauge


def _totals(runs: list[_Followed]) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    steps = CounterMetricFamily("holdfast_steps", "Steps.", labels=["run", "outcome"])
    tokens = CounterMetricFamily("holdfast_tokens", "Tokens, redone ones too.", labels=["run"])
    duration = HistogramMetricFamily(
        "holdfast_step_duration_seconds", "From step to step.", labels=["run"]
    )
    for each in runs:
        for outcome in OUTCOMES:
            steps.add_metric([each.name, outcome], each.metrics.steps[outcome])
        tokens.add_metric([each.name], each.metrics.tokens)
        below, buckets = 0, []
        for bound in (*STEP_BUCKETS_S, float("inf")):
            below += each.metrics.buckets[bound]
            buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
        duration.add_metric([each.name], buckets=buckets, sum_value=each.metrics.step_s)
    yield from (steps, tokens, duration)
    for name in TOTALS:
        total = CounterMetricFamily(f"holdfast_{name}", "See docs/metrics.md.", labels=["run"])
        for each in runs:
            total.add_metric([each.name], each.metrics.totals[name])
        yield total


def agents_of(run: Path) -> list[str]:
    """Return where the agents of a run serve their metrics.

    The file is its user's, and Prometheus may reach more than they: only numeric addresses are
    taken, and no label, which could name another path or protocol.
    """
    try:
        raw = parse_json(read_regular(run / METRICS_TARGETS, _MOST_BYTES).decode())
        targets = [each for group in raw for each in group["targets"]]
        return [each for each in targets if _is_numeric(each)]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _is_numeric(target: object) -> bool:
    if not isinstance(target, str):
        return False
    address, _, port = target.rpartition(":")
    try:
        ipaddress.ip_address(address.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return port.isdecimal() and 1024 <= int(port) < 1 << 16


def write_targets(path: Path, address: str, agents: Sequence[str] = ()) -> None:
    """Write the file that Prometheus' file_sd_configs reads, complete or not at all.

    Raises:
        UserError: HF695 it cannot be written.
    """
    groups = [[address], *([list(agents)] if agents else [])]
    try:
        write_atomic(path, json.dumps([{"targets": group} for group in groups]) + "\n")
    except OSError as error:
        reason = error.strerror or error
        raise UserError("HF695", f"{path} cannot be written: {reason}; name another") from error
