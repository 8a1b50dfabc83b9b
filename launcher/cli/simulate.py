"""`holdfast simulate`: what failures would cost a job over months, and what spares are worth."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elastic_trainer.plan.quantities import counted
from launcher.cli.common import (
    dicts,
    job_argument,
    json_option,
    path_option,
    print_json,
    print_problems,
    set_option,
    site_option,
)
from launcher.cli.terminal import direct, print_table

if TYPE_CHECKING:
    from launcher.plan.simulation.study import Study
    from launcher.platforms.sites import Site

EPILOG = """\b
Examples:
  holdfast simulate examples/llama3-405b.yaml
  holdfast simulate job.yaml --assume repair_h=72 --assume restart_s=40
  holdfast simulate job.yaml --run runs/rehearsal --picture spares.svg
"""


@click.command("simulate", epilog=EPILOG)
@job_argument
@set_option
@site_option
@click.option(
    "--assume",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another rate or time than that of docs/simulate.md, as repair_h=72. Repeatable.",
)
@click.option(
    "--run",
    metavar="RUN",
    help="Take the times of recoveries from this run's record, and show its goodput.",
)
@path_option(
    "--runs", default=Path("runs"), show_default="./runs", help="Folder where RUN is looked for."
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 10_000),
    default=40,
    show_default=True,
    help="Courses of events to average over.",
)
@path_option("--picture", metavar="FILE", help="Draw goodput by spares and interval; an .svg file.")
@json_option
def simulate(
    *,
    job: str,
    sets: tuple[str, ...],
    site: Site | None,
    assume: Sequence[str],
    run: str | None,
    runs: Path,
    seeds: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Simulate months of a fleet that runs JOB: goodput, its losses, spares, checkpoint interval.

    Nodes fail as those of Llama 3's training did, unless assumed otherwise (docs/simulate.md). The
    same job, assumptions and seeds give the same numbers.
    """
    from launcher.plan.loading import load_spec
    from launcher.plan.planning import plan
    from launcher.plan.simulation.assumptions import assumptions
    from launcher.plan.simulation.fleet import fleet_of
    from launcher.plan.simulation.study import measured_phases, settings, study

    if picture is not None:
        from launcher.runs.reports.report import check_picture

        check_picture(picture)
    measured = goodput = None
    if run is not None:
        from launcher.runs.reports.data import current_summary
        from launcher.runs.runs import find_run

        summary, _ = current_summary(find_run(run, runs).path)
        measured, goodput = measured_phases(summary["failures"]), summary["goodput"]
    assumed = assumptions(assume, measured)
    spec = load_spec(job, sets, site=site)
    planned = plan(spec)
    fleet = fleet_of(spec, planned.ladder, planned.snapshots, assumed)
    with _progress(settings(fleet)) as advance:
        found = study(fleet, seeds=seeds, advance=advance)
    if picture is not None:
        _draw(found, picture)
    if as_json:
        answer = {"ok": True, "problems": [], "warnings": dicts(planned.warnings)}
        said = {"measured_goodput": goodput, **found.to_json()}
        print_json({**answer, "name": spec.name, **said})
    else:
        print_problems(planned.warnings)
        _print(spec.name, found, goodput)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """Yield what is called after each of `total` settings; it shows a bar on a terminal."""
    stream = direct(sys.stderr)
    if not stream.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("simulating", total=total)
        yield lambda: bar.advance(task)


def _draw(found: Study, path: Path) -> None:
    from launcher.runs.reports.fleet_picture import fleet_picture  # it takes a while to import
    from launcher.runs.reports.report import write_picture

    write_picture(path, lambda: fleet_picture(found))


def _print(name: str, found: Study, measured: float | None) -> None:
    fleet, whole = found.fleet, found.estimate
    all_hours = sum(whole.gpu_hours.values())
    click.echo(
        f"{name}: {counted(fleet.nodes, 'node')}, {counted(fleet.spares, 'spare')}, "
        f"{fleet.assumed.days:g} days, {counted(found.seeds, 'seed')}"
    )
    click.echo(
        f"goodput   {whole.goodput:.2%} (90 % of seeds: {whole.low:.2%} to {whole.high:.2%})"
    )
    if measured is not None:
        click.echo(f"measured  {measured:.2%} in the run's record")
    points = 100 * (found.unequal.goodput - whole.goodput)
    click.echo(
        f"unequal   {found.unequal.goodput:.2%} ({points:+.2f} points) if replicas could shrink by "
        "themselves"
    )
    click.echo(f"allocated {all_hours:,.0f} GPU-hours, without spares:")
    rows = [
        (cause, f"{hours:,.0f}", f"{hours / all_hours:.2%}")
        for cause, hours in whole.gpu_hours.items()
    ]
    print_table(("cause", "GPU-hours", "share"), rows, numbers=("GPU-hours", "share"))
    _print_spares(found)
    _print_intervals(found)


def _print_spares(found: Study) -> None:
    worth, advised = found.worth(), found.advised_spares
    marks = {advised: "advised"} | {
        found.fleet.spares: "the job's, advised" if advised == found.fleet.spares else "the job's"
    }
    rows = [
        (
            f"{count:,}",
            f"{each.goodput:.2%}",
            f"{each.low:.2%} - {each.high:.2%}",
            f"{100 * worth[count]:+.3f}" if count in worth else "-",
            f"{unequal.goodput:.2%}",
            marks.get(count, ""),
        )
        for count, (each, unequal) in sorted(found.by_spares.items())
    ]
    names = ("spares", "goodput", "90 % of seeds", "points each", "unequal", "")
    print_table(names, rows, numbers=names[:-1])
    click.echo(f"A spare costs {100 / found.fleet.nodes:.3f} points; ask for {advised:,}.")


def _print_intervals(found: Study) -> None:
    from launcher.plan.simulation.fleet import NEVER_S

    every_s = found.fleet.interval_s
    shortest, longest = found.flat_s
    formulae = "no failure needs storage"
    if found.young_s is not None and found.daly_s is not None and found.storage_mtbf_s is not None:
        formulae = (
            f"Young {found.young_s:,.0f} s, Daly {found.daly_s:,.0f} s; storage is needed once in "
            f"{found.storage_mtbf_s / 3600:,.1f} h"
        )
    click.echo(
        f"Checkpoints every {'-' if every_s >= NEVER_S else f'{every_s:,.0f}'} s; best "
        f"{found.best_interval_s:,.0f} s, as good {shortest:,.0f} to {longest:,.0f} s; {formulae}."
    )
