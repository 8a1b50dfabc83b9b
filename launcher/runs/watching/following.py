"""Follows one run while it is written: its record often, its platform now and then."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from launcher.record.files import RunRecord
from launcher.record.picture import Picture, picture
from launcher.record.status import TrainingStatus
from launcher.runs import run_dir as run_dirs
from launcher.runs.runs import StoredRun
from launcher.runs.watching.run_status import RunStatus, run_statuses
from launcher.runs.watching.screen import Known

_KEPT_LINES: Final = 500
_LOOK_S: Final = 0.5
_LOOK_SHARE: Final = 0.1
"""Looks take no more than this part of the time."""
_PICTURE_S: Final = 2.0
_PICTURE_SHARE: Final = 0.2
"""A picture takes no more than this part of the time: of a large record it is drawn less often."""


class Following:
    """What is known of a run, brought up to date by `look`.

    Args:
        run: which.
        wall: the time of day.
        mono: seconds that only grow.

    Raises:
        UserError: HF613 it cannot be read.
    """

    def __init__(
        self,
        run: StoredRun,
        *,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run = run
        self.status = TrainingStatus(run_dirs.load(run.path))
        self.answer: RunStatus | None = None
        """The platform's newest answer; None: it has not answered yet."""
        self._record = RunRecord(run.path, newest=True)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._wall, self._mono = wall, mono
        self._picture, self._picture_due = Picture(), float("-inf")
        self._stale = True
        self.rest_s = _LOOK_S
        """How long to wait before the next look."""

    def look(self) -> list[str]:
        """Read what is new; return the lines about it.

        Raises:
            UserError: HF613 the record cannot be read.
        """
        begun = self._mono()
        fresh = self._record.poll()
        # Thousands of files on a file server that others use are not looked at all the time.
        self.rest_s = max(_LOOK_S, (self._mono() - begun) / _LOOK_SHARE)
        lines = self.status.apply(fresh)
        self._lines.extend(lines)
        self._stale = self._stale or bool(fresh)
        now = self._mono()
        if self._stale and now >= self._picture_due:
            gpus = self.status.config.gpus_per_node
            self._picture = picture(self._record.events, self.status, gpus_per_node=gpus)
            took = self._mono() - now
            self._picture_due = now + max(_PICTURE_S, took / _PICTURE_SHARE)
            self._stale = False
        return lines

    @property
    def known(self) -> Known:
        """What a screen is drawn from."""
        answer, now = self.answer, self._wall()
        warnings = [] if answer is None else [str(each) for each in answer.findings(now)]
        platform = ""
        if answer is not None and answer.job.id:
            platform = f"{answer.target} job {answer.job.id}: {answer.state}"
        return Known(
            status=self.status,
            picture=self._picture,
            events=tuple(self._lines),
            platform=platform,
            warnings=warnings,
            now_unix=now,
        )

    @property
    def ended(self) -> bool:
        """Whether the run has ended, by its platform's word."""
        return self.answer is not None and self.answer.state.is_final

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "run": str(self.run.path),
            "state": None if self.answer is None else str(self.answer.state),
            "training": self.status.to_json(),
            **self._picture.to_json(),
        }

    @contextmanager
    def asking(self, every_s: float) -> Iterator[None]:
        """Ask the platform meanwhile, in a thread: an answer may take long."""
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                [self.answer] = run_statuses([self.run])
                stop.wait(every_s)

        thread = threading.Thread(target=ask, name="platform", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
