"""`holdfast check`: every problem of a job file at once, or a short summary."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elastic_trainer.plan.quantities import counted
from launcher.cli.common import (
    exit_with_problems,
    folder_of,
    job_argument,
    json_option,
    print_json,
    print_problems,
    set_option,
    site_option,
)
from launcher.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from launcher.plan.search import Plan
    from launcher.platforms.sites import Site
    from launcher.spec.spec import JobSpec


@click.command(
    epilog="Example: holdfast check examples/llama3-405b.yaml --set layout.dp=4",
)
@job_argument
@set_option
@site_option
@click.option(
    "--to",
    "target",
    metavar="TARGET",
    help="Also check it for where it would run: local (the default for gpu: cpu), slurm, "
    "pytorchjob, jobset or trainjob. For local and slurm the paths must be there.",
)
@click.option(
    "--live",
    is_flag=True,
    help="Also ask the platform, as submit does, and for sbatch --test-only or a dry run.",
)
@click.option("--strict", is_flag=True, help="Take warnings for errors.")
@json_option
@click.pass_context
def check(
    ctx: click.Context,
    *,
    job: str,
    sets: tuple[str, ...],
    site: Site | None,
    target: str | None,
    live: bool,
    strict: bool,
    as_json: bool,
) -> None:
    """Check a job file; report every problem at once.

    Errors stop a job. Warnings, shown after them, are of what may not be meant. Exit codes: 0 the
    job can run, 2 it has errors, or with --strict warnings.
    """
    from launcher.plan.search import plan
    from launcher.plan.summary import plan_dict, summary_lines
    from launcher.platforms.targets import target_named
    from launcher.spec.reading import load_spec

    errors: list[Problem] = []
    warnings: list[Problem] = []
    try:
        spec = load_spec(job, sets, site=site)
        planned = plan(spec)
        warnings += planned.warnings
        named = target or (None if site is None else site.target)
        name = named or ("local" if spec.device == "cpu" else None)
        sees = not target_named(name or "slurm").sees_other_paths
        if sees and (name == "local" or target is not None or live):
            from launcher.runs.live import live_problems

            errors += live_problems(spec, folder_of(job))
        # What the job file alone does not show: times that do not fit, paths scripts cannot carry.
        shown = name or ("slurm" if spec.slurm_section is not None else "local")
        run_dir = folder_of(job) / "runs" / spec.name
        places = {"run_id": spec.name, "run_dir": run_dir, "base_dir": folder_of(job)}
        target_named(shown).check(spec, planned, **places)
        said: list[str] = []
        if live and not errors:
            said = _ask(spec, planned, name or "slurm", folder_of(job), warnings)
    except UserError as error:
        errors += error.problems
        warnings += error.warnings
    if strict:
        errors, warnings = [*errors, *warnings], []
    if errors:
        ctx.exit(exit_with_problems(UserError.many(errors, warnings), as_json=as_json))
    if as_json:
        answer: dict[str, Any] = {"ok": True, "problems": []}
        asked = {"platform": said} if live else {}
        print_json({**answer, **plan_dict(spec, planned), **asked})
        return
    print_problems(warnings)
    found = f", {counted(len(warnings), 'warning')}" if warnings else ""
    click.echo(f"{job}: " + click.style("ok", fg="green") + found)
    for line in [*summary_lines(spec, planned), *said]:
        click.echo(f"  {line}")


def _ask(
    spec: JobSpec, planned: Plan, target: str, base_dir: Path, warnings: list[Problem]
) -> list[str]:
    """Render the job for `target` and ask the platform about it; nothing is submitted.

    Returns:
        What it says; what the job would wait for is added to `warnings`, should it refuse it too.

    Raises:
        UserError: it would refuse the job, or never start it.
        PlatformError: it is away.
    """
    from launcher.platforms.targets import target_named
    from launcher.runs.submitting.asking import ask

    platform = target_named(target)
    run_dir = Path("runs", spec.name).absolute()
    files = platform.load_renderer()(
        spec, planned, run_id=spec.name, run_dir=run_dir, base_dir=base_dir, python=sys.executable
    )
    backend = platform.load_backend()
    warnings += ask(backend, files, spec=spec)
    return backend.check(files)
