"""`holdfast watch`: a run's screen, redrawn while it trains."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
from rich.console import Console
from rich.live import Live

from launcher.cli.common import EXIT_DONE, exit_with_problems, json_option, run_argument
from launcher.cli.terminal import LEAVE, direct, key_pressed, keys
from launcher.runs.runs import find_run
from launcher.runs.views import PlainView
from launcher.runs.watching.following import Following
from launcher.runs.watching.screen import Page, screen
from launcher.spec.errors import UserError

EPILOG = """\b
Keys: o overview, n nodes, f failures, e events, q quit.
\b
Examples:
  holdfast watch llama3-405b-20260101-120000
  holdfast watch llama3-405b-20260101-120000 --json | jq .goodput
"""
_ASK_S: Final = 10.0


@click.command("watch", epilog=EPILOG)
@run_argument
@json_option
def watch(*, run: str, runs: Path, as_json: bool) -> int:
    """Show RUN while it trains: nodes, loss, speed, goodput, failures.

    On a terminal a screen is redrawn until q is pressed. Elsewhere a line is
    printed for each event, and with --json an object for each change, until
    the run has ended. Read are the ends of the event files, so goodput is that
    of the last hour at most.
    """
    try:
        following = Following(find_run(run, runs))
        with following.asking(_ASK_S):
            if as_json:
                _print_changes(following)
            elif sys.stdout.isatty() and sys.stdin.isatty():
                _draw(following)
            else:
                _print_lines(following)
    except UserError as error:
        return exit_with_problems(error, as_json=as_json)
    return EXIT_DONE


def _print_lines(following: Following) -> None:
    view = PlainView(sys.stdout)
    for _ in _looks(following):
        lines = following.look()
        following.status.up = [*following.status.members, *following.status.spares]
        following.status.num_nodes = max(len(following.status.up), 1)
        view.update(following.status, lines)


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


def _draw(following: Following) -> None:
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
