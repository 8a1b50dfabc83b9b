"""`holdfast check`, `plan`, `render` and `schema`: what a job file says; nothing is submitted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elastic_trainer.plan.quantities import counted
from launcher.cli.common import (
    TARGETS_HELP,
    dicts,
    job_argument,
    json_option,
    path_option,
    print_json,
    print_problems,
    set_option,
    site_option,
    target_on,
    target_option,
)
from launcher.cli.terminal import for_programs, print_table
from launcher.spec.errors import Problem, UserError, Where

if TYPE_CHECKING:
    from launcher.plan.planning import Plan
    from launcher.platforms.sites import Site
    from launcher.spec.spec import JobSpec


TOP = 5
"""Layouts that are shown beside a picture."""
DRAWN = 300
"""Layouts that are drawn."""


@click.command(epilog="Example: holdfast check examples/llama3-405b.yaml --set layout.dp=4")
@job_argument
@set_option
@site_option
@target_option(
    "Also check it for where it would run: local (the default for gpu: cpu), slurm, "
    "pytorchjob, jobset or trainjob. For local and slurm the paths must be there."
)
@click.option(
    "--live",
    is_flag=True,
    help="Also ask the platform, as submit does, and for sbatch --test-only or a dry run.",
)
@click.option("--strict", is_flag=True, help="Take warnings for errors.")
@json_option
def check(
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
    from launcher.plan.loading import load_spec
    from launcher.plan.planning import plan as make_plan
    from launcher.plan.summary import plan_dict, summary_lines
    from launcher.platforms.targets import target_named
    from launcher.runs.submitting.passes import drawn, drawn_dicts, drawn_lines

    errors: list[Problem] = []
    warnings: list[Problem] = []
    try:
        spec = load_spec(job, sets, site=site)
        planned = make_plan(spec)
        warnings += planned.warnings
        name = target_on(site, target) or ("local" if spec.device == "cpu" else None)
        is_here = not target_named(name or "slurm").sees_other_paths
        if is_here and (name == "local" or target is not None or live):
            from launcher.runs.submitting.asking import live_problems

            found = live_problems(spec, spec.folder)
            errors += [each for each in found if not each.is_warning]
            warnings += [each for each in found if each.is_warning]
        # What the job file alone does not show: times that do not fit, paths scripts cannot carry.
        shown = name or ("slurm" if spec.slurm_section is not None else "local")
        run_dir = spec.folder / "runs" / spec.name
        places = {"run_id": spec.name, "run_dir": run_dir, "base_dir": spec.folder}
        target_named(shown).check(spec, planned, **places)
        said: list[str] = []
        if live and not errors:
            said = _ask(spec, planned, name or "slurm", warnings)
    except UserError as error:
        errors += error.problems
        warnings += error.warnings
    if strict:
        errors, warnings = [*errors, *warnings], []
    if errors:
        raise UserError.many(errors, warnings)
    if as_json:
        answer: dict[str, Any] = {"ok": True, "problems": []}
        asked = {"platform": said} if live else {}
        data = {"data": drawn_dicts(drawn(spec))}
        print_json({**answer, **plan_dict(spec, planned), **data, **asked})
        return
    print_problems(warnings)
    beside = f", {counted(len(warnings), 'warning')}" if warnings else ""
    click.echo(f"{job}: " + click.style("ok", fg="green") + beside)
    for line in [*summary_lines(spec, planned), *drawn_lines(drawn(spec)), *said]:
        click.echo(f"  {line}")


def _ask(spec: JobSpec, planned: Plan, target: str, warnings: list[Problem]) -> list[str]:
    """Return what the platform says of a job; what it would wait for is added to `warnings`."""
    from launcher.api import render as rendered
    from launcher.platforms.targets import target_named
    from launcher.runs.submitting.asking import ask

    files = rendered(spec, planned, to=target)
    backend = target_named(target).load_backend()
    warnings += ask(backend, files, spec=spec)
    return backend.check(files)


@click.command(epilog="Example: holdfast plan examples/llama3-405b.yaml --nodes 1900")
@job_argument
@set_option
@site_option
@click.option("--nodes", type=click.IntRange(min=1), help="Plan for this many nodes left.")
@click.option("--all", "show_all", is_flag=True, help="Show every fallback layout and every node.")
@click.option(
    "--top",
    type=click.IntRange(min=1, max=1000),
    metavar="N",
    help="Show the N fastest layouts that fit all nodes, or those of --nodes, whatever the job "
    "file has.",
)
@click.option("--explain", is_flag=True, help="Show what a step's predicted time consists of.")
@path_option(
    "--picture", metavar="FILE", help="Draw speed against memory of the layouts; an .svg file."
)
@json_option
def plan(
    *,
    job: str,
    sets: tuple[str, ...],
    site: Site | None,
    nodes: int | None,
    show_all: bool,
    top: int | None,
    explain: bool,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Show layout, placement and ladder of a job.

    With --nodes, the layout the job would use when that many nodes are left. With --top, the
    fastest layouts: what to write into the job file, or `layout: auto`.
    """
    from launcher.plan.loading import load_spec
    from launcher.plan.planning import plan as make_plan
    from launcher.plan.summary import (
        change_line,
        change_of,
        faster_layout,
        ladder_lines,
        placement_lines,
        plan_dict,
        rung_dict,
        summary_lines,
    )
    from launcher.runs.submitting.passes import drawn, drawn_dicts, drawn_lines

    spec = load_spec(job, sets, site=site)
    if top is not None or picture is not None:
        _show_fastest(spec, top or TOP, nodes, picture, explain=explain, as_json=as_json)
        return
    planned = make_plan(spec)
    left = spec.cluster.nodes if nodes is None else nodes
    if (rung := planned.ladder.rung_for(left)) is None:
        message = f"{counted(left, 'node')} left, the last rung needs {planned.ladder.min_nodes}"
        where = Where(job, None, "--nodes")
        raise UserError("HF125", f"{message}: waiting for replacements", where=where)
    spares = left - rung.num_nodes
    if as_json:
        chosen = {"nodes": left, "spares": spares, "rung": rung_dict(spec, rung)}
        answer = {"ok": True, "problems": [], **plan_dict(spec, planned), "chosen": chosen}
        print_json({**answer, "data": drawn_dicts(drawn(spec))})
        return
    print_problems(planned.warnings)
    lines = summary_lines(spec, planned, rung, explain=explain)
    for line in [*lines, *drawn_lines(drawn(spec))]:
        click.echo(line)
    if (change := change_of(spec, planned)) is not None:
        click.echo(change_line(change))
    if nodes is not None:
        click.echo(f"nodes    {left:,} left: layout of {rung.num_nodes:,}, {spares:,} spare")
    elif (faster := faster_layout(spec, planned)) is not None:
        click.echo(f"fastest  {faster}: holdfast plan --top {TOP}")
    click.echo("\nPlacement (rank order: " + ", ".join(rung.layout.order) + ", innermost first)")
    for line in placement_lines(rung, spec.cluster.gpus_per_node, show_all=show_all):
        click.echo(f"  {line}")
    click.echo("\nLadder")
    batches = spec.facts.num_micro_batches if spec.command is None else None
    for line in ladder_lines(planned.ladder, batches, show_all=show_all):
        click.echo(f"  {line}")


def _show_fastest(
    spec: JobSpec,
    count: int,
    nodes: int | None,
    picture: Path | None,
    *,
    explain: bool,
    as_json: bool,
) -> None:
    """Print the fastest layouts of so many nodes, or all of the job's."""
    from launcher.plan.planning import find_fastest
    from launcher.plan.summary import layout_dict, layout_rows, time_lines
    from launcher.runs.reports.report import check_picture, write_picture

    if picture is not None:
        check_picture(picture)
    found = find_fastest(spec, max(count, DRAWN if picture else 0), nodes)
    if picture is not None:
        from launcher.runs.reports.layouts_picture import layouts_picture  # it takes a while

        write_picture(picture, lambda: layouts_picture(found))
    shown = found[:count]
    if as_json:
        print_json({"ok": True, "layouts": [layout_dict(each, found[0]) for each in shown]})
        return
    names, rows = layout_rows(shown)
    print_table(names, rows, numbers={"", "micro-batch", "GiB", "step s", "tokens/s/GPU"})
    for number, each in enumerate(shown if explain else (), 1):
        click.echo(f"{number}  {each.layout.label}: {', '.join(time_lines(each.time))}")
    written = [f"{key}: {json.dumps(value)}" for key, value in found[0].settings().items()]
    click.echo(f"The first in the job file: {', '.join(written)}")


@click.command(
    epilog="""\b
Examples:
  holdfast render examples/llama3-405b.yaml --to slurm
  holdfast render examples/llama3-405b.yaml --to slurm -o runs/405b && sbatch runs/405b/job.sbatch
  holdfast render examples/llama3-8b.yaml --to jobset | kubectl apply --dry-run=server -f -
"""
)
@job_argument
@target_option(TARGETS_HELP)
@path_option(
    "-o",
    "--output",
    help="Write the bundle into DIR, which is then the run directory. Without it the script is "
    "printed, for ./runs/NAME.",
)
@set_option
@site_option
@json_option
def render(
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
    from launcher.api import render as rendered
    from launcher.plan.loading import load_spec
    from launcher.plan.planning import plan as make_plan
    from launcher.platforms.targets import target_named

    name = target_on(site, target) or "slurm"
    target_named(name)  # before the job: a wrong name is all that is said
    spec = load_spec(job, sets, site=site)
    planned = make_plan(spec)
    run_dir = Path(output or Path("runs") / spec.name).absolute()
    bundle = rendered(spec, planned, to=name, run_dir=run_dir)
    if output is not None:
        from launcher.runs.run_dir import write_bundle

        write_bundle(run_dir, bundle)
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


@click.command(epilog="Example: holdfast schema > job.schema.json")
def schema() -> None:
    """Print the JSON schema of job files, for editors.

    In an editor with the YAML language server, begin a job file with
    `# yaml-language-server: $schema=job.schema.json`.
    """
    from launcher.spec.spec import job_schema

    print_json(job_schema())
