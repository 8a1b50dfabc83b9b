"""What programs may use of the launcher: load, plan, render, submit.

    from launcher.api import load_job, plan, render, submit

    job = load_job("job.yaml", ["train.steps=500"])
    print(plan(job).ladder.rungs[0].layout.label)
    print(render(job, to="slurm")["job.sbatch"])
    submitted = submit("job.yaml", to="slurm")

Problems of the job file are a launcher.errors.UserError, with all of them in `problems`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.jobspec.reading import load_spec as load_job
from launcher.jobspec.spec import JobSpec
from launcher.planning.search import Plan, plan
from launcher.render.bundle import Bundle
from launcher.targets import target_named

if TYPE_CHECKING:
    from launcher.ops.submitting.submit import Submitted

__all__ = ["load_job", "plan", "render", "submit"]


def render(
    job: JobSpec,
    planned: Plan | None = None,
    *,
    to: str = "slurm",
    run_dir: str | Path | None = None,
    base_dir: str | Path | None = None,
    python: str | None = None,
) -> Bundle:
    """Return what would be submitted: file name, relative to the run directory -> text.

    Nothing is written and no platform is asked.

    Args:
        job: from `load_job`.
        planned: from `plan`; None: made here.
        to: the platform: slurm, pytorchjob, jobset, trainjob or local.
        run_dir: where the files will lie; None: ./runs/<name>.
        base_dir: folder that relative paths of the job are relative to; None: the job file's.
        python: interpreter with holdfast on the nodes, where the job names none; None: this one.

    Raises:
        UserError: the platform cannot run the job as it is.
    """
    where = Path(run_dir or Path("runs") / job.name).absolute()
    return target_named(to).load_renderer()(
        job,
        planned or plan(job),
        run_id=where.name,
        run_dir=where,
        base_dir=base_dir or Path(job.source.file).absolute().parent,
        python=python or sys.executable,
    )


def submit(
    job: str | Path,
    *,
    to: str = "slurm",
    sets: Sequence[str] = (),
    sweep: Sequence[str] = (),
    run_dir: str | Path | None = None,
) -> Submitted:
    """Submit a job file as `holdfast submit` does: all or nothing.

    Args:
        job: path of the job file.
        to: the platform: slurm, pytorchjob, jobset, trainjob or local.
        sets: overrides, as `train.steps=50`.
        sweep: `KEY=V1,V2`; every combination is a task of one array.
        run_dir: None: ./runs/<name>-<time>.

    Returns:
        The job's id and the run directories.

    Raises:
        UserError: the job file, or what the platform refuses.
        PlatformError: the platform is away, or answers garbage.
    """
    from launcher.ops.submitting.submit import prepare
    from launcher.ops.submitting.submit import submit as submit_prepared

    prepared = prepare(
        str(job),
        target=to,
        stamp=datetime.now().astimezone().strftime("%Y%m%d-%H%M%S"),
        python=sys.executable,
        sets=sets,
        sweep=sweep,
        run_dir=None if run_dir is None else Path(run_dir),
    )
    return submit_prepared(prepared, target_named(to).load_backend())
