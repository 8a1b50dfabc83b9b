"""Reads the event files of a run, and writes the launcher's own. The others here open no file.

Every writer has a file, RUN/events/<writer>.jsonl, which only grows. Events are
ordered by `t_unix`, each writer's own clock: where clocks of nodes differ, so do the times here.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.storage.files import is_torn, of_each, open_regular, skipped
from launcher.spec.errors import UserError

MOST_EVENTS: Final = 200_000
"""So many are kept of a record of which the newest are wanted: some 200 MB."""
TAIL_BYTES: Final = 24 << 20
"""So much is read of a record's ends: about a second."""
_MAX_FILES: Final = 8192
_MAX_LINE_BYTES: Final = 16 << 20
"""No event is so long; what is ends the reading of its file."""
_CLOCK_SLACK_S: Final = 3600.0
"""The file server's clock and a submission's may differ by less than this."""
_T_UNIX: Final = attrgetter("t_unix")


class RunRecord:
    """The events of `run_dir`, read as its files appear and grow.

    A last line without its newline is left for a later poll. With `newest` only the ends of its
    files are read, and no more than the newest MOST_EVENTS kept.
    """

    def __init__(self, run_dir: Path, *, newest: bool = False) -> None:
        self.run_dir = run_dir
        self.events: list[Event] = []
        """What was read so far, by `t_unix`."""
        self._newest = newest
        self._offsets: dict[str, int] = {}

    def poll(self) -> list[Event]:
        """Read what is new and return it, by `t_unix`. There may be no file yet.

        Files that cannot be read are skipped, and tried again.

        Raises:
            UserError: HF613 the folder cannot be read.
        """
        fresh: list[Event] = []
        files = _files(self.run_dir)
        if self._newest and not self._offsets:
            tails = _tails(files)
            self._offsets = dict(of_each(tails, lambda path: (path, _next_line(path, tails[path]))))
        grown = [path for path, info in files if info.st_size > self._offsets.get(path, 0)]
        for lines in of_each(grown, self._new_lines):
            fresh += _decoded(lines)
        if fresh:
            fresh.sort(key=_T_UNIX)
            self.events += fresh
            self.events.sort(key=_T_UNIX)  # nearly sorted: little more than one pass
            if self._newest and len(self.events) > MOST_EVENTS:
                del self.events[: -MOST_EVENTS // 2]
        return fresh

    def _new_lines(self, path: str) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        lines = list(_lines(path, offset))
        self._offsets[path] = offset + sum(map(len, lines))
        return lines


def newest_events(run_dir: Path, *, writer: str | None = None) -> list[Event]:
    """Return the events at the ends of the files, or of one writer's: quick for records of months.

    Files that cannot be read are skipped.

    Raises:
        UserError: HF613 the folder cannot be read.
    """
    tails = _tails(_files(run_dir, "" if writer is None else writer))
    found = of_each(tails, lambda path: list(_decoded(_lines(path, tails[path]))))
    return sorted(chain.from_iterable(found), key=_T_UNIX)


def _tails(files: Sequence[tuple[str, os.stat_result]]) -> dict[str, int]:
    """Return for each of the files written last where its end begins.

    Short files are read whole, and what they leave of TAIL_BYTES is divided among longer ones.
    """
    latest = sorted(files, key=lambda file: file[1].st_mtime, reverse=True)[:_MAX_FILES]
    left, starts = TAIL_BYTES, {}
    for index, (path, info) in enumerate(sorted(latest, key=lambda file: file[1].st_size)):
        share = min(info.st_size, left // (len(latest) - index))
        starts[path] = info.st_size - share
        left -= share
    return starts


def events_named(run_dir: Path, names: Collection[str], *, since_unix: float = 0.0) -> list[Event]:
    """Return the events of these names, by time.

    Files that were written last long before `since_unix` are not opened, and those that cannot be
    read are skipped.

    Raises:
        UserError: HF613 the folder cannot be read.
    """
    wanted = [f'"{name}"'.encode() for name in names]

    def read(path: str) -> list[Event]:
        lines = (line for line in _lines(path) if any(name in line for name in wanted))
        return [event for event in _decoded(lines) if event.event in names]

    late = since_unix - _CLOCK_SLACK_S
    found = of_each((path for path, info in _files(run_dir) if info.st_mtime >= late), read)
    return sorted(chain.from_iterable(found), key=_T_UNIX)


def _files(run_dir: Path, writer: str = "") -> list[tuple[str, os.stat_result]]:
    """Return the event files, or that of one writer, by path."""
    folder, names = run_dir / "events", [f"{writer}.jsonl"]
    try:
        if not writer:
            names = [name for name in os.listdir(folder) if name.endswith(".jsonl")]  # noqa: PTH208
    except FileNotFoundError:
        return []  # no event yet, or the run is being removed
    except OSError as error:
        raise UserError("HF613", f"{folder} cannot be read: {error.strerror or error}") from error
    paths = (f"{folder}/{name}" for name in sorted(names))
    return [file for file in of_each(paths, _looked_at) if stat.S_ISREG(file[1].st_mode)]


def _looked_at(path: str) -> tuple[str, os.stat_result]:
    return path, os.stat(path)  # noqa: PTH116  thousands of them


def _lines(path: str, start: int = 0) -> Iterator[bytes]:
    with open_regular(Path(path)) as file:
        if start:
            file.seek(start - 1)
            file.readline(_MAX_LINE_BYTES)
        while line := file.readline(_MAX_LINE_BYTES):
            if not line.endswith(b"\n"):
                if len(line) == _MAX_LINE_BYTES:
                    skipped(path, "a line is too long to be an event")
                return  # the rest may be written while we look
            yield line


def _next_line(path: str, start: int) -> int:
    """Return where the first line begins at byte `start` or after it."""
    if not start:
        return 0
    with open_regular(Path(path)) as file:
        file.seek(start - 1)
        return start - 1 + len(file.readline(_MAX_LINE_BYTES))


def _decoded(lines: Iterable[bytes]) -> Iterator[Event]:
    """Yield the events in `lines`; skip others, as a line torn by a crash."""
    read = (Event.decode(line.decode("utf-8", errors="replace")) for line in lines)
    return (event for event in read if event is not None)


class LauncherLog:
    """The launcher's own file in the record: run.started, fault.injected, run.ended."""

    def __init__(
        self, run_dir: Path, writer: str, *, wall: Callable[[], float] = time.time
    ) -> None:
        self._path = run_dir / "events" / f"{writer}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._wall = wall

    def emit(self, event: str, **values: Any) -> None:
        """Append one event; `node`, `rank`, `epoch` and `step` are not fields of it.

        Raises:
            OSError: the run directory cannot be written.
        """
        about = {key: values.pop(key, None) for key in ("node", "rank", "epoch", "step")}
        t_unix, t_mono = self._wall(), time.monotonic()
        written = Event(event=event, t_unix=t_unix, t_mono=t_mono, **about, fields=values)
        line = ("\n" if is_torn(self._path) else "") + written.encode()
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line)


def note_event(run_dir: Path, event: str, **values: Any) -> None:
    """Put one event on record, in a file of its own.

    Clients of several people must not append to one file on NFS.

    Raises:
        OSError: the run directory cannot be written.
    """
    family = event.partition(".")[0]
    LauncherLog(run_dir, f"{family}-{int(time.time())}-{os.getpid()}").emit(event, **values)
