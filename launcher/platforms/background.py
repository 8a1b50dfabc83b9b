"""Runs on this machine, seen like submitted ones: a launcher in the background.

`holdfast run --resume RUN` is the job. RUN/launcher.json says that it lives, RUN/summary.json how
it ended, so runs that the user started by hand are seen alike.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import not_
from pathlib import Path
from typing import Final

from elastic_trainer.storage.files import read_json
from launcher.platforms.base import Backend, JobId, JobRef, JobState, JobStatus, state_of
from launcher.platforms.local import python_path, start_ticks
from launcher.platforms.retries import polled
from launcher.spec.errors import PermanentError, UserError

MARK: Final = "launcher.json"
"""Job, process and machine of a live launcher."""
SUMMARY: Final = "summary.json"
NEVER_STARTED: Final = "never started"
"""Reason of a run that no launcher has started, as a wrapped job."""
LOG: Final = "launcher.log"
"""Output of a launcher in the background, in RUN/logs."""
_START_S: Final = 30.0
_END_S: Final = 15.0
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Mark:
    """The content of RUN/launcher.json."""

    job: str
    pid: int
    started: int | None
    """Clock ticks since boot: process ids are reused."""
    host: str

    @classmethod
    def of_this_process(cls, job: str) -> Mark:
        """Return the mark of this launcher of `job`."""
        pid = os.getpid()
        return cls(job, pid, start_ticks(pid), socket.gethostname())

    @property
    def is_here(self) -> bool:
        """Whether the process is on this machine, so that we can see it."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether its process runs; only meaningful on its machine."""
        _ended(self.pid)  # our own child is a zombie until somebody asks
        return self.started is not None and start_ticks(self.pid) == self.started


def read_mark(run_dir: Path) -> Mark | None:
    """Return the mark of `run_dir`, if it can be read."""
    raw = read_json(run_dir / MARK)
    try:
        return Mark(str(raw["job"]), int(raw["pid"]), raw["started"], str(raw["host"]))
    except (KeyError, TypeError, ValueError):
        return None


class BackgroundBackend(Backend):
    """Starts `holdfast run` in the background and watches it."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    def submit(
        self,
        run_dir: Path,
        files: Mapping[str, str],
        *,
        tasks: Sequence[int] | None = None,
        without: Sequence[str] = (),
    ) -> JobRef:
        """Start a launcher for `run_dir` that outlives this process.

        Raises:
            UserError: HF205 the job needs GPUs.
            PermanentError: it ended at once; with its last words.
        """
        del without  # all nodes are this machine
        assert tasks is None, "there are no arrays here"
        if json.loads(files["job.json"]).get("device") != "cpu":
            raise UserError(
                "HF205",
                "nodes with GPUs cannot be emulated on this machine; use cluster.gpu: cpu (as in "
                "--set cluster.gpu=cpu), or submit the job to a real cluster",
            )
        log = run_dir / "logs" / LOG
        log.parent.mkdir(parents=True, exist_ok=True)
        argv = [sys.executable, "-P", "-m", "launcher.cli.main", "run", "--resume", str(run_dir)]
        env = {**os.environ, "PYTHONPATH": python_path()}
        pid = _spawn(argv, env, log)

        def has_begun() -> bool:
            mark = read_mark(run_dir)
            if mark is not None and mark.pid == pid:
                return True
            code = _ended(pid)
            if code:
                said = log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
                raise PermanentError(f"the launcher ended at once: {said}")
            return code == 0  # it had nothing to do

        # Not in time: a slow machine, of which status will tell.
        polled(has_begun, bool, for_s=_START_S, every_s=_POLL_S)
        return JobRef(id=JobId(f"local-{pid}"), submit_time=time.time(), run_dir=str(run_dir))

    def status(self, jobs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """Return the status of each job, by its files and the table of processes."""
        return {job: _status(Path(job.run_dir)) for job in jobs}

    def ask_to_save(self, job: JobRef) -> bool:
        """Interrupt the launcher, as Ctrl-C does, once; False: it does not run."""
        if job.run_dir in self._asked:  # a second one would mean: at once
            return True
        self._asked.add(job.run_dir)
        return _interrupt(Path(job.run_dir))

    def cancel(self, job: JobRef) -> None:
        """Interrupt it twice; kill it when that does not help. Its agents die with it.

        Raises:
            PermanentError: it runs on another machine.
        """
        run_dir = Path(job.run_dir)
        for _ in range(2):
            if not _interrupt(run_dir):
                return
            time.sleep(0.2)  # two at once would be one

        def living() -> Mark | None:
            mark = read_mark(run_dir)
            return mark if mark is not None and mark.lives else None

        mark = polled(living, not_, for_s=_END_S, every_s=_POLL_S)
        if mark is not None:
            os.kill(mark.pid, signal.SIGKILL)

    def output_files(self, job: JobRef) -> list[Path]:
        """Return the log of launchers in the background."""
        log = Path(job.run_dir) / "logs" / LOG
        return [log] if log.is_file() else []

    def describe(self, job: JobRef) -> dict[str, str]:
        """Return the launcher's mark."""
        return {key: str(value) for key, value in read_json(Path(job.run_dir) / MARK).items()}


def _spawn(argv: list[str], env: Mapping[str, str], log: Path) -> int:
    """Start a process in a new session: Ctrl-C here is not meant for it."""
    with log.open("ab") as output, Path(os.devnull).open("rb") as nothing:
        actions = [
            (os.POSIX_SPAWN_DUP2, nothing.fileno(), 0),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
            (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
        ]
        return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsid=True)


def _ended(pid: int) -> int | None:
    """Return the exit code of a child that has ended; None: it runs, or is not our child."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if found else None


def _status(run_dir: Path) -> JobStatus:
    mark = read_mark(run_dir)
    if mark is None:
        code = read_json(run_dir / SUMMARY).get("code")
        if isinstance(code, int):
            return JobStatus(state=state_of(code), code=code, source=SUMMARY)
        words = "it was never started from here"
        return JobStatus(state=JobState.UNKNOWN, reason=NEVER_STARTED, words=words)
    if not mark.is_here:
        words = f"its launcher runs, or ran, on {mark.host}; ask there"
        return JobStatus(state=JobState.UNKNOWN, reason=f"on {mark.host}", words=words)
    if mark.lives:
        return JobStatus(state=JobState.RUNNING, nodes=(mark.host,), source="process table")
    words = "its launcher was killed"
    return JobStatus(state=JobState.FAILED, reason="the launcher is gone", words=words)


def _interrupt(run_dir: Path) -> bool:
    """Send SIGINT to the launcher; return False if it does not live."""
    mark = read_mark(run_dir)
    if mark is None:
        return False
    if not mark.is_here:
        raise PermanentError(f"{run_dir} runs on {mark.host}: cancel it there")
    if not mark.lives:
        return False
    try:
        os.kill(mark.pid, signal.SIGINT)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise PermanentError(f"process {mark.pid} of {run_dir} is another user's") from error
    return True
