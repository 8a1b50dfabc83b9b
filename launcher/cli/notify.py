"""`holdfast notify`: tells a webhook what happens to runs."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

import click

from launcher.cli.common import EXIT_INTERRUPTED, exit_with_problems, runs_option
from launcher.record.notices import KINDS
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  HOLDFAST_WEBHOOK=https://... holdfast notify --runs /shared/runs
  holdfast notify --url-file /etc/holdfast/slack --format slack --on parked --on stopped
"""
_EVERY_S: Final = 2.0
_VARIABLE: Final = "HOLDFAST_WEBHOOK"


@click.command("notify", epilog=EPILOG)
@runs_option
@click.option(
    "--url-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help=f"Its first line is the webhook's address.  [default: ${_VARIABLE}]",
)
@click.option(
    "--format", "form", type=click.Choice(["json", "slack"]), default="json", show_default=True
)
@click.option(
    "--on",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    default=KINDS,
    help="Only this; repeatable.  [default: all]",
)
def notify(*, runs: Path, url_file: Path | None, form: str, kinds: tuple[str, ...]) -> int:
    """Post to a webhook when a run fails, recovers, waits for nodes, stops or is done.

    It reads the records of all runs of a folder, and of its users' folders, until interrupted.
    What happened before it was started is not told. The address is a secret: it is never shown.
    """
    from launcher.runs.reports.notifying import RunFollower, Webhook

    try:
        webhook = Webhook(_address(url_file), slack=form == "slack", say=_say)
    except UserError as error:
        return exit_with_problems(error, as_json=False)
    follower, said = RunFollower(runs, kinds), [""]
    try:
        while True:
            notices, problems = follower.poll()
            webhook.post(notices)
            if problems != said:
                said = problems
                _say("\n".join(problems) or f"following the runs of {runs}")
            threading.Event().wait(_EVERY_S)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _address(file: Path | None) -> str:
    """Return the webhook's address.

    Raises:
        UserError: HF697 there is none.
    """
    if file is None:
        if address := os.environ.get(_VARIABLE, "").strip():
            return address
        raise UserError("HF697", f"no webhook: set {_VARIABLE}, or name a file by --url-file")
    try:
        lines = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise UserError("HF697", f"{file} cannot be read: {reason}") from error
    if not lines:
        raise UserError("HF697", f"{file} is empty: its first line is the webhook's address")
    return lines[0]


def _say(text: str) -> None:
    click.echo(text, err=True)
