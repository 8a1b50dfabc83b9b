"""`holdfast report`: the picture of a run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from launcher.cli.common import json_option, path_option, print_json, run_argument, say
from launcher.platforms.targets import target_named
from launcher.runs import run_dir as run_dirs
from launcher.runs.fetching import Fetcher
from launcher.runs.reports.data import current_summary, loss_curve, report_data
from launcher.runs.reports.report import write_csv, write_report
from launcher.runs.runs import StoredRun, current_job, find_run

EPILOG = """\b
Examples:
  holdfast report tiny-20260101-120000
  holdfast report runs/tiny-20260101-120000 -o loss.png
  holdfast report runs/tiny-20260101-120000 -o steps.csv
  holdfast report runs/b --compare runs/a
  holdfast report runs/tiny-20260101-120000 --follow
"""
_FOLLOW_S = 30
_LIVE = ("running", "parked")
"""States of a summary in which more is to come."""


@click.command("report", epilog=EPILOG)
@run_argument
@path_option(
    "-o", "--output", metavar="FILE", help="A .html, .png or .csv file  [default: RUN/report.html]"
)
@click.option("--compare", metavar="RUN", multiple=True, help="Draw this run too; repeatable.")
@click.option("--follow", is_flag=True, help="Draw it again every 30 s until the run has ended.")
@json_option
def report(
    *,
    run: str,
    runs: Path,
    output: Path | None,
    compare: tuple[str, ...],
    follow: bool,
    as_json: bool,
) -> None:
    """Draw RUN, live or finished: loss with failures and layouts, recovery phases.

    HTML is one self-contained page, which reloads itself with --follow; PNG
    its charts; CSV a line for each step that counts. With --json the summary
    is printed and nothing is drawn but what -o asks for.
    """
    found = find_run(run, runs)
    others = [find_run(name, runs) for name in compare]
    path = output or (None if as_json else found.path / "report.html")
    summary = _write(found, others, path, refresh=follow)
    while follow and summary["state"] in _LIVE:
        time.sleep(_FOLLOW_S)
        summary = _write(found, others, path, refresh=True)
    if follow:
        summary = _write(found, others, path, refresh=False)
    if as_json:
        print_json(summary)
    else:
        click.echo(path)


def _write(
    found: StoredRun, others: Sequence[StoredRun], path: Path | None, *, refresh: bool
) -> dict[str, Any]:
    """Write the report to `path`, if any; return the summary."""
    if found.submission is not None:
        backend = target_named(found.submission.target).load_backend()
        Fetcher(backend, say).fetch(current_job(found))
    summary, events = current_summary(found.path)
    if path is None:
        return summary
    if path.suffix.lower() == ".csv":
        write_csv(events, path)
        return summary
    there = {other.path.name: current_summary(other.path) for other in others}
    data = report_data(
        events,
        summary,
        title=f"Holdfast run {summary['run_id']}",
        gpus_per_node=run_dirs.load(found.path).gpus_per_node,
        extra={name: loss_curve(theirs) for name, (_, theirs) in there.items()},
    )
    data.compared = {name: summary for name, (summary, _) in there.items()}
    data.refresh_s = _FOLLOW_S if refresh and summary["state"] in _LIVE else None
    write_report(data, path)
    return summary
