"""Follows a run while it is written: until it has ended, or for `holdfast watch`'s screen."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from launcher.platforms.base import (
    EXIT_TEXTS,
    NO_SUCH_JOB,
    Backend,
    ChangeFeed,
    JobRef,
    JobState,
    JobStatus,
    state_of,
)
from launcher.record.files import LauncherLog, RunRecord, present_record
from launcher.record.picture import Picture, picture
from launcher.record.status import TrainingStatus
from launcher.runs import run_dir as run_dirs
from launcher.runs.fetching import Fetcher
from launcher.runs.runs import StoredRun, current_job, lost_kind
from launcher.runs.watching.findings import FindingKind
from launcher.runs.watching.follow_logs import Line, LogReader
from launcher.runs.watching.run_status import (
    NOTHING_SAVED,
    RunStatus,
    run_status,
    run_statuses,
    target_of,
)
from launcher.runs.watching.screen import Known, View
from launcher.spec.errors import PlatformError, writing

_MISSING = 3
"""A platform that answers so often that it has no such job has forgotten it."""
_MOST_FAILED_STARTS = 10
"""A job that is started again without limit is cancelled after so many failed containers in a row
on each node."""
_CHANGED_S = 1.0
"""Least time between questions to a platform that tells of changes."""


@dataclass(slots=True, kw_only=True)
class Watch:
    """Asks the platform now and then, and looks at files more often.

    Args:
        say: shows what the platform does with the job, a line each.
        ask_s: between questions to the platform; controllers serve many users.
        look_s: between looks at the files.
        fetch_s: between fetches of files, where storage is not shared.
    """

    run: StoredRun
    backend: Backend
    say: Callable[[str], None]
    ask_s: float = 10.0
    look_s: float = 0.5
    fetch_s: float = 3.0
    _shown: str = ""
    _fetcher: Fetcher = field(init=False)
    _wrong: frozenset[str] = frozenset()
    _fetch_due: float = float("-inf")
    _failed_starts: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._fetcher = Fetcher(self.backend, self.say)

    def logs(self, reader: LogReader) -> Iterator[list[Line]]:
        """Yield what is logged until the job has ended, over all its requeues."""
        for last in self._looks(cancels=False):
            reader.look()
            yield reader.poll(last=last)

    def progress(self, view: View) -> None:
        """Draw the run's progress until the job has ended."""
        record = RunRecord(self.run.path, keep=False)
        training = TrainingStatus(run_dirs.load(self.run.path))
        with view:
            for _ in self._looks():
                lines = training.apply(record.poll())
                training.up = [*training.members, *training.spares]
                training.num_nodes = max(len(training.up), 1)
                view.update(training, lines)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the job has ended, over all its requeues.

        Raises:
            TimeoutError: it has not within so many seconds.
        """
        begun = time.monotonic()
        for last in self._looks():
            if not last and timeout_s is not None and time.monotonic() - begun >= timeout_s:
                raise TimeoutError(f"{self.run.path} has not ended within {timeout_s:g} s")

    def _looks(self, *, cancels: bool = True) -> Iterator[bool]:
        """Yield whenever the run's files are to be looked at; True: for the last time."""
        missing = 0
        with self._noticing() as changed:
            while True:
                changed.clear()
                status = self._ask()
                if cancels:  # a reader of logs may not cancel
                    self._end_if_none_starts(status)
                missing = missing + 1 if status.reason == NO_SUCH_JOB else 0
                if status.state.is_final or missing >= _MISSING:
                    self._fetch(now=True)
                    yield True
                    self._say_end(status)
                    return
                now = time.monotonic()
                while time.monotonic() < now + (_CHANGED_S if changed.is_set() else self.ask_s):
                    self._fetch()
                    yield False
                    time.sleep(self.look_s)

    def _end_if_none_starts(self, status: JobStatus) -> None:
        """Cancel a job whose containers never start, which the platform would try for ever.

        Raises:
            UserError, PlatformError: it cannot be cancelled; HF612, the run directory not written.
        """
        self._failed_starts.update(status.failed_starts.items())
        if status.state is JobState.RUNNING:
            self._failed_starts.clear()
        starts = Counter(node for node, _ in self._failed_starts)
        hopeless = sum(count >= _MOST_FAILED_STARTS for count in starts.values())
        if not status.failed_starts or hopeless < max(status.num_nodes, 1):
            return
        self._failed_starts.clear()
        reason = (
            f"HF676 {starts.total()} containers in a row could not be started, and none ran "
            f"({status.reason}); the job was cancelled"
        )
        self.backend.cancel(current_job(self.run))
        self.say(reason)
        with writing(str(self.run.path)):
            LauncherLog(self.run.path, f"watch-{int(time.time())}").emit(
                "run.ended", code=EXIT_DO_NOT_RESTART, reason=reason
            )

    def _noticing(self) -> AbstractContextManager[threading.Event]:
        if isinstance(self.backend, ChangeFeed):
            return self.backend.noticing(current_job(self.run))
        return nullcontext(threading.Event())

    def _fetch(self, *, now: bool = False) -> None:
        if not now and time.monotonic() < self._fetch_due:
            return
        self._fetcher.fetch(current_job(self.run))
        self._fetch_due = time.monotonic() + self.fetch_s

    def _ask(self) -> JobStatus:
        job = current_job(self.run)
        try:
            status = self.backend.status([job])[job]
        except PlatformError as error:
            status = JobStatus(state=JobState.UNKNOWN, reason=str(error))
        # When the job is gone, the run may know more, once all of it is here.
        if not (status.state.is_final and status.reason == NO_SUCH_JOB):
            self._tell(status)
        self._warn(job, status)
        return status

    def _warn(self, job: JobRef, status: JobStatus) -> None:
        """Say what is newly wrong with a job that runs."""
        run = run_status(self.run, target_of(self.run), job, status, self._fetcher.trouble)
        found = run.findings(time.time())
        for finding in found:
            # What keeps files from coming is said when they are fetched.
            if finding.kind not in {*self._wrong, FindingKind.RECORD_AWAY}:
                self.say(f"warning: {finding}")
        self._wrong = frozenset(finding.kind for finding in found)

    def _tell(self, status: JobStatus) -> None:
        """Say the job's state if it is new."""
        said = status.words or status.reason
        text = f"{status.state}: {said}" if said else str(status.state)
        if status.state is JobState.PENDING and status.expected_start is not None:
            start = time.localtime(status.expected_start)
            text += f"; expected start {time.strftime('%Y-%m-%d %H:%M', start)}"
        if status.state is JobState.RUNNING and status.nodes:
            text += f" on {counted(len(status.nodes), 'node')}"
        if text != self._shown:
            self._shown = text
            self.say(text)

    def _say_end(self, status: JobStatus) -> None:
        """Say how the job ended; if it is forgotten, by the run's record."""
        training = run_dirs.read_training(self.run.path)
        if status.reason == NO_SUCH_JOB and (code := training.code) is not None:
            words = EXIT_TEXTS.get(code, "")
            status = JobStatus(state=state_of(code), code=code, words=words, source="events")
        if status.state is JobState.SAVED and training.nothing_saved:
            status = replace(status, state=JobState.STOPPED, words=NOTHING_SAVED)
        self._tell(status)


_KEPT_LINES: Final = 500
_LOOK_S: Final = 0.5
_LOOK_SHARE: Final = 0.1
"""Looks take no more than this part of the time."""
_PICTURE_S: Final = 2.0
_PICTURE_SHARE: Final = 0.2
"""Pictures take no more than this part of the time."""


class Following:
    """What is known of a run, brought up to date by `look`.

    Raises:
        UserError: HF613 it cannot be read.
    """

    def __init__(self, run: StoredRun) -> None:
        self.run = run
        self.status = TrainingStatus(run_dirs.load(run.path))
        self.answer: RunStatus | None = None
        """The platform's newest answer; None: it has not answered yet."""
        self._record = present_record(run.path)
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._picture, self._picture_due = Picture(), float("-inf")
        self._lost = lost_kind(run.path)
        self._stale = True
        self.rest_s = _LOOK_S

    def look(self) -> list[str]:
        """Read what is new; return the lines about it.

        Raises:
            UserError: HF613 the record cannot be read.
        """
        begun = time.monotonic()
        fresh = self._record.poll()
        # Thousands of files on a file server that others use are not looked at all the time.
        self.rest_s = max(_LOOK_S, (time.monotonic() - begun) / _LOOK_SHARE)
        lines = self.status.apply(fresh)
        self._lines.extend(lines)
        self._stale = self._stale or bool(fresh)
        now = time.monotonic()
        if self._stale and now >= self._picture_due:
            gpus = self.status.config.gpus_per_node
            self._picture = picture(
                self._record.events, self.status, gpus_per_node=gpus, lost=self._lost
            )
            took = time.monotonic() - now
            self._picture_due = now + max(_PICTURE_S, took / _PICTURE_SHARE)
            self._stale = False
        return lines

    @property
    def known(self) -> Known:
        """What a screen is drawn from."""
        answer, now = self.answer, time.time()
        platform = ""
        if answer is not None and answer.job.id:
            platform = f"{answer.target} job {answer.job.id}: {answer.state}"
        return Known(
            status=self.status,
            picture=self._picture,
            events=tuple(self._lines),
            platform=platform,
            findings=[] if answer is None else answer.findings(now),
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
