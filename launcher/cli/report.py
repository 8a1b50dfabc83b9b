"""`holdfast report`: the picture of a run."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.cli.common import (
    EXIT_DONE,
    exit_with_problems,
    json_option,
    path_option,
    print_json,
    run_argument,
)
from launcher.errors import UserError
from launcher.ops.fetching import fetched
from launcher.ops.reports.data import report_data
from launcher.ops.reports.report import write_report
from launcher.ops.runs import current_job, find_run
from launcher.ops.summary_file import current_summary
from launcher.targets import target_named

EPILOG = """\b
Examples:
  holdfast report tiny-20260101-120000
  holdfast report runs/tiny-20260101-120000 -o loss.png
"""


@click.command("report", epilog=EPILOG)
@run_argument
@path_option(
    "-o", "--output", metavar="FILE", help="A .html or .png file  [default: RUN/report.html]"
)
@json_option
def report(*, run: str, runs: Path, output: Path | None, as_json: bool) -> int:
    """Draw RUN, live or finished: loss with failures and layouts, recovery phases.

    HTML is one self-contained page, PNG its charts. With --json the
    summary is printed and nothing is drawn but what -o asks for.
    """
    try:
        found = find_run(run, runs)
        if found.submission is not None:
            backend = target_named(found.submission.target).load_backend()
            if trouble := fetched(backend, current_job(found)):
                click.echo(trouble, err=True)
        summary, events = current_summary(found.path)
        path = output or (None if as_json else found.path / "report.html")
        if path is not None:
            write_report(
                report_data(events, summary, title=f"Holdfast run {summary['run_id']}"), path
            )
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json(summary)
    else:
        click.echo(path)
    return EXIT_DONE
