"""Ends a run for good: asks it to save, waits as long as the clock chain allows, makes sure."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.platforms.base import NO_SUCH_JOB, Backend, JobRef, JobState, JobStatus, state_of
from launcher.platforms.retries import polled
from launcher.record import stop_request
from launcher.record.status import TrainingStatus
from launcher.render.local import MANIFESTS
from launcher.runs import run_dir as run_dirs
from launcher.runs.fetching import Fetcher
from launcher.runs.runs import StoredRun, current_job, jobs_of, note_act
from launcher.spec.errors import writing

_POLL_S = 2.0
_ENDING_S = 120.0
"""After a save, or a plain cancel: the platform clears nodes and notes the end."""
_AGAIN_S = 30.0
"""A request may be lost: to a node that has just failed, to a script that was starting."""
_RESTART = ("job.sbatch", "HOLDFAST_RESTART=")
_SAVE_TIMES = (("job.sbatch", "HOLDFAST_LEAD_S="), (MANIFESTS, "terminationGracePeriodSeconds:"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The outcome."""

    status: JobStatus
    saved_step: int | None
    """Newest step on storage; None: nothing was saved."""
    code: int | None
    """The job's exit code, by the platform or the run's own record."""
    was_over: bool = False
    """There was nothing to cancel."""
    unsaved: str = ""
    """Step and reason of the newest save where it failed: agents end with 91 all the same."""

    @property
    def saved(self) -> bool:
        """Whether the job itself has saved and left."""
        return (self.code == 91 or self.status.state is JobState.SAVED) and not self.unsaved


class Canceller:
    """Cancels one run; `say` shows progress, a line each."""

    def __init__(
        self,
        run: StoredRun,
        backend: Backend,
        say: Callable[[str], None],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.run, self.backend, self.say, self.sleep = run, backend, say, sleep
        self._fetcher = Fetcher(backend, say)

    def cancel(self, *, save: bool) -> Cancelled:
        """End the run, with `save` after a save; no job of it goes back into the queue.

        Raises:
            UserError: HF612 the run directory cannot be written.
            PlatformError: the platform does not answer, or refuses.
        """
        job = current_job(self.run)
        status = self.backend.status([job])[job]
        if status.state.is_final:
            return self._outcome(job, status, was_over=True)
        with writing(str(self.run.path)):
            note_act(self.run.path, "cancel", job=job.id, saves=save)
        fix = "its job would be put back into the queue; make room, or grant the permission"
        with writing(f"run directory {self.run.path}", f"{fix}, and cancel again"):
            stop_request.ask(self.run.path, why="holdfast cancel", t_unix=time.time())
        if save and status.state is not JobState.PENDING:
            status = self.saved(job, began=status.started)
            if status.state.is_final:
                return self._outcome(job, status)
            self.say(
                "it has not ended in time: it is cancelled now, and saves only if it can before "
                "the platform kills it"
            )
        # Successors first, so that none starts meanwhile.
        for other in reversed(jobs_of(self.run)):
            self.backend.cancel(other)
        status = polled(
            lambda: self.backend.status([job])[job],
            lambda status: status.state.is_final,
            for_s=_ENDING_S,
            every_s=_POLL_S / 4,
            sleep=self.sleep,
        )
        return self._outcome(job, status)

    def saved(self, job: JobRef, *, began: float | None) -> JobStatus:
        """Ask for a save; wait until the job has ended or was put back, or its time is over.

        `began` is its start as far as the caller knows; a later one is another start.
        """
        wait_s = _save_time_s(self.run.path) + _ENDING_S
        self.say(f"asking job {job.id} to save and to end (at most {wait_s:.0f} s)")
        asked_at, shown = -_AGAIN_S, ""

        def look() -> JobStatus:
            nonlocal asked_at, shown
            if time.monotonic() - asked_at >= _AGAIN_S:
                self.backend.ask_to_save(job)
                asked_at = time.monotonic()
            status = self.backend.status([job])[job]
            now = _progress(status, self._training(job))
            if now != shown:
                self.say(now)
                shown = now
            return status

        def is_over(status: JobStatus) -> bool:
            # Pending: it was put back into the queue a moment before it was asked.
            if status.state.is_final or status.state is JobState.PENDING:
                return True
            return began is not None and (status.started or 0.0) > began  # it runs again

        return polled(look, is_over, for_s=wait_s, every_s=_POLL_S, sleep=self.sleep)

    def _training(self, job: JobRef) -> TrainingStatus:
        """Return the run's own record, fetched where it is elsewhere."""
        self._fetcher.fetch(job)
        return run_dirs.read_training(self.run.path)

    def _outcome(self, job: JobRef, status: JobStatus, *, was_over: bool = False) -> Cancelled:
        training = self._training(job)
        code = status.code if status.code is not None else training.code
        failed = training.failed_saves[-1:]
        return Cancelled(
            status=_known(status, training),
            saved_step=training.saved_step,
            code=code,
            was_over=was_over,
            unsaved="".join(f"step {event.step}: {event.fields.get('reason')}" for event in failed),
        )


def _save_time_s(run_dir: Path) -> float:
    """Return how long a save may take: the script's HOLDFAST_LEAD_S, or the pods' grace period."""
    for name, marker in _SAVE_TIMES:
        digits = _submitted_value(run_dir, name, marker)
        if digits.isascii() and digits.isdigit() and len(digits) < 7:
            return float(digits)
    return 600.0


def puts_itself_back(run_dir: Path) -> bool:
    """Return whether the batch script puts its own job back into the queue after a save."""
    return _submitted_value(run_dir, *_RESTART) == "requeue"


def _submitted_value(run_dir: Path, name: str, marker: str) -> str:
    """Return the word after `marker` in a submitted file, an array's, or a wrapped script's."""
    for path in (run_dir / name, run_dir / run_dirs.AGENTS_SCRIPT, run_dir.parent / name):
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="utf-8", errors="replace")
            _, found, rest = text.partition(marker)
            if found and rest.split():
                return rest.split(maxsplit=1)[0]
    return ""


def _known(status: JobStatus, training: TrainingStatus) -> JobStatus:
    """Return the job's status; when the platform has forgotten it, by the run's record."""
    if status.reason != NO_SUCH_JOB or training.code is None:
        return status
    return replace(status, state=state_of(training.code), code=training.code)


def _progress(status: JobStatus, training: TrainingStatus) -> str:
    step, state = training.saved_step, _known(status, training).state
    saved = "nothing saved yet" if step is None else f"saved: step {step}"
    if training.code is not None:
        return f"{state}: the agents have ended with {training.code}, {saved}"
    return f"{state}: {training.state}, {training.step_text}, {saved}"
