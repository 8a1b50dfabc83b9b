"""`holdfast restart`: has a running job save, and start again on all the nodes it was given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from launcher.backends.base import Backend, JobRef, JobState
from launcher.errors import UserError
from launcher.ops.record.newest import read_news
from launcher.ops.runs import Run, current_job
from launcher.ops.submitting.cancelling import Canceller, puts_itself_back, save_time_s
from launcher.ops.submitting.resume import resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted:
    """What came of it."""

    job: JobRef | None
    """Of the next start; None: there is none, for the run is done, or has not saved in time."""
    requeued: bool
    """The same job was put back into the queue; else it was submitted again."""
    saved_step: int | None
    """Newest step on storage; None: nothing was saved."""
    done: bool = False
    """Its last step was done meanwhile."""


def restart(run: Run, backend: Backend, *, say: Callable[[str], None]) -> Restarted:
    """Have a run save and start again.

    Where the batch script puts its own job back into the queue after a save (`slurm.restart:
    requeue`), it does so. Elsewhere the job is cancelled with a save and submitted again.

    Args:
        run: which; it must be running.
        backend: its platform's.
        say: shows progress, a line each.

    Raises:
        UserError: HF662 it does not run, or is suspended; HF653 it was never submitted.
        PlatformError: the platform is away, or refuses.
    """
    job = current_job(run)
    status = backend.status([job])[job]
    if status.state is not JobState.RUNNING or status.suspended:
        state = "suspended" if status.suspended else str(status.state)
        raise UserError(
            "HF662",
            f"{run.shown} is {state}: only a job that runs can save and start again; "
            f"holdfast why {run.shown} says more",
        )
    if run.submission is None:
        raise UserError(
            "HF653",
            f"{run.path} was started by `holdfast run`, which ends with its terminal: press Ctrl-C "
            f"there, it saves; go on with: holdfast run --resume {run.shown}",
        )
    began = status.started or float("inf")
    canceller = Canceller(
        run=run,
        backend=backend,
        say=say,
        wait_s=save_time_s(run.path),
    )
    if puts_itself_back(run.path):
        status = canceller.saved(job)
        news = read_news(run.path)
        saved_step = news.progress.saved_step
        if not status.state.is_final:
            again = status.state is JobState.PENDING or (status.started or 0.0) > began
            return Restarted(job=job if again else None, requeued=again, saved_step=saved_step)
    else:
        saved_step = canceller.cancel(save=True).saved_step
    resumed = resume(run, backend)
    return Restarted(
        job=resumed.job, requeued=False, saved_step=saved_step, done=resumed.job is None
    )
