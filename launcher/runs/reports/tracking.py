"""Follows the records of runs and writes their curves to experiment trackers.

A process beside the runs: no training waits for a tracker, and its credentials are not on the
nodes. A board in RUN/tracking (compare-and-swap) says what is written and who writes, so that one
of two processes waits.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Token
from elastic_trainer.storage.typed import Unix, build, parse_json
from launcher.platforms.installed import need
from launcher.record.files import RunRecord
from launcher.record.tracked import Point, TrackedSteps
from launcher.spec.errors import HoldfastError

FOLDER: Final = "tracking"
LEASE_S: Final = 60.0
"""Another process takes a run over whose writer has been silent for so long."""
SETTLE_S: Final = 5.0
"""Until a step's events have certainly arrived, on storage that shows them late."""
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

    `name` is one of elastic_trainer.plan.config.TRACKERS; `step` is the newest step that is known
    to be written.

    Raises:
        UserError: HF632 its package is not here.
    """
    need(f"the tracker {name}", name, extra="track")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the board says of one run."""

    writer: str = ""
    t_unix: Unix = 0.0
    """Last sign of the writer."""
    steps: dict[str, int] = field(default_factory=dict)
    """Tracker -> newest step written."""

    def encode(self) -> bytes:
        """Return the content for the board."""
        return json.dumps(asdict(self)).encode()


class TrackedRun:
    """One run and its trackers.

    Args:
        run_id: the run's name in every tracker, over all attempts.
        writer: this process's unique name.
        say: told what went wrong, once each.
        settle_s: see SETTLE_S.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str,
        trackers: Sequence[str],
        writer: str,
        wall: Callable[[], float],
        say: Callable[[str], None],
        settle_s: float = SETTLE_S,
        opened: Callable[[str, Path, str, int], Tracker] = open_tracker,
    ) -> None:
        self.run_dir, self._run_id, self._names = run_dir, run_id, tuple(trackers)
        self._writer, self._wall, self._say, self._settle_s = writer, wall, say, settle_s
        self._opened = opened
        self._board = FileBoard(run_dir / FOLDER, repair=lambda state, _: state or b"{}")
        self._record, self._steps = RunRecord(run_dir, keep=False), TrackedSteps()
        self._points: list[Point] = []
        """Certain, and not yet in all trackers."""
        self._trackers: dict[str, Tracker] = {}
        self._said, self._signed = "", 0.0
        self.is_over = False
        """The run has done its last step, and everything is written."""

    def poll(self, *, at_once: bool = False) -> None:
        """Write what has become certain, `at_once` everything; failing storage is tried again.

        Raises:
            UserError: HF613 the record cannot be read; HF632 a tracker's package is not here.
            ValueError: the run's board for trackers says something else.
        """
        try:
            self._poll(at_once=at_once)
        except OSError as error:
            self._tell(f"{self.run_dir}: {error.strerror or error}; it is tried again")

    def _poll(self, *, at_once: bool) -> None:
        for event in self._record.poll():
            self._steps.add(event)
        arrived = self._wall() - (0.0 if at_once else self._settle_s)
        self._points += self._steps.take(arrived)
        over = self._steps.ended_unix is not None and self._steps.ended_unix <= arrived
        if not (self._points or over) and self._wall() - self._signed < LEASE_S / 3:
            return
        claimed = self._claim()
        if claimed is None:
            return
        progress, token = claimed
        steps = {name: self._write(name, progress.steps.get(name, 0)) for name in self._names}
        self._forget(steps)
        self._board.set_state(replace(progress, steps=steps).encode(), token)
        self._signed = progress.t_unix
        if over and not self._points:
            self.is_over = True
            self.close()

    def close(self) -> None:
        """Let the trackers write what they hold, and another process take the run over."""
        while self._trackers:
            _, tracker = self._trackers.popitem()
            tracker.close(finished=self.is_over)
        if not self._signed:
            return
        self._signed = 0.0
        claimed = self._claim()
        if claimed is not None:
            progress, token = claimed
            self._board.set_state(replace(progress, writer="", t_unix=0.0).encode(), token)

    def _claim(self) -> tuple[Progress, Token] | None:
        """Become the writer; return what was written so far. None: another process is it.

        Raises:
            ValueError: the board says something else.
        """
        found = self._board.get_state()
        content, token = (b"{}", None) if found is None else found
        known, now = build(Progress, parse_json(content)), self._wall()
        if known.writer not in ("", self._writer) and now - known.t_unix < LEASE_S:
            self._tell(f"{self.run_dir}: {known.writer} writes it")
            self._forget(known.steps)
            return None
        progress = replace(known, writer=self._writer, t_unix=now)
        swapped = self._board.set_state(progress.encode(), token)
        if swapped is None or not swapped[2]:
            return None
        return progress, swapped[1]

    def _forget(self, steps: Mapping[str, int]) -> None:
        done = min(steps.get(name, 0) for name in self._names)
        self._points = [point for point in self._points if point.step > done]

    def _write(self, name: str, done: int) -> int:
        """Write a tracker's points beyond `done`; return its newest step."""
        try:
            tracker = self._trackers.get(name)
            if tracker is None:
                tracker = self._opened(name, self.run_dir, self._run_id, done)
                self._trackers[name] = tracker
            done = max(done, tracker.step)
            points = [point for point in self._points if point.step > done]
            if points:
                tracker.write(points)
                done = points[-1].step
        except HoldfastError:
            raise
        except Exception as error:  # noqa: BLE001  a tracker's library may raise anything
            self._tell(
                f"{self.run_dir}: {name}: {type(error).__name__}: {error}; it is tried again"
            )
            self._trackers.pop(name, None)
        return done

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)
