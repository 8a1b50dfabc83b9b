"""Appends events to a run directory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.storage.write_behind import WriteBehind

NODE_BYTES: Final = 32 << 10
"""At most twice as much is kept of what a node says of itself: some 290 starts of 8 workers, which
is 0.8 GB on 12,500 nodes."""


class EventLog:
    """The file `events/<writer>.jsonl`, one line an event; writers share none (see `WriteBehind`).

    A full, lost or frozen disk never stops the writer: `failed` counts dropped events, and
    `storage.stalled` says afterwards how long nothing could be written.
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
        self._run_dir, self._writer = run_dir, writer
        self._file = WriteBehind(
            run_dir / "events" / f"{writer}.jsonl", on_stall=self._stalled, mono=mono
        )
        self._here = WriteBehind(
            run_dir / "nodes" / f"{node}.jsonl", full_bytes=NODE_BYTES, mono=mono
        )
        self._node, self._rank, self._wall, self._mono = node, rank, wall, mono
        self.epoch = epoch

    def apart(self, topic: str) -> EventLog:
        """Return a log of the same worker in another file, for rare events.

        Readers look at the ends of files, where every step would bury them.
        """
        return EventLog(
            self._run_dir,
            f"{topic}-{self._writer}",
            node=self._node,
            rank=self._rank,
            epoch=self.epoch,
            wall=self._wall,
            mono=self._mono,
        )

    @property
    def failed(self) -> int:
        """Events dropped."""
        return self._file.failed

    def emit(
        self, event: str, *, step: int | None = None, epoch: int | None = None, **fields: Any
    ) -> None:
        """Append an event of now; storage that stalls is not waited for."""
        self._file.put(self._line(event, step, epoch, fields))

    def emit_here(self, event: str, **fields: Any) -> None:
        """Append what every node does at every start: to `nodes/<node>.jsonl`, read on demand.

        RUN/events would grow with nodes x failures, and everybody reads that.
        """
        self._here.put(self._line(event, None, None, fields, brief=True))

    def emit_later(self, event: str, epoch: int | None, fields: dict[str, Any]) -> None:
        """Append an event for a thread that answers peers, which waits for no storage at all."""
        self._file.put(self._line(event, None, epoch, fields), wait=False)

    def _line(
        self,
        event: str,
        step: int | None,
        epoch: int | None,
        fields: dict[str, Any],
        *,
        brief: bool = False,
    ) -> bytes:
        return (
            Event(
                event=event,
                t_unix=self._wall(),
                t_mono=self._mono(),
                node=self._node,
                rank=self._rank,
                epoch=self.epoch if epoch is None else epoch,
                step=step,
                fields=fields,
            )
            .encode(brief=brief)
            .encode()
        )

    def _stalled(self, seconds: float, held_back: int) -> None:
        self.emit("storage.stalled", seconds=round(seconds, 3), held_back=held_back)

    def close(self, timeout_s: float = 2.0) -> None:
        """Give unwritten events a moment, and close the file; a later emit opens it again."""
        self._here.close(timeout_s)
        self._file.close(timeout_s)
