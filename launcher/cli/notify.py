"""`holdfast notify`: posts to a webhook what happens to the runs of a folder.

It is a process beside the runs: whatever a webhook does, no training waits for it.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from launcher.cli.common import EXIT_INTERRUPTED, runs_option, say
from launcher.platforms.retries import retried
from launcher.record.files import RunRecord, present_record
from launcher.record.notices import KINDS, Notice, Notices
from launcher.runs.runs import find_users_runs, lost_kind
from launcher.spec.errors import PermanentError, TemporaryError, UserError

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
    webhook = Webhook(_address(url_file), slack=form == "slack", say=say)
    follower, said = RunFollower(runs, kinds), [""]
    try:
        while True:
            notices, problems = follower.poll()
            webhook.post(notices)
            if problems != said:
                said = problems
                say("\n".join(problems) or f"following the runs of {runs}")
            threading.Event().wait(_EVERY_S)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _address(file: Path | None) -> str:
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


ANSWER_S: Final = 10.0
"""The webhook has so long to answer."""
TRY_S: Final = 20.0
"""So long a notice is tried; then the runs are read again."""
MOST_WAITING: Final = 1000
"""Notices that wait for a webhook; the oldest make way."""


class RunFollower:
    """Reads the runs of a folder and of the users' folders in it, for notices of these kinds.

    What happened before its first look is told to nobody.
    """

    def __init__(self, folder: Path, kinds: Collection[str]) -> None:
        self._folder, self._kinds = folder, kinds
        self._runs: dict[Path, tuple[RunRecord, Notices]] = {}
        self._looked = False

    def poll(self) -> tuple[list[Notice], list[str]]:
        """Return what is new, oldest first, and what could not be read."""
        found, problems = find_users_runs(self._folder)
        fresh = []
        for run in found:
            known = run.path in self._runs
            if not known:
                record = present_record(run.path, keep=False)
                self._runs[run.path] = record, Notices(run.path.name, lost_kind(run.path))
            record, notices = self._runs[run.path]
            try:
                told = [notice for event in record.poll() if (notice := notices.add(event))]
            except Exception as error:  # noqa: BLE001  whatever is wrong with one, the others tell
                problems.append(f"{run.path}: {error}")
                continue
            if known or self._looked:
                fresh += told
        self._looked = True
        wanted = [notice for notice in fresh if notice.kind in self._kinds]
        return sorted(wanted, key=lambda notice: notice.t_unix), problems


class Webhook:
    """Posts notices, in order, each until it is taken or refused for good.

    Its `url` is a secret: it is in no message. The body is Slack's, or all fields as JSON. `say`
    shows what could not be posted; `post` gives up for now after trying a notice for `try_s`.
    """

    def __init__(
        self, url: str, *, slack: bool, say: Callable[[str], None], try_s: float = TRY_S
    ) -> None:
        if not url.startswith(("https://", "http://")):
            raise UserError("HF697", "the webhook's address does not begin with https://")
        self._url, self._slack, self._say, self._try_s = url, slack, say, try_s
        self._waiting: deque[Notice] = deque(maxlen=MOST_WAITING)

    def post(self, notices: Collection[Notice]) -> None:
        """Post `notices`, after the ones that are still waiting."""
        self._waiting.extend(notices)
        while self._waiting:
            notice = self._waiting[0]
            body = notice.to_slack() if self._slack else notice.to_json()
            try:
                retried(partial(_send, self._url, body), for_s=self._try_s)
            except TemporaryError as error:
                self._say(f"{error}; it is tried again")
                return
            except PermanentError as error:
                self._say(f"{error} to {notice.kind} of {notice.run}: it is left out")
            self._waiting.popleft()


def _send(url: str, body: dict[str, Any]) -> None:
    """Post `body`; no error has the address in it."""
    request = urllib.request.Request(  # noqa: S310  its scheme has been looked at
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S):  # noqa: S310
            pass
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, with its socket
        passes = error.code >= 500 or error.code in (408, 429)
        kind = TemporaryError if passes else PermanentError
        raise kind(f"the webhook answers {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise TemporaryError(f"the webhook does not answer: {reason}") from None
