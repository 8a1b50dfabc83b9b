"""`holdfast status`: where runs stand, by the platform and by their own record."""

from __future__ import annotations

import time
from pathlib import Path

import click

from launcher.cli.common import (
    EXIT_DONE,
    exit_with_problems,
    json_option,
    print_json,
    runs_option,
)
from launcher.cli.table import print_runs
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast status
  holdfast status llama3-405b-20260101-120000
  holdfast status runs/tiny-20260101-120000 --json
"""


@click.command("status", epilog=EPILOG)
@click.argument("run", metavar="[RUN]", required=False)
@runs_option
@json_option
def status(*, run: str | None, runs: Path, as_json: bool) -> int:
    """Show the state of RUN, or of all runs that have not ended.

    RUN is a path, the name of a run, the beginning of one, or a job's id. A platform that does
    not answer leaves a run unknown, never failed.
    """
    from launcher.runs.runs import find_run, find_runs
    from launcher.runs.watching.run_status import detail_lines, run_statuses

    try:
        if run is None:
            every = run_statuses(list(find_runs(runs)))
            found = [each for each in every if not each.state.is_final]
        else:
            found = run_statuses([find_run(run, runs)])
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    now = time.time()
    if as_json:
        found_json = [each.to_json(now) for each in found]
        print_json(found_json[0] if run else found_json)
    elif run is None:
        print_runs(found, now, empty=f"no live run in {runs}; `holdfast list` shows all")
    else:
        click.echo(str(found[0].run.path))
        for what, text in detail_lines(found[0], now):
            click.echo(f"  {what:<11}{text}")
    return EXIT_DONE
