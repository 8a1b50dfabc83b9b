"""`holdfast status` and `list`: where runs stand, by the platform and by their own record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli.common import json_option, print_json, runs_option
from launcher.cli.terminal import coloured, print_table
from launcher.platforms.base import JobState
from launcher.runs.runs import find_run, find_runs
from launcher.runs.watching.findings import when
from launcher.runs.watching.run_status import RunStatus, detail_lines, run_statuses

if TYPE_CHECKING:
    from rich.text import Text

STATUS_EPILOG = """\b
Examples:
  holdfast status
  holdfast status llama3-405b-20260101-120000
  holdfast status runs/tiny-20260101-120000 --json
"""


@click.command("status", epilog=STATUS_EPILOG)
@click.argument("run", metavar="[RUN]", required=False)
@runs_option
@json_option
def status(*, run: str | None, runs: Path, as_json: bool) -> None:
    """Show the state of RUN, or of all runs that have not ended.

    RUN is a path, the name of a run, the beginning of one, or a job's id. A platform that does
    not answer leaves a run unknown, never failed.
    """
    if run is None:
        every = run_statuses(list(find_runs(runs)))
        found = [each for each in every if not each.state.is_final]
    else:
        found = run_statuses([find_run(run, runs)])
    now = time.time()
    if as_json:
        found_json = [each.to_json(now) for each in found]
        print_json(found_json[0] if run else found_json)
    elif run is None:
        _print_runs(found, now, empty=f"no live run in {runs}; `holdfast list` shows all")
    else:
        click.echo(str(found[0].run.path))
        for what, text in detail_lines(found[0], now):
            click.echo(f"  {what:<11}{text}")


@click.command("list", epilog="Example: holdfast list --runs /shared/runs --json")
@runs_option
@json_option
def list_(*, runs: Path, as_json: bool) -> None:
    """List all runs of a folder, sweeps' tasks included; each platform is asked once."""
    found = run_statuses(list(find_runs(runs)))
    now = time.time()
    if as_json:
        print_json([each.to_json(now) for each in found])
    else:
        _print_runs(found, now, empty=f"no run in {runs}")


_STATE_COLOURS = {
    JobState.RUNNING: "green",
    JobState.PENDING: "cyan",
    JobState.FAILED: "red",
    JobState.UNKNOWN: "yellow",
}


def _print_runs(found: Sequence[RunStatus], now_unix: float, *, empty: str) -> None:
    """Print a row for each run; what is wrong is said below.

    What keeps a platform from answering is said once for all of its runs.
    """
    if not found:
        click.echo(empty)
        return
    names = ("run", "job", "state", "step", "loss", "nodes", "saved", "last event")
    rows = [_run_cells(each, now_unix) for each in found]
    print_table(names, rows, numbers=("step", "loss", "nodes", "saved"))
    for each in (one for one in found if not one.state.is_final):
        for finding in each.findings(now_unix):
            click.echo(f"{_run_name(each.run.path)}: {finding.text}; {finding.runbook}")
    notes = [
        each.problem or f"{each.target}: {each.platform.reason}"
        for each in found
        if each.state is not JobState.RUNNING
        and (each.problem or (each.state is JobState.UNKNOWN and each.platform.reason))
    ]
    for note in dict.fromkeys(notes):
        click.echo(note, err=True)


def _run_cells(each: RunStatus, now_unix: float) -> list[str | Text]:
    state, now = each.state, each.training
    row = [_run_name(each.run.path), each.job.id or "-", coloured(state, _STATE_COLOURS)]
    if now is None or now.last_unix is None:
        start = each.platform.expected_start
        return [*row, "", "", "", "", "" if start is None else f"starts {when(start, now_unix)}"]
    total = f"/{now.total_steps}" if now.total_steps else ""
    return [
        *row,
        f"{now.step}{total}",
        "" if now.loss is None else f"{now.loss:.4f}",
        str(len(now.members)),
        "" if now.saved_step is None else str(now.saved_step),
        when(now.last_unix, now_unix),
    ]


def _run_name(path: Path) -> str:
    """Return a run's name; a sweep's task has its folder's before it."""
    return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name
