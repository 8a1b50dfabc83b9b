"""How far a script has shown that it got: one file of events for each node that spoke for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from elastic_trainer.events import Event

WRITER: Final = "script-"
"""A node's name follows: `events/script-<node>.jsonl`."""
_TAIL_BYTES: Final = 4096
"""Some events: storage that stood still is reported among the steps."""


def newest_step(run_dir: Path) -> int | None:
    """Return the step that the script of a run has shown last, in any attempt; None: none.

    Raises:
        OSError: the record cannot be read.
    """
    files = (run_dir / "events").glob(f"{WRITER}*.jsonl")
    events = (Event.decode(line) for path in files for line in _tail(path))
    shown = [
        (event.epoch or 0, event.step)
        for event in events
        if event is not None and event.event == "script.progress" and event.step
    ]
    return max(shown)[1] if shown else None


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file; the first and the last may be torn."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()
