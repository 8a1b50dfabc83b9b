"""The run directory on the launcher's side: making it, refusing a live or wrong one."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from elastic_trainer.config import TrainConfig
from elastic_trainer.ladder import Ladder
from launcher.backends.background import MARK as _LIVE
from launcher.backends.processes import start_ticks
from launcher.errors import UserError
from launcher.whole_file import write_whole

JOB_JSON = "job.json"
RENDERED = "job.rendered.json"
"""job.json as rendered; job.json itself is narrowed to the nodes of the attempt."""


def create(run_dir: Path, files: Mapping[str, str]) -> None:
    """Make `run_dir` and write the rendered bundle into it.

    Raises:
        UserError: HF611 it exists and is not empty; HF612 it cannot be made or
            written.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        if not (run_dir / JOB_JSON).is_file():
            raise UserError(
                "HF611",
                f"run directory {run_dir} exists and is not empty; use another --run-dir",
            )
        command = "submit" if (run_dir / "submitted.json").exists() else "run"
        raise UserError(
            "HF611",
            f"run directory {run_dir} exists already; to go on with it use holdfast {command} "
            f"--resume {run_dir}, else another --run-dir",
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = run_dir / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for name in ("events", "logs", "ledger", "board", "cache"):
            (run_dir / name).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            "HF612",
            f"run directory {run_dir} cannot be written: {error.strerror or error}; "
            "use another --run-dir",
        ) from error


def check_checkpoint_dir(config: TrainConfig) -> None:
    """Make the checkpoint directory and prove that it can be written.

    Raises:
        UserError: HF204 it cannot.
    """
    directory = Path(config.checkpoint.dir)
    probe = directory / f".probe-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        raise UserError(
            "HF204",
            f"checkpoint.dir: {directory} cannot be written: {error.strerror or error}; "
            "choose another, or grant the permission",
        ) from error


def load(run_dir: Path) -> TrainConfig:
    """Read the job of an existing run, as rendered.

    Raises:
        UserError: HF613 not a run directory, or written by another version.
    """
    rendered = run_dir / RENDERED
    path = rendered if rendered.is_file() else run_dir / JOB_JSON
    try:
        return TrainConfig.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        way_out = (
            f"it holds imported weights; start with them: holdfast run JOB --from {run_dir}"
            if (run_dir / "board").is_dir()
            else f"it has no {JOB_JSON}; see ./runs"
        )
        raise UserError("HF613", f"{run_dir} is no run directory: {way_out}") from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


def narrow(config: TrainConfig, num_nodes: int) -> TrainConfig:
    """Return `config` with the rungs that `num_nodes` nodes can run.

    So the first epoch does not wait for nodes that will never come.

    Raises:
        UserError: HF614 no rung is small enough.
    """
    rungs = tuple(rung for rung in config.ladder.rungs if rung.num_nodes <= num_nodes)
    if not rungs:
        raise UserError(
            "HF614",
            f"--nodes {num_nodes}: the last rung of {config.name} needs {config.ladder.min_nodes} "
            f"nodes; use {config.ladder.min_nodes} or more, or lower elastic.min_nodes",
        )
    return dataclasses.replace(config, ladder=Ladder(rungs))


def write_attempt(run_dir: Path, rendered: TrainConfig, narrowed: TrainConfig) -> int:
    """Write job.json for the next attempt and return the attempt's number, from 1.

    Raises:
        UserError: HF612 the run directory cannot be written.
    """
    try:
        (run_dir / RENDERED).write_text(rendered.to_json(), encoding="utf-8")
        write_whole(run_dir / JOB_JSON, narrowed.to_json())
        logs = run_dir / "logs"
        logs.mkdir(exist_ok=True)
        attempts = [int(path.name) for path in logs.iterdir() if path.name.isdigit()]
        attempt = max(attempts, default=0) + 1
        (logs / str(attempt)).mkdir()
    except OSError as error:
        raise UserError(
            "HF612", f"run directory {run_dir} cannot be written: {error.strerror or error}"
        ) from error
    return attempt


class LiveMark:
    """Says that a launcher on this machine runs `run_dir`: `launcher.json` with its pid.

    A quick check before anything starts; the board's lease is what really keeps
    a second job out, also from other machines. The mark of a launcher that was
    killed is taken over.
    """

    def __init__(self, run_dir: Path, job_id: str) -> None:
        self._run_dir, self._path, self._job_id = run_dir, run_dir / _LIVE, job_id

    def __enter__(self) -> Self:
        """Put the mark.

        Raises:
            UserError: HF615 a live launcher has put its own.
        """
        mine = json.dumps(
            {
                "job": self._job_id,
                "pid": os.getpid(),
                "started": start_ticks(os.getpid()),
                "host": socket.gethostname(),
            }
        )
        fresh = self._run_dir / f".{_LIVE}.{os.getpid()}"
        fresh.write_text(mine, encoding="utf-8")
        try:
            for _ in range(2):
                try:
                    os.link(fresh, self._path)  # fails when it exists: no second winner
                except FileExistsError:
                    refuse_if_live(self._run_dir)
                    self._path.unlink(missing_ok=True)
                else:
                    return self
        finally:
            fresh.unlink()
        raise UserError("HF615", f"another launcher has just started on {self._run_dir}")

    def __exit__(self, *_: object) -> None:
        """Take the mark away."""
        self._path.unlink(missing_ok=True)


def refuse_if_live(run_dir: Path) -> None:
    """Check that no launcher on this machine runs `run_dir`.

    Raises:
        UserError: HF615 one does; it is named.
    """
    try:
        mark = json.loads((run_dir / _LIVE).read_text(encoding="utf-8"))
        pid, started = int(mark["pid"]), mark["started"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return
    if mark.get("host") == socket.gethostname() and start_ticks(pid) == started is not None:
        raise UserError(
            "HF615",
            f"{run_dir} has a live job already: {mark.get('job')} (process {pid}); "
            "stop it first, or start another run",
        )
