"""The table of runs that `list` and `status` share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from launcher.platforms.base import JobState
from launcher.runs.watching.findings import when
from launcher.runs.watching.run_status import RunStatus

_COLOURS = {
    JobState.RUNNING: "green",
    JobState.PENDING: "cyan",
    JobState.FAILED: "red",
    JobState.UNKNOWN: "yellow",
}


def print_runs(found: Sequence[RunStatus], now_unix: float, *, empty: str) -> None:
    """Print a row for each run; what is wrong is said below.

    What keeps a platform from answering is said once for all of its runs.
    """
    if not found:
        click.echo(empty)
        return
    console = Console()
    if not console.is_terminal:
        console.width = 10_000  # whoever reads a pipe wants whole lines
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("run", "job", "state", "step", "loss", "nodes", "saved", "last event"):
        right = name in ("step", "loss", "nodes", "saved")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for each in found:
        table.add_row(*_cells(each, now_unix))
    console.print(table, highlight=False)
    for each in (one for one in found if not one.state.is_final):
        for finding in each.findings(now_unix):
            click.echo(f"{_name(each.run.path)}: {finding.text}")
    notes = [
        each.problem or f"{each.target}: {each.platform.reason}"
        for each in found
        if each.state is not JobState.RUNNING
        and (each.problem or (each.state is JobState.UNKNOWN and each.platform.reason))
    ]
    for note in dict.fromkeys(notes):
        click.echo(note, err=True)


def _cells(each: RunStatus, now_unix: float) -> list[str]:
    state, now = each.state, each.training
    colour = _COLOURS.get(state)
    shown = f"[{colour}]{state}[/]" if colour else str(state)
    row = [_name(each.run.path), each.job.id or "-", shown]
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


def _name(path: Path) -> str:
    """Return a run's name; a sweep's task has its folder's before it."""
    return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name
