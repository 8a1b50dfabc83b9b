"""TensorBoard, MLflow and W&B, each behind the same three calls."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from launcher.platforms.installed import need
from launcher.record.tracked import Point

_PROJECT: Final = "holdfast"
"""Experiment or project, where the environment names none."""
_BATCH: Final = 150
"""Points a request: MLflow takes 1,000 metrics."""
_TAG: Final = "holdfast.run"
_STEP_TAG: Final = "holdfast.step"


class Tracker(Protocol):
    """One run in one tracker."""

    step: int
    """The newest step that it holds."""

    def write(self, points: Sequence[Point]) -> None:
        """Add points, in order, each beyond `step`; they last when this returns."""

    def close(self, *, finished: bool) -> None:
        """Leave; `finished`: no more points will come."""


def open_tracker(name: str, run_dir: Path, run_id: str, step: int) -> Tracker:
    """Return a run in the tracker `name`, the same one in every attempt.

    Args:
        name: one of elastic_trainer.plan.config.TRACKERS.
        run_dir: the run; files of trackers lie in it.
        run_id: name in the tracker.
        step: the newest step that is known to be written.

    Raises:
        UserError: HF632 its package is not here.
    """
    packages = {"tensorboard": "tensorboard", "mlflow": "mlflow", "wandb": "wandb"}
    need(f"the tracker {name}", packages[name], extra="track")
    match name:
        case "tensorboard":
            return _TensorBoard(run_dir / "tensorboard", step)
        case "mlflow":
            return _MLflow(run_id, step)
        case _:
            return _WandB(run_dir, run_id, step)


class _TensorBoard:
    """Event files in RUN/tensorboard."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.step = step
        self._writer = EventFileWriter(str(folder))
        # Hides what a process that died may have written beyond.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            values = [
                Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()
            ]
            event = Event(wall_time=point.t_unix, step=point.step, summary=Summary(value=values))
            self._writer.add_event(event)
        self._writer.flush()
        self.step = points[-1].step

    def close(self, *, finished: bool) -> None:
        del finished
        self._writer.close()


class _MLflow:
    """A run of MLFLOW_TRACKING_URI, found again by a tag; its newest step is in another."""

    def __init__(self, run_id: str, step: int) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        assert '"' not in run_id, "names of runs have no quotes"
        found = self._client.search_runs([where], f'tags."{_TAG}" = "{run_id}"')
        run = found[0] if found else self._client.create_run(
            where, tags={_TAG: run_id}, run_name=run_id
        )  # fmt: skip
        self._id: str = run.info.run_id
        if found:
            self._client.update_run(self._id, status="RUNNING")
        self.step = max(step, int(run.data.tags.get(_STEP_TAG, 0)))

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric, RunTag

        for start in range(0, len(points), _BATCH):
            batch = points[start : start + _BATCH]
            metrics = [
                Metric(tag, value, int(point.t_unix * 1000), point.step)
                for point in batch
                for tag, value in point.values.items()
            ]
            tags = [RunTag(_STEP_TAG, str(batch[-1].step))]
            self._client.log_batch(self._id, metrics=metrics, tags=tags)
            self.step = batch[-1].step

    def close(self, *, finished: bool) -> None:
        if finished:
            self._client.set_terminated(self._id, "FINISHED")


class _WandB:
    """A run of W&B; with WANDB_MODE=offline in RUN/wandb, for `wandb sync`."""

    def __init__(self, run_dir: Path, run_id: str, step: int) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=re.sub(r"[^A-Za-z0-9_-]", "-", run_id),
            name=run_id,
            dir=str(run_dir),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self.step = max(step, self._run.step - 1)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)
        self.step = points[-1].step

    def close(self, *, finished: bool) -> None:
        del finished
        self._run.finish()
