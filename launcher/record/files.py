"""Reads the event files of a run, and writes the launcher's own. The others here open no file.

Every writer has a file, RUN/events/<writer>.jsonl, which only grows. What each node does at each
start is in RUN/nodes/<node>.jsonl, of which the newest is kept, and read where it is asked for.
Events are ordered by `t_unix`, each writer's own clock: where clocks of nodes differ, so do the
times here.
"""

from __future__ import annotations

import os
import re
import stat
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.storage.files import is_torn, of_each, open_regular, skipped
from launcher.spec.errors import UserError

NEWEST: Final = 6_000
"""So many events are read of those of which the newest are wanted."""
_STEPS_AND_PHASES: Final = ("step.", "script.progress", "recovery.phase")
"""Beginnings of the names of events of which a run's present state needs the newest only."""
MOST_EVENTS: Final = 200_000
"""So many are kept of a record that is followed: some 200 MB."""
_EVENT: Final = b'"event":"'
_OF_START, _OF_EXIT, _OF_NONE = b'worker.started"', b'worker.exit"', b'"kind":null'
"""Agents once wrote these for each worker at each start, of those they had killed too."""
_SAYS_WHEN: Final = re.compile(rb'"t_unix":([0-9]+\.?[0-9]*)(?:,"t_mono":[^,]*,"epoch":([0-9]+))?')
_BLOCK_BYTES: Final = 1 << 20
_MAX_LINE_BYTES: Final = 16 << 20
"""No event is so long; what is ends the reading of its file."""
_CLOCK_SLACK_S: Final = 3600.0
"""The file server's clock and a submission's may differ by less than this."""
_T_UNIX: Final = attrgetter("t_unix")


class RunRecord:
    """The events of `run_dir`, read as its files appear and grow.

    A last line without its newline is left for a later poll. Of events whose names begin with one
    of `newest` the first poll reads the newest only, and later ones keep about as many.
    Those `without` are not read. Of a file's events `next_to` only the last before and the first
    after each other event of the run are, and of each epoch. Without `keep`, `events` stays empty:
    polls return enough.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        newest: Collection[str] = (),
        without: Collection[str] = (),
        next_to: Collection[str] = (),
        keep: bool = True,
    ) -> None:
        self.run_dir, self._keep = run_dir, keep
        self.events: list[Event] = []
        """What was read so far, by `t_unix`, and not forgotten."""
        self._newest = tuple(name.encode() for name in newest)
        self._next_to = tuple(f'{name}"'.encode() for name in next_to)
        self._without = tuple(f'{name}"'.encode() for name in without)
        if newest or without:
            self._without += (_OF_START, _OF_EXIT)
        self._offsets: dict[str, int] = {}
        self._full = NEWEST + NEWEST // 8
        """With more events than these, some may be forgotten."""

    def poll(self) -> list[Event]:
        """Read what is new and return it, by `t_unix`. There may be no file yet.

        Files that cannot be read are skipped, and tried again.

        Raises:
            UserError: HF613 the folder cannot be read.
        """
        fresh: list[Event] = []
        newest = self._newest if not self._offsets else ()
        files = _files(self.run_dir)
        grown = [path for path, info in files if info.st_size > self._offsets.get(path, 0)]
        found = list(of_each(grown, partial(self._new_lines, newest)))
        for lines in _only_newest(_only_next_to(found, self._next_to), newest):
            fresh += _decoded(lines)
        if fresh:
            fresh.sort(key=_T_UNIX)
            self.events += fresh if self._keep else ()
            self.events.sort(key=_T_UNIX)  # nearly sorted: little more than one pass
            if self._newest and len(self.events) > self._full:
                self._drop_older()
        return fresh

    def _drop_older(self) -> None:
        """Keep what a record that is opened now would read, so that following one takes no more."""
        names = tuple(name.decode() for name in self._newest)
        places = [i for i, event in enumerate(self.events) if event.event.startswith(names)]
        older = {*places[:-NEWEST]}
        self.events = [event for i, event in enumerate(self.events) if i not in older]
        if len(self.events) > MOST_EVENTS:
            del self.events[: -MOST_EVENTS // 2]
        self._full = len(self.events) + NEWEST // 8

    def forget(self, before_unix: float) -> None:
        """Drop the events before, but those of the epoch that ran then."""
        formed = (
            index
            for index in range(len(self.events) - 1, -1, -1)
            if self.events[index].event == "epoch.formed"
            and self.events[index].t_unix <= before_unix
        )
        del self.events[: next(formed, 0)]

    def _new_lines(self, newest: tuple[bytes, ...], path: str) -> list[bytes]:
        """Return the new lines of a file, of the events `newest` as many as may be wanted."""
        found: list[bytes] = []
        places: deque[int] = deque()
        offset = self._offsets.get(path, 0)
        for line in _lines(path, offset):
            offset += len(line) + 1
            at = line.find(_EVENT) + len(_EVENT)
            if line.startswith(self._without, at):
                if _OF_NONE in line or not line.startswith(_OF_EXIT, at):
                    continue
            elif line.startswith(newest, at):
                places.append(len(found))
                if len(places) > NEWEST:
                    found[places.popleft()] = b""
            found.append(line)
        self._offsets[path] = offset
        return list(filter(None, found))


def _only_next_to(files: list[list[bytes]], names: tuple[bytes, ...]) -> list[list[bytes]]:
    """Return the lines of each file, of the events `names` those next to others of any file."""
    if not names:
        return files
    others = sorted(
        _written_unix(line) for lines in files for line in lines if not _is_of(names, line)
    )

    def between(line: bytes) -> tuple[int, bytes] | None:
        """Return what separates the event from others of its name; None: it has another."""
        if not _is_of(names, line):
            return None
        found = _SAYS_WHEN.search(line)
        return bisect(others, _written_unix(line)), (found and found[2]) or b""

    def ends(group: tuple[tuple[int, bytes] | None, Iterator[bytes]]) -> list[bytes]:
        lines = list(group[1])
        return lines if group[0] is None else [lines[0], *lines[1:][-1:]]

    return [list(chain.from_iterable(map(ends, groupby(lines, between)))) for lines in files]


def _only_newest(files: list[list[bytes]], newest: tuple[bytes, ...]) -> Iterator[Iterable[bytes]]:
    """Yield the lines of each file, of the events `newest` the NEWEST of all files."""
    times = [_written_unix(line) for lines in files for line in lines if _is_of(newest, line)]
    since = sorted(times)[-NEWEST] if len(times) > NEWEST else 0.0
    for lines in files:
        yield (
            line
            for line in lines
            if not since or not _is_of(newest, line) or _written_unix(line) >= since
        )


def _is_of(names: tuple[bytes, ...], line: bytes) -> bool:
    """Whether the line is an event whose name begins with one of `names`."""
    return line.startswith(names, line.find(_EVENT) + len(_EVENT))


def _written_unix(line: bytes) -> float:
    """Return when an event was written, before it is decoded; infinite: it does not say."""
    found = _SAYS_WHEN.search(line)
    return float(found[1]) if found else inf


def present_record(run_dir: Path, *, keep: bool = True) -> RunRecord:
    """Return a record of the events that a run's present state needs."""
    return RunRecord(run_dir, newest=_STEPS_AND_PHASES, keep=keep)


def events_named(
    run_dir: Path,
    names: Collection[str],
    *,
    since_unix: float = 0.0,
    nodes: bool = False,
    node: str | None = None,
) -> list[Event]:
    """Return the events of these names, by time.

    `nodes`: also of what each node does at each start; `node`: only what this one's agent has
    written. Files that were written last long before `since_unix` are not opened, and those that
    cannot be read are skipped.

    Raises:
        UserError: HF613 the folder cannot be read.
    """
    wanted = [f'"{name}"'.encode() for name in names]

    def read(path: str) -> list[Event]:
        lines = (line for line in _lines(path) if any(name in line for name in wanted))
        return [event for event in _decoded(lines) if event.event in names]

    late = since_unix - _CLOCK_SLACK_S
    files = _files(run_dir, nodes=nodes, node=node)
    found = of_each((path for path, info in files if info.st_mtime >= late), read)
    return sorted(chain.from_iterable(found), key=_T_UNIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A worker of the newest epoch, as the record has it."""

    rank: int
    node: str
    pid: int
    epoch: int


def workers_of(run_dir: Path) -> dict[int, Worker]:
    """Return the workers of the newest epoch, but those that failed, by rank.

    Raises:
        UserError: HF613 the folder cannot be read.
    """
    found: dict[int, Worker] = {}
    epoch = -1
    for event in events_named(run_dir, ("workers.started", "worker.exit"), nodes=True):
        if event.epoch is None or event.node is None:
            continue
        if event.event == "workers.started":
            first, pids = event.fields.get("first_rank"), event.fields.get("pids")
            if type(first) is not int or type(pids) is not list or {*map(type, pids)} != {int}:
                continue
            if event.epoch > epoch:
                epoch, found = event.epoch, {}
            for rank, pid in enumerate(pids, first):
                if event.epoch == epoch:
                    found[rank] = Worker(rank=rank, node=event.node, pid=pid, epoch=epoch)
        elif event.event == "worker.exit" and event.epoch == epoch:
            pid = event.fields.get("pid")
            found = {r: w for r, w in found.items() if (w.node, w.pid) != (event.node, pid)}
    return found


def _files(
    run_dir: Path, *, nodes: bool = False, node: str | None = None
) -> list[tuple[str, os.stat_result]]:
    """Return the event files, or those of one node's agent, by path."""
    paths: list[str] = []
    for folder, mine in (("events", f"agent-{node}"), *([("nodes", f"{node}")] if nodes else [])):
        try:
            names = os.listdir(run_dir / folder) if node is None else [f"{mine}.jsonl"]  # noqa: PTH208
        except FileNotFoundError:
            continue  # no event yet, or the run is being removed
        except OSError as error:
            said = f"{run_dir / folder} cannot be read: {error.strerror or error}"
            raise UserError("HF613", said) from error
        paths += [f"{run_dir}/{folder}/{n}" for n in names if n.endswith((".jsonl", ".jsonl.1"))]
    return [file for file in of_each(sorted(paths), _looked_at) if stat.S_ISREG(file[1].st_mode)]


def _looked_at(path: str) -> tuple[str, os.stat_result]:
    return path, os.stat(path)  # noqa: PTH116  thousands of them


def _lines(path: str, start: int = 0) -> Iterator[bytes]:
    """Yield the whole lines of a file from byte `start` on, where one begins; not their ends."""
    begun = b""  # the rest of the last line may be written while we look
    with open_regular(Path(path)) as file:
        file.seek(start)
        while block := file.read(_BLOCK_BYTES):
            *lines, begun = (begun + block).split(b"\n")
            yield from lines
            if len(begun) > _MAX_LINE_BYTES:
                skipped(path, "a line is too long to be an event")
                return


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
