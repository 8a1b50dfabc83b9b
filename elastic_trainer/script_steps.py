"""How far a script has shown that it got: one file of events for each node that spoke for it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from elastic_trainer.events import Event

WRITER: Final = "script-"
"""A node's name follows: `events/script-<node>.jsonl`."""
_TAIL_BYTES: Final = 4096
"""More than a whole event."""


def newest_step(run_dir: Path) -> int | None:
    """Return the step that the script of a run has shown last, in any attempt; None: none.

    Raises:
        OSError: the record cannot be read.
    """
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in (run_dir / "events").glob(f"{WRITER}*.jsonl"):
            event = _last_event(path)
            if event is not None and event.step is not None:
                found.append((event.epoch or 0, event.step))
    return max(found)[1] if found else None


def _last_event(path: Path) -> Event | None:
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = file.read().splitlines(keepends=True)
    whole = (
        line.decode("utf-8", errors="replace") for line in reversed(lines) if line.endswith(b"\n")
    )
    return next((event for event in map(Event.decode, whole) if event is not None), None)
