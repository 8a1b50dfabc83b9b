"""What `submit` keeps with a run so that every later start is the same: code, environment.

`survey_run` looks and refuses, before anything is made; `keep_run` copies and records;
`upgrade_run` does so anew for a run that exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launcher.jobspec.spec import JobSpec
from launcher.ops.submitting.code_files import CodeFiles
from launcher.ops.submitting.env_archive import load_archive, pack, share
from launcher.ops.submitting.environment import (
    Environment,
    changes,
    describe,
    load_environment,
    record_environment,
)
from launcher.ops.submitting.freeze import Frozen, adopt, freeze_run, load_frozen, survey, upgrade
from launcher.render.local import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What is to be kept of a job."""

    code: CodeFiles | None
    """None: it runs no code of the user's."""
    environment: Environment | None
    """None: it is not on this machine."""
    stage: str | None
    """Folder on the nodes that the environment is copied to."""


def survey_run(
    spec: JobSpec,
    *,
    base_dir: str | Path,
    run_dir: Path,
    look: bool = True,
    pod_image: str | None = None,
) -> Survey:
    """Look at the code and the environment of a job. Reads only.

    Args:
        spec: the checked job.
        base_dir: folder that its relative paths are relative to.
        run_dir: where the run will be.
        look: the environment must be there; nodes may see other paths than this machine.
        pod_image: the image that Kubernetes runs; the launcher's own environment says nothing then.

    Raises:
        UserError: HF201 something is not there; HF202 it cannot be read; HF640 too much code.
    """
    code = survey(spec, base_dir=base_dir, run_dir=run_dir)
    venv = None if spec.env.venv is None else Path(resolve(spec.env.venv, base_dir))
    if pod_image is not None:
        seen = venv if venv is not None and venv.is_dir() else None
        environment: Environment | None = describe(venv=seen, image=pod_image)
    else:
        there = look or venv is None or venv.is_dir()
        environment = describe(venv=venv, image=spec.env.image) if there else None
    return Survey(code=code, environment=environment, stage=spec.env.stage)


def keep_run(
    run_dir: Path,
    found: Survey,
    *,
    home: Path | None = None,
    like: Path | None = None,
    wall: Callable[[], float] = time.time,
) -> Frozen | None:
    """Copy the code, record the environment and pack it where it is to be staged.

    Args:
        run_dir: the run directory, with job.json in it.
        found: what `survey_run` returned.
        home: folder that gets the copy of the code; None: the run.
        like: a run for which this was just done: its copies are used, not made again.
        wall: the clock.

    Returns:
        The frozen code; None: there is none.

    Raises:
        UserError: HF641 a file cannot be copied; HF612 the run cannot be written; HF202.
    """
    frozen = None if like is None else load_frozen(like)[0]
    if frozen is not None:
        adopt(run_dir, frozen, wall=wall)
    elif found.code is not None:
        frozen = freeze_run(run_dir, found.code, home=home, wall=wall)
    if found.environment is None:
        return frozen
    record_environment(run_dir, found.environment, wall=wall)
    if found.stage is not None and found.environment.prefix is not None:
        if like is None:
            pack(Path(found.environment.prefix), run_dir, stage=found.stage)
        else:
            share(like, run_dir)
    return frozen


def upgrade_run(run_dir: Path, *, wall: Callable[[], float] = time.time) -> list[str]:
    """Make later starts of a run use the code and the environment as they are now.

    The caller has made sure that no job of the run is live.

    Returns:
        What changed, a line each; empty: nothing. All of it is in the events, too.

    Raises:
        UserError: HF642 nothing was kept with this run; else as `survey_run`, `keep_run`.
    """
    said = []
    before = load_environment(run_dir)
    if before is None or load_frozen(run_dir)[0] is not None:
        was, now = upgrade(run_dir, wall=wall)
        if was.digest != now.digest:
            revision = f" ({_revision(was)} -> {_revision(now)})"
            said.append(f"code {was.digest[:12]} -> {now.digest[:12]}{revision}")
    if before is not None:
        prefix = None if before.prefix is None else Path(before.prefix)
        found = describe(venv=prefix, image=before.image)
        if found.digest != before.digest:
            record_environment(run_dir, found, wall=wall)
            said += [f"environment: {change}" for change in changes(before, found)]
        archive = load_archive(run_dir)
        if archive is not None:
            pack(Path(archive.prefix), run_dir, stage=archive.stage)
    return said


def _revision(frozen: Frozen) -> str:
    if frozen.revision is None:
        return "no revision"
    return frozen.revision[:12] + ("+" if frozen.dirty else "")
