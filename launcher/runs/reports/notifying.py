"""Follows the records of a folder's runs and posts what somebody wants to be told of.

It is a process of its own beside the runs: whatever a webhook does, no training waits for it.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, Final

from launcher.platforms.retries import retried
from launcher.record.files import RunRecord
from launcher.record.notices import Notice, Notices
from launcher.runs.runs import find_users_runs
from launcher.spec.errors import HoldfastError, PermanentError, TemporaryError, UserError

ANSWER_S: Final = 10.0
"""For the webhook to answer."""
TRY_S: Final = 20.0
"""So long a notice is tried; then the runs are read again."""
MOST_WAITING: Final = 1000
"""Notices that wait for a webhook; the oldest make way."""


class RunFollower:
    """Reads the runs of a folder; what happened before its first look is told to nobody.

    Args:
        folder: of runs, or of users' folders of them.
        kinds: of notices that are wanted.
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
            record, notices = self._runs.setdefault(
                run.path, (RunRecord(run.path, newest=True), Notices(run.path.name))
            )
            try:
                told = [notice for event in record.poll() if (notice := notices.add(event))]
            except (HoldfastError, OSError) as error:
                problems.append(f"{run.path}: {error}")
                continue
            if known or self._looked:
                fresh += told
        self._looked = True
        wanted = [notice for notice in fresh if notice.kind in self._kinds]
        return sorted(wanted, key=lambda notice: notice.t_unix), problems


class Webhook:
    """Posts notices, in order, each until it is taken or refused for good.

    Args:
        url: a secret: it is in no message.
        slack: the body is Slack's, else all fields as JSON.
        say: shows what could not be posted.
        try_s: how long a notice is tried before `post` gives up for now.
    """

    def __init__(
        self, url: str, *, slack: bool, say: Callable[[str], None], try_s: float = TRY_S
    ) -> None:
        if not url.startswith(("https://", "http://")):
            raise UserError("HF697", "the webhook's address does not begin with https://")
        self._url, self._slack, self._say, self._try_s = url, slack, say, try_s
        self._waiting: deque[Notice] = deque(maxlen=MOST_WAITING)

    def post(self, notices: Collection[Notice]) -> None:
        """Post `notices`, after those that could not be posted before."""
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
