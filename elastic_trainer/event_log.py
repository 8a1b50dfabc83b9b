"""Appends events to a run directory: one file per writer, one line per event."""

from __future__ import annotations

import os
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
        path = run_dir / "events" / f"{writer}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
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
        try:
            os.write(self._fd, line.encode())
        except OSError:
            self.failed += 1

    def close(self) -> None:
        """Close the file; later emits would fail."""
        os.close(self._fd)
