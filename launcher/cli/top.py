"""`holdfast top`: all runs of all users, redrawn while they run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Final

import click
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.cli.common import EXIT_DONE, json_option, print_json, runs_option
from launcher.cli.terminal import LEAVE, direct, key_pressed, keys
from launcher.platforms.base import JobState
from launcher.record.status import TrainingStatus
from launcher.runs.reports.data import owner_of
from launcher.runs.runs import find_users_runs
from launcher.runs.watching.findings import span
from launcher.runs.watching.run_status import RunStatus, run_statuses

EPILOG = """\b
Examples:
  holdfast top --runs /shared/runs
  holdfast top --runs /shared/runs --all --json
"""
_COLOURS = {JobState.RUNNING: "green", JobState.PENDING: "cyan", JobState.FAILED: "red"}
_REST_S: Final = 5.0
_SHARE: Final = 0.1
"""Looks take no more than this part of the time."""


@click.command("top", epilog=EPILOG)
@runs_option
@click.option("--all", "ended", is_flag=True, help="Show runs that have ended too.")
@json_option
def top(*, runs: Path, ended: bool, as_json: bool) -> int:
    """Show the runs of a folder, and of its users' folders, that have not ended.

    On a terminal the table is redrawn until q is pressed; elsewhere it is
    printed once. Each platform is asked once for all of its runs.
    """
    if as_json:
        found, problems = _looked(runs, ended=ended)
        rows = [{"user": owner_of(each.run), **each.to_json(time.time())} for each in found]
        print_json({"runs": rows, "problems": problems})
    elif sys.stdout.isatty() and sys.stdin.isatty():
        _draw(runs, ended=ended)
    else:
        console = Console(width=None if sys.stdout.isatty() else 10_000)
        console.print(_table(*_looked(runs, ended=ended), most=None), highlight=False)
    return EXIT_DONE


def _looked(runs: Path, *, ended: bool) -> tuple[list[RunStatus], list[str]]:
    listed, problems = find_users_runs(runs)
    found = [each for each in run_statuses(listed) if ended or not each.state.is_final]
    # Those that run come first, then the newest.
    found.sort(key=lambda each: (each.state is not JobState.RUNNING, -_last(each)))
    return found, problems


def _last(status: RunStatus) -> float:
    return (status.training and status.training.last_unix) or 0.0


def _draw(runs: Path, *, ended: bool) -> None:
    console = Console(file=direct(sys.stdout))
    with keys(sys.stdin), Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(Text(f"looking at the runs of {runs} …", "dim"), refresh=True)
        while True:
            begun = time.monotonic()
            found, problems = _looked(runs, ended=ended)
            most = max(1, console.size.height - 6 - min(len(problems), 3))
            live.update(_table(found, problems, most=most), refresh=True)
            rest_s = max(_REST_S, (time.monotonic() - begun) / _SHARE)
            if key_pressed(sys.stdin, rest_s) in LEAVE:
                return


def _table(found: list[RunStatus], problems: list[str], *, most: int | None) -> Group:
    """Return the runs, at most `most` of them, and what could not be read."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    right = ("nodes", "step", "loss", "tokens/s", "restarts")
    for name in ("run", "user", "job", "state", *right, "last event"):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    now = time.time()
    for each in found[:most]:
        table.add_row(*_cells(each, now))
    running = sum(each.state is JobState.RUNNING for each in found)
    nodes = sum(
        len(each.training.members)
        for each in found
        if each.training and each.state is JobState.RUNNING
    )
    hidden = "" if most is None or len(found) <= most else f", {len(found) - most:,} not shown"
    title = f"{len(found):,} runs, {running:,} running on {nodes:,} nodes{hidden}"
    shown = [Text(problem, "yellow", no_wrap=True) for problem in problems[:3]]
    return Group(Text(title, "bold"), table, *shown)


def _cells(each: RunStatus, now: float) -> list[Text]:
    state = Text(str(each.state), _COLOURS.get(each.state, "yellow"))
    training = each.training
    if training is not None and each.state is JobState.RUNNING and training.state != "training":
        state.append(f", {training.state}", "yellow")
    name, user = Text(each.run.path.name), Text(owner_of(each.run))
    return [name, user, Text(each.job.id or "-"), state, *_progress(training, now)]


def _progress(training: TrainingStatus | None, now: float) -> list[Text]:
    if training is None or training.last_unix is None:
        return [Text("-")] * 6
    rate, of = training.tokens_per_s, training.total_steps
    return [
        Text(f"{len(training.members):,}"),
        Text(f"{training.step:,}" + (f"/{of:,}" if of else "")),
        Text("-" if training.loss is None else f"{training.loss:.4f}"),
        Text("-" if rate is None else f"{rate:,.0f}"),
        Text(f"{training.restarts:,}"),
        Text(f"{span(max(0.0, now - training.last_unix))} ago"),
    ]
