"""What programs may use of the launcher; its commands use the same.

    import holdfast

    job = holdfast.load_job("job.yaml", ["train.steps=500"])
    print(holdfast.plan(job).ladder.rungs[0].layout.label)
    print(holdfast.render(job, to="slurm")["job.sbatch"])
    run = holdfast.submit(job, to="slurm")
    print(run.result()["final_loss"])

What is wrong with a job is a UserError, with all of it in `problems`. A platform that is away, or
answers garbage, is a PlatformError: TemporaryError where the same call may succeed later.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.plan.loading import load_spec as load_job
from launcher.plan.planning import Plan, plan
from launcher.platforms.sites import Site, find_site
from launcher.platforms.targets import target_named
from launcher.render.local import Bundle
from launcher.spec.errors import HoldfastError, Problem, UserError
from launcher.spec.spec import JobSpec

if TYPE_CHECKING:
    from launcher.doctor.why import Why
    from launcher.platforms.base import Backend
    from launcher.runs.runs import StoredRun as Found
    from launcher.runs.submitting.cancelling import Cancelled
    from launcher.runs.submitting.resume import Restarted, Resumed
    from launcher.runs.watching.follow_logs import Line
    from launcher.runs.watching.run_status import RunStatus

__all__ = [
    "FailedRunError",
    "Run",
    "find_site",
    "load_job",
    "open_run",
    "plan",
    "render",
    "submit",
    "submit_sweep",
]

Say = Callable[[str], None]
"""Shows progress, a line each."""


def render(
    job: JobSpec,
    planned: Plan | None = None,
    *,
    to: str = "slurm",
    run_dir: str | Path | None = None,
    python: str | None = None,
) -> Bundle:
    """Return what would be submitted: file name, relative to the run directory -> text.

    Nothing is written and no platform is asked.

    Args:
        job: from `load_job`.
        planned: from `plan`; None: made here.
        to: the platform: slurm, pytorchjob, jobset, trainjob or local.
        run_dir: None: ./runs/<name>.
        python: interpreter with holdfast on the nodes, where the job names none; None: this one.

    Raises:
        UserError: the platform cannot run the job as it is.
    """
    where = Path(run_dir or Path("runs") / job.name).absolute()
    return target_named(to).load_renderer()(
        job,
        planned or plan(job),
        run_id=job.name,
        run_dir=where,
        base_dir=job.folder,
        python=python or sys.executable,
    )


def submit(
    job: str | Path | Mapping[str, Any] | JobSpec,
    *,
    to: str | None = None,
    sets: Sequence[str] = (),
    site: Site | None = None,
    run_dir: str | Path | None = None,
    force: bool = False,
) -> Run:
    """Submit a job as `holdfast submit` does: all or nothing.

    Args:
        job: what `load_job` takes, or returns.
        to: the platform: slurm, pytorchjob, jobset, trainjob or local; None: the site's, or slurm.
        sets: overrides, as `train.steps=50`.
        site: from `find_site`.
        run_dir: None: ./runs/<name>-<time>.
        force: a job that the platform, asked before, would never start gets warnings alone.

    Raises:
        UserError: what is wrong with the job, or what the platform refuses.
        PlatformError: the platform is away, or answers garbage.
    """
    [run] = submit_sweep(job, {}, to=to, sets=sets, site=site, run_dir=run_dir, force=force)
    return run


def submit_sweep(
    job: str | Path | Mapping[str, Any] | JobSpec,
    sweep: Mapping[str, Sequence[Any]],
    *,
    to: str | None = None,
    sets: Sequence[str] = (),
    site: Site | None = None,
    run_dir: str | Path | None = None,
    force: bool = False,
) -> list[Run]:
    """Submit one run for every combination of values, as tasks of an array.

    Args:
        job: what `load_job` takes, or returns.
        sweep: key -> its values, as {"train.optimizer.lr": [1e-4, 3e-4]}.
        to: a platform that has arrays: slurm.
        sets: overrides for all of them.
        site: from `find_site`.
        run_dir: None: ./runs/<name>-<time>; task i runs in its folder i.
        force: see `submit`.

    Returns:
        The runs, the last key's values changing fastest; each has the `warnings` of all.

    Raises:
        UserError: what is wrong with the job, or what the platform refuses.
        PlatformError: the platform is away, or answers garbage.
    """
    from launcher.runs.submitting.submit import prepare
    from launcher.runs.submitting.submit import submit as submit_prepared

    if site is not None and site.ssh is not None:
        raise UserError("HF205", f"over SSH ({site.ssh}): submit with `holdfast submit --site`")
    target = to or (None if site is None else site.target) or "slurm"
    prepared = prepare(
        job,
        target=target,
        sets=sets,
        site=site,
        sweep=[f"{key}={','.join(map(json.dumps, values))}" for key, values in sweep.items()],
        run_dir=None if run_dir is None else Path(run_dir),
    )
    backend = target_named(target).load_backend()
    done = submit_prepared(prepared, backend, force=force)
    warnings = (*prepared.warnings, *done.warnings)
    return [Run(found, backend, warnings) for found in done.runs]


def open_run(name: str | Path, folder: str | Path = "runs") -> Run:
    """Return a run by its path, its name in `folder` or the beginning of it, or its job's id.

    Raises:
        UserError: HF613 no run has this name; HF651 several have; HF206 its platform is unknown.
    """
    from launcher.runs.runs import find_run

    return Run(find_run(str(name), Path(folder)))


class FailedRunError(HoldfastError):
    """A run has ended before its last step; `why` says why, with the evidence."""

    def __init__(self, why: Why) -> None:
        super().__init__("\n".join(why.lines()))
        self.why = why


class Run:
    """A run and its platform; `submit` and `open_run` return one.

    Methods raise a PlatformError where the platform does not answer; `status` says it instead.
    """

    def __init__(
        self, submitted: Found, backend: Backend | None = None, warnings: Sequence[Problem] = ()
    ) -> None:
        """Use `submit` or `open_run`."""
        from launcher.runs.watching.run_status import target_of

        self.target = target_of(submitted)
        self.submitted = submitted
        self.backend = backend or target_named(self.target).load_backend()
        self.warnings = tuple(warnings)
        """Of the job and of its platform, by `submit` or `resume`."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.target} job {self.job_id})"

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.submitted.path

    @property
    def shown(self) -> str:
        """What the caller named it."""
        return self.submitted.shown

    @property
    def job_id(self) -> str | None:
        """The platform's id of the job that carries the run now."""
        from launcher.runs.runs import current_job

        return current_job(self.submitted).id or None

    def status(self) -> RunStatus:
        """Return where the run stands: `state`, the platform's word, the run's own record."""
        from launcher.runs.watching.run_status import run_statuses

        [status] = run_statuses([self.submitted], {self.target: self.backend})
        return status

    def why(self) -> Why:
        """Return why the run is where it is: why it waits, or what failed first."""
        from launcher.doctor.why import explain

        status = self.status()
        return explain(status, self.backend.output_files(status.job), now_unix=time.time())

    def wait(self, timeout_s: float | None = None) -> RunStatus:
        """Wait until the run has ended, over all its requeues; return its status.

        Raises:
            TimeoutError: it has not within so many seconds; it continues.
        """
        from launcher.runs.watching.watch import Watch

        Watch(run=self.submitted, backend=self.backend, say=_nothing).wait(timeout_s)
        return self.status()

    def result(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the run has done its last step; return its summary (summary.json).

        Raises:
            FailedRunError: it has ended before.
            TimeoutError: it has not ended within so many seconds; it continues.
        """
        from launcher.platforms.base import JobState
        from launcher.runs.reports.data import current_summary

        if self.wait(timeout_s).state is not JobState.DONE:
            raise FailedRunError(self.why())
        return current_summary(self.path)[0]

    def logs(
        self,
        *,
        follow: bool = False,
        ranks: Collection[int] | None = (),
        nodes: Collection[str] = (),
        since_unix: float | None = None,
        pattern: re.Pattern[str] | None = None,
        say: Say | None = None,
    ) -> Iterator[Line]:
        """Yield the lines of the run's logs, across its attempts.

        Args:
            follow: wait for more until the run has ended.
            ranks: workers' logs; None: of all. Without ranks and nodes: the job's own output,
                rank 0, and events.
            nodes: of these only; without ranks their agents' logs.
            since_unix: omit what is certainly older.
            pattern: omit lines in which it is not found.
            say: shows what the platform does with the job, while it is followed.
        """
        from launcher.runs.fetching import fetched
        from launcher.runs.runs import current_job
        from launcher.runs.watching.follow_logs import LogReader, Selection
        from launcher.runs.watching.watch import Watch

        selection = Selection(
            ranks=frozenset(ranks or ()),
            nodes=frozenset(nodes),
            every_rank=ranks is None,
            since_unix=since_unix,
            pattern=pattern,
        )
        reader = LogReader(
            self.path, selection, lambda: self.backend.output_files(current_job(self.submitted))
        )
        if follow:
            watch = Watch(run=self.submitted, backend=self.backend, say=say or _nothing)
            for lines in watch.logs(reader):
                yield from lines
            return
        fetched(self.backend, current_job(self.submitted))
        reader.look()
        yield from reader.poll(last=True)

    def cancel(self, *, save: bool = False, say: Say | None = None) -> Cancelled:
        """End the run; only `resume` starts it again.

        Args:
            save: let the workers save first, and wait for that.
            say: shows how far that is.

        Raises:
            UserError: HF612 the run directory cannot be written.
        """
        from launcher.runs.submitting.cancelling import Canceller

        return Canceller(self.submitted, self.backend, say or _nothing).cancel(save=save)

    def resume(
        self,
        *,
        upgrade: bool = False,
        all_nodes: bool = False,
        force: bool = False,
        sets: Sequence[str] = (),
    ) -> Resumed:
        """Submit the run again: it resumes from its newest checkpoint.

        Args:
            upgrade: freeze code and environment again.
            all_nodes: use nodes that were excluded since the last submission.
            force: see `submit`.
            sets: what it asks of its platform from now on, as `slurm.time=1-00:00:00`.

        Raises:
            UserError: HF615 it has a live job; HF653 it was never submitted; HF655 `sets` change
                more.
        """
        from launcher.runs.submitting.resume import resume

        done = resume(
            [self.submitted],
            self.backend,
            upgrade=upgrade,
            all_nodes=all_nodes,
            force=force,
            sets=sets,
        )
        self.submitted, self.warnings = done.run, done.warnings
        return done

    def restart(self, *, say: Say | None = None) -> Restarted:
        """Let the run save and start again, on as many nodes as it was submitted with."""
        from launcher.runs.runs import find_run
        from launcher.runs.submitting.resume import restart

        done = restart(self.submitted, self.backend, say=say or _nothing)
        self.submitted = replace(find_run(str(self.path), self.path.parent), shown=self.shown)
        return done


def _nothing(_: str) -> None:
    pass
