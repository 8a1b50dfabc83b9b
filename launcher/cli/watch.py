"""`holdfast watch` and `top`: a run, or all runs, redrawn while they train."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.cli.common import json_option, print_json, run_argument, runs_option
from launcher.cli.terminal import LEAVE, direct, key_pressed, keys
from launcher.platforms.base import JobState
from launcher.record.event import named
from launcher.record.status import TrainingStatus
from launcher.runs.reports.data import owner_of
from launcher.runs.runs import find_run, find_users_runs
from launcher.runs.watching.findings import span
from launcher.runs.watching.run_status import RunStatus, run_statuses
from launcher.runs.watching.screen import Known, Page, PlainView, screen
from launcher.runs.watching.watch import Following

WATCH_EPILOG = """\b
Keys: o overview, n nodes, f failures, e events, q quit.
\b
Examples:
  holdfast watch llama3-405b-20260101-120000
  holdfast watch llama3-405b-20260101-120000 --json | jq .goodput
"""
_ASK_S: Final = 10.0


@click.command("watch", epilog=WATCH_EPILOG)
@run_argument
@json_option
def watch(*, run: str, runs: Path, as_json: bool) -> None:
    """Show RUN while it trains: nodes, loss, speed, goodput, failures.

    On a terminal a screen is redrawn until q is pressed. Elsewhere a line is
    printed for each event, and with --json an object for each change, until
    the run has ended. Read are the ends of the event files, so goodput is that
    of the last hour at most.
    """
    following = Following(find_run(run, runs))
    with following.asking(_ASK_S):
        if as_json:
            _print_changes(following)
        elif sys.stdout.isatty() and sys.stdin.isatty():
            _draw_run(following)
        else:
            _print_lines(following)


def _print_lines(following: Following) -> None:
    view = PlainView(sys.stdout)
    told: dict[object, str] = {}
    for _ in _looks(following):
        lines = following.look()
        following.status.up = [*following.status.members, *following.status.spares]
        following.status.num_nodes = max(len(following.status.up), 1)
        view.update(following.status, lines)
        wrong = _wrong(following.known)
        for line in (line for key, line in wrong.items() if key not in told):
            view.note(line)
        told = wrong


def _wrong(known: Known) -> dict[object, str]:
    """Return what has failed or is wrong now: what tells it from others -> line."""
    lines: dict[object, str] = {each.kind: f"warning: {each}" for each in known.findings}
    for each in known.picture.failures:
        what = f"{each.kind.replace('_', ' ')} {named(each.node or '?', each.host)}"
        lines[each.epoch, each.node] = f"failure: {what}; {each.signature.of.runbook}"
    return lines


def _print_changes(following: Following) -> None:
    shown = None
    for _ in _looks(following):
        following.look()
        now = following.to_json()
        if now != shown:
            click.echo(json.dumps(now))
            shown = now


def _looks(following: Following) -> Iterator[None]:
    """Yield whenever the run is to be looked at; once more after its end."""
    while True:
        ended = following.ended
        yield
        if ended:
            return
        time.sleep(following.rest_s)


def _draw_run(following: Following) -> None:
    console = Console(file=direct(sys.stdout))
    page = Page.OVERVIEW
    with keys(sys.stdin), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            following.look()
            width, height = console.size
            live.update(screen(following.known, page, width=width, height=height), refresh=True)
            key = key_pressed(sys.stdin, following.rest_s)
            if key in LEAVE:
                return
            page = next((each for each in Page if each[0] == key), page)


TOP_EPILOG = """\b
Examples:
  holdfast top --runs /shared/runs
  holdfast top --runs /shared/runs --all --json
"""
_COLOURS = {JobState.RUNNING: "green", JobState.PENDING: "cyan", JobState.FAILED: "red"}
_REST_S: Final = 5.0
_SHARE: Final = 0.1
"""Looks take no more than this part of the time."""


@click.command("top", epilog=TOP_EPILOG)
@runs_option
@click.option("--all", "ended", is_flag=True, help="Show runs that have ended too.")
@json_option
def top(*, runs: Path, ended: bool, as_json: bool) -> None:
    """Show the runs of a folder, and of its users' folders, that have not ended.

    On a terminal the table is redrawn until q is pressed; elsewhere it is
    printed once. Each platform is asked once for all of its runs.
    """
    if as_json:
        found, problems = _looked(runs, ended=ended)
        rows = [{"user": owner_of(each.run), **each.to_json(time.time())} for each in found]
        print_json({"runs": rows, "problems": problems})
    elif sys.stdout.isatty() and sys.stdin.isatty():
        _draw_runs(runs, ended=ended)
    else:
        console = Console(width=None if sys.stdout.isatty() else 10_000)
        console.print(_table(*_looked(runs, ended=ended), most=None), highlight=False)


def _looked(runs: Path, *, ended: bool) -> tuple[list[RunStatus], list[str]]:
    listed, problems = find_users_runs(runs)
    found = [each for each in run_statuses(listed) if ended or not each.state.is_final]
    # Those that run come first, then the newest.
    found.sort(key=lambda each: (each.state is not JobState.RUNNING, -_last(each)))
    return found, problems


def _last(status: RunStatus) -> float:
    return (status.training and status.training.last_unix) or 0.0


def _draw_runs(runs: Path, *, ended: bool) -> None:
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
