"""`holdfast logs`: what workers, agents and the job itself have written."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import click

from launcher.api import open_run
from launcher.cli.common import run_argument
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast logs llama3-405b-20260101-120000 -f
  holdfast logs runs/tiny-20260101-120000 --rank 3 --rank 4
  holdfast logs runs/tiny-20260101-120000 --node n7
  holdfast logs tiny-20260101-120000 -t --since 10min --grep 'loss|lost'
"""


@click.command("logs", epilog=EPILOG)
@run_argument
@click.option("-f", "--follow", is_flag=True, help="Follow until the run has ended.")
@click.option("--rank", "ranks", multiple=True, metavar="R", help="Only this rank; or all.")
@click.option("--node", "nodes", multiple=True, metavar="N", help="Only this node.")
@click.option("-t", "--timestamps", is_flag=True, help="Prefix lines with their time.")
@click.option(
    "--since",
    metavar="TIME",
    help="Omit what is older: 10min, 2h, 1d, or 2026-01-31 12:00 in local time.",
)
@click.option(
    "--grep", "pattern", metavar="PATTERN", help="Only lines that match this regular expression."
)
def logs(
    *,
    run: str,
    runs: Path,
    follow: bool,
    ranks: Sequence[str],
    nodes: Sequence[str],
    timestamps: bool,
    since: str | None,
    pattern: str | None,
) -> None:
    """Show the logs of RUN across its attempts, each line with its node and rank.

    Without --rank and --node: the job's own output, rank 0, and events (lines with --).
    With -f it waits for a pending job, follows it across restarts and requeues, and ends with it.
    An event has its own time. A log line has the time it begins with, else the time of its
    arrival (with -f) or that of the line before. --since omits what is certainly older.
    """
    found = open_run(run, runs)
    try:
        wanted = None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise UserError("HF610", f"--grep {pattern}: no regular expression: {error}") from error
    lines = found.logs(
        follow=follow,
        ranks=None if "all" in ranks else [_rank(rank) for rank in ranks],
        nodes=nodes,
        since_unix=None if since is None else _since(since, time.time()),
        pattern=wanted,
        say=lambda text: click.echo(f"-- {text}", err=True),
    )
    for line in lines:
        clock = "" if line.t_unix is None else time.strftime(_CLOCK, time.localtime(line.t_unix))
        before = f"{clock:<19} " if timestamps else ""
        # Of a progress bar what a terminal would show: its newest state.
        text = line.text.rstrip("\r").rpartition("\r")[2]
        click.echo(f"{before}{line.label}: {text}")
    if not follow:  # what is wrong comes last
        status = found.status()
        if status.problem:
            click.echo(status.problem, err=True)
        for finding in status.findings(time.time()):
            click.echo(f"-- warning: {finding}", err=True)


_CLOCK = "%Y-%m-%d %H:%M:%S"
_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


def _since(text: str, now_unix: float) -> float:
    """Return the Unix time that `text` means: a span before now, or a local time."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d)", text.strip())
    if match is not None:
        return now_unix - float(match[1]) * _UNITS[match[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise UserError(
            "HF610", f"--since {text}: expected a span as 90s, 10min, 2h or 1d, or 2026-01-31 12:00"
        ) from None


def _rank(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UserError("HF610", f"--rank {text}: expected a number, or all")
    return int(text)
