"""`holdfast render`: what would be submitted, as text; nothing is contacted."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.common import (
    dicts,
    exit_with_problems,
    folder_of,
    job_argument,
    json_option,
    path_option,
    print_json,
    print_problems,
    set_option,
    site_option,
)
from launcher.cli.terminal import for_programs
from launcher.spec.errors import UserError

if TYPE_CHECKING:
    from launcher.platforms.sites import Site


@click.command(
    epilog="""\b
Examples:
  holdfast render examples/llama3-405b.yaml --to slurm
  holdfast render examples/llama3-405b.yaml --to slurm -o runs/405b && sbatch runs/405b/job.sbatch
  holdfast render examples/llama3-8b.yaml --to jobset | kubectl apply --dry-run=server -f -
""",
)
@job_argument
@click.option(
    "--to",
    "target",
    metavar="TARGET",
    help="slurm, pytorchjob, jobset, trainjob or local  [default: the site's, or slurm]",
)
@path_option(
    "-o",
    "--output",
    help="Write the bundle into DIR, which is then the run directory. Without it the script is "
    "printed, for ./runs/NAME.",
)
@set_option
@site_option
@json_option
@click.pass_context
def render(
    ctx: click.Context,
    *,
    job: str,
    target: str | None,
    output: Path | None,
    sets: tuple[str, ...],
    site: Site | None,
    as_json: bool,
) -> None:
    """Show or write what would be submitted: the script, and job.json.

    The same job file, options and folder give the same text. Exit code 2: it has problems,
    nothing was written.
    """
    from launcher.plan.search import plan
    from launcher.platforms.targets import target_named
    from launcher.runs.run_dir import write_bundle
    from launcher.spec.reading import load_spec

    try:
        named = target or (None if site is None else site.target)
        renderer = target_named(named or "slurm").load_renderer()
        spec = load_spec(job, sets, site=site)
        planned = plan(spec)
        run_dir = Path(output or Path("runs") / spec.name).absolute()
        bundle = renderer(
            spec,
            planned,
            run_id=spec.name,  # a folder may have any name, and the job keeps its own
            run_dir=run_dir,
            base_dir=folder_of(job),
            python=sys.executable,
        )
        if output is not None:
            write_bundle(run_dir, bundle)
    except UserError as error:
        ctx.exit(exit_with_problems(error, as_json=as_json))
    if as_json:
        warnings = dicts(planned.warnings)
        answer = {"ok": True, "problems": [], "warnings": warnings, "run_dir": str(run_dir)}
        print_json({**answer, "written": output is not None, "files": bundle})
        return
    print_problems(planned.warnings)
    if output is not None:
        for name in bundle:
            click.echo(output / name)
    else:
        click.echo(next(iter(bundle.values())), file=for_programs(sys.stdout), nl=False)
