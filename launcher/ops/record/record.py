"""Reads (and, for the launcher's own part, writes) the event record of a run.

Every writer has a file of its own under `events/`; this merges them by time.
Reading is incremental, so it works while the run goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elastic_trainer.events import Event
from launcher.ops.record.clocks import by_one_clock


class RunRecord:
    """The events of `run_dir`, as far as they have been read.

    Files may appear and grow at any time. A last line without its newline is
    left for a later poll; a complete line that is no event (torn by a crash and
    appended to later) is counted in `torn` and passed over.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.torn = 0
        self._offsets: dict[str, int] = {}
        self._events: list[Event] = []
        self._by_file: dict[str, list[Event]] = {}

    @property
    def events(self) -> list[Event]:
        """Everything read so far, by `t_unix`."""
        return self._events

    def by_one_clock(self) -> list[Event]:
        """Return everything read so far in order of time, where writers' clocks differ too.

        For what compares times of several nodes; see `clocks.py`.
        """
        return by_one_clock(self._by_file)

    def poll(self) -> list[Event]:
        """Read what is new and return it, by `t_unix`. No file yet is no error."""
        fresh: list[Event] = []
        for path in self._files():
            fresh.extend(self._read(path))
        if fresh:
            fresh.sort(key=lambda event: event.t_unix)
            self._events.extend(fresh)
            # Timsort: nearly sorted input costs little more than one pass.
            self._events.sort(key=lambda event: event.t_unix)
        return fresh

    def follow(
        self,
        *,
        until: Callable[[], bool],
        interval_s: float = 0.05,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Iterator[list[Event]]:
        """Yield what is new every `interval_s`, perhaps nothing, until `until()` is true.

        Once it is true there is one last poll, so nothing written before is missed.
        """
        while not until():
            yield self.poll()
            sleep(interval_s)
        yield self.poll()

    def _files(self) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.run_dir / "events") as entries:
                return [entry for entry in entries if entry.name.endswith(".jsonl")]
        except FileNotFoundError:
            return []

    def _read(self, entry: os.DirEntry[str]) -> list[Event]:
        offset = self._offsets.get(entry.name, 0)
        if os.stat(entry.path).st_size <= offset:  # noqa: PTH116  DirEntry.stat caches
            return []
        with Path(entry.path).open("rb") as file:
            file.seek(offset)
            data = file.read()
        complete = data.rfind(b"\n") + 1
        self._offsets[entry.name] = offset + complete
        events = []
        for line in data[:complete].splitlines():
            event = Event.decode(line.decode("utf-8", errors="replace"))
            if event is None or not _is_dated(event):
                self.torn += 1
            else:
                events.append(event)
        self._by_file.setdefault(entry.name, []).extend(events)
        return events


def _is_dated(event: Event) -> bool:
    return isinstance(event.t_unix, int | float) and isinstance(event.t_mono, int | float)


class LauncherLog:
    """The launcher's own file in the record: run.started, fault.injected, run.ended."""

    def __init__(
        self,
        run_dir: Path,
        writer: str,
        *,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = run_dir / "events" / f"{writer}.jsonl"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._wall, self._mono = wall, mono

    def emit(
        self,
        event: str,
        *,
        node: str | None = None,
        rank: int | None = None,
        epoch: int | None = None,
        step: int | None = None,
        **fields: Any,
    ) -> Event:
        """Append one event and return it; the time is now.

        Raises:
            OSError: the run directory cannot be written.
        """
        written = Event(
            event=event,
            t_unix=self._wall(),
            t_mono=self._mono(),
            node=node,
            rank=rank,
            epoch=epoch,
            step=step,
            fields=fields,
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write(written.encode())
        return written
