"""Appends events to a run directory: one file per writer, one line per event."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_trainer.events import Event


class EventLog:
    """An append-only file `events/<writer>.jsonl` of its own for each writer.

    Appends of several clients to one file corrupt it on NFS, so nobody shares.
    A full or lost disk never stops the writer: `failed` counts what was dropped.
    """

    def __init__(
        self,
        run_dir: Path,
        writer: str,
        *,
        node: str | None = None,
        rank: int | None = None,
        epoch: int | None = None,
        wall: Callable[[], float] = time.time,
        mono: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = run_dir / "events" / f"{writer}.jsonl"
        self._fd: int | None = None
        self._lock = threading.Lock()
        self._node, self._rank, self._wall, self._mono = node, rank, wall, mono
        self.epoch = epoch
        self.failed = 0

    def emit(
        self, event: str, *, step: int | None = None, epoch: int | None = None, **fields: Any
    ) -> None:
        """Append one event; the time is now."""
        line = Event(
            event=event,
            t_unix=self._wall(),
            t_mono=self._mono(),
            node=self._node,
            rank=self._rank,
            epoch=self.epoch if epoch is None else epoch,
            step=step,
            fields=fields,
        ).encode()
        with self._lock:
            self._append(line)

    def _append(self, line: str) -> None:
        try:
            if self._fd is None:  # at the first event: most workers never write one
                self._path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                self._fd = os.open(self._path, flags, 0o666)  # the umask decides
            os.write(self._fd, line.encode())
        except OSError:
            self.failed += 1

    def close(self) -> None:
        """Close the file; a later emit opens it again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
