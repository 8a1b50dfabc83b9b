"""`holdfast cost`: what GPU-hours were spent on."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import click

from launcher.cli.common import EXIT_DONE, EXIT_FAILED, json_option, print_json, runs_option
from launcher.cli.terminal import direct, wide_console
from launcher.record.cost import CAUSES, QUEUE, GpuTime, total
from launcher.runs.reports.data import RunCost, costs, grouped
from launcher.runs.runs import find_run, find_runs

EPILOG = """\b
Examples:
  holdfast cost
  holdfast cost llama3-405b-20260101-120000
  holdfast cost --runs /shared/runs --by user --since 2026-01 --csv
"""
_COLUMNS = ("allocated", *CAUSES, QUEUE)


@click.command("cost", epilog=EPILOG)
@click.argument("runs_named", metavar="[RUN]...", nargs=-1)
@runs_option
@click.option(
    "--by",
    type=click.Choice(["run", "user", "month"]),
    default="run",
    show_default=True,
    help="What a row is.",
)
@click.option(
    "--since",
    metavar="YYYY-MM",
    type=click.DateTime(["%Y-%m"]),
    help="Leave out the months before this one (UTC).",
)
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV on stdout.")
@json_option
def cost(
    *,
    runs_named: tuple[str, ...],
    runs: Path,
    by: str,
    since: datetime | None,
    as_csv: bool,
    as_json: bool,
) -> int:
    """Print the GPU-hours of RUNs, or of all runs of a folder, by cause.

    productive, redone, restart, hang, other and idle sum to allocated; queue is
    what was asked for and not yet allocated (docs/cost.md). Where a speed was predicted, a run's
    is shown beside it.
    """
    asked = [find_run(name, runs) for name in runs_named] or list(find_runs(runs))
    found, problems = costs(asked)
    groups = grouped(found, by, since=f"{since:%Y-%m}" if since else "")
    speeds = {each.run: _speeds(each) for each in found} if by == "run" else {}
    if as_json:
        rows = [
            {by: name, **spent.to_json(), **speeds.get(name, {})} for name, spent in groups.items()
        ]
        print_json({"by": by, "gpu_hours": rows, "problems": problems})
    elif as_csv:
        _print_csv(groups, by)
    else:
        _print_table(groups, by, speeds, empty=f"no GPU-hours of runs in {runs}")
    if not as_json:
        for problem in problems:
            click.echo(problem, err=True)
    return EXIT_FAILED if problems and not found else EXIT_DONE


def _speeds(cost: RunCost) -> dict[str, float | None]:
    return {
        "tokens_per_s": cost.tokens_per_s,
        "predicted_tokens_per_s": cost.predicted_tokens_per_s,
    }


def _print_csv(groups: Mapping[str, GpuTime], by: str) -> None:
    writer = csv.writer(direct(sys.stdout), lineterminator="\n")
    writer.writerow([by, *(f"{name}_gpu_hours" for name in _COLUMNS)])
    for name, spent in groups.items():
        hours = spent.to_json()
        # A spreadsheet runs what begins with these as a formula.
        safe = f"'{name}" if name.startswith(("=", "+", "-", "@")) else name
        writer.writerow([safe, *(hours[column] for column in _COLUMNS)])


def _print_table(
    groups: Mapping[str, GpuTime],
    by: str,
    speeds: Mapping[str, Mapping[str, float | None]],
    *,
    empty: str,
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    if not groups:
        click.echo(empty)
        return
    last = len(groups) > 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=last, caption="GPU-hours")
    rows = {**groups, "": total(groups.values())} if last else dict(groups)
    shown = {name: _cells(spent) for name, spent in rows.items()}
    table.add_column(by, overflow="fold", footer="all" if last else "")
    for index, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right", footer=shown[""][index] if last else "")
    predicted = {name for name in groups if speeds.get(name, {}).get("predicted_tokens_per_s")}
    for column in ("tokens/s", "predicted") if predicted else ():
        table.add_column(column, justify="right")
    for name in groups:
        rates = [f"{rate:,.0f}" if rate else "-" for rate in speeds.get(name, {}).values()]
        table.add_row(Text(name), *shown[name], *(rates if predicted else ()))
    wide_console().print(table, highlight=False)


def _cells(spent: GpuTime) -> list[str]:
    """Return hours, and of what was allocated the share of each cause."""
    hours = spent.to_json()
    allocated = hours["allocated"]
    shares = [
        f"{_hours(hours[cause])} {hours[cause] / allocated:4.0%}" if hours[cause] else "-"
        for cause in CAUSES
    ]
    return [_hours(allocated), *shares, _hours(hours[QUEUE])]


def _hours(hours: float) -> str:
    if not hours:
        return "-"
    return f"{hours:,.1f}" if hours >= 10 else f"{hours:.2f}"
