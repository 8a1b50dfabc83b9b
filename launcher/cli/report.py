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
)
from launcher.errors import UserError
from launcher.ops.fetching import fetched
from launcher.ops.reports.files import current_summary, write_report
from launcher.ops.runs import Run, current_job, read_submitted
from launcher.targets import target_named

EPILOG = """\b
Examples:
  holdfast report runs/tiny-20260101-120000
  holdfast report runs/tiny-20260101-120000 -o loss.png
"""


@click.command("report", epilog=EPILOG)
@click.argument("run_dir", metavar="RUN", type=click.Path(path_type=Path))
@path_option(
    "-o", "--output", metavar="FILE", help="A .html or .png file  [default: RUN/report.html]"
)
@json_option
def report(*, run_dir: Path, output: Path | None, as_json: bool) -> int:
    """Draw RUN, live or finished: loss with failures and layouts, recovery phases.

    HTML is one self-contained page; PNG needs matplotlib. With --json the
    summary is printed and nothing is drawn but what -o asks for.
    """
    try:
        _bring(run_dir.absolute())
        summary, data = current_summary(run_dir.absolute())
        path = output or (None if as_json else run_dir / "report.html")
        if path is not None:
            write_report(data, path)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    if as_json:
        print_json(summary)
    else:
        click.echo(path)
    return EXIT_DONE


def _bring(run_dir: Path) -> None:
    """Fetch what is new of a run that was submitted to where storage is not shared."""
    submission = read_submitted(run_dir)
    if submission is None:
        return
    run = Run(path=run_dir, submission=submission, shown=str(run_dir))
    if trouble := fetched(target_named(submission.target).load_backend(), current_job(run)):
        click.echo(trouble, err=True)
