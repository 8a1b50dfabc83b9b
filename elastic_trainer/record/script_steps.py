"""How far a script has shown that it got, and whether it goes on from there after a restart.

One file of events for each node that spoke for it. The rule is in docs/scripts.md; decisions are
pure.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.record.events import Event

WRITER: Final = "script-"
"""A node's name follows: `events/script-<node>.jsonl`."""
FEW_STEPS: Final = 5
"""A restart that goes back by fewer steps is not said to be one from scratch."""
MOST_FROM_SCRATCH: Final = 2
"""So many restarts from scratch in a row, and the job ends."""
_TAIL_BYTES: Final = 4096
"""Some events: storage that stood still is reported among the steps."""


class StepSource(enum.IntEnum):
    """What a script's steps are known by; of several the highest counts."""

    NONE = 0
    UNSURE = 1
    """Counted, but nothing tells which step of the training the first of them was: an optimizer
    that does not count itself, or one after the other."""
    OPTIMIZER = 2
    """Counted, and the optimizer's own state says how many steps it had done."""
    SCRIPT = 3
    """`holdfast.progress`."""
    OUTPUT = 4
    """The output, by --progress-pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a script has shown in an epoch."""

    epoch: int
    step: int
    """The newest."""
    first: int
    """With which it began."""
    source: StepSource
    origin: int
    """With which the run began, by the same source."""
    from_scratch: int = 0
    """Restarts in a row that began there again."""

    def to_fields(self) -> dict[str, Any]:
        """Return what `script.progress` says beside the step."""
        by = self.source.name.lower()
        fields = {"first": self.first, "by": by, "origin": self.origin}
        return {**fields, "from_scratch": self.from_scratch} if self.from_scratch else fields

    @classmethod
    def of(cls, event: Event) -> Shown:
        """Invert `to_fields`; what an event lacks is not known."""
        fields, step = event.fields, event.step or 0
        by = str(fields.get("by", "")).upper()
        return cls(
            epoch=event.epoch or 0,
            step=step,
            first=int(fields.get("first", step)),
            source=StepSource[by] if by in StepSource.__members__ else StepSource.NONE,
            origin=int(fields.get("origin", 0)),
            from_scratch=int(fields.get("from_scratch", 0)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """With which step a script began again."""

    first: int
    newest: int
    """The newest step that the epoch before had shown."""
    redone: int | None
    """Steps that it does again; None: nothing tells."""
    from_scratch: int
    """Restarts from scratch in a row, this one included; 0: it is none."""
    now: Shown
    """What to compare the next restart with."""


def begun(before: Shown | None, now: Shown) -> Shown:
    """Return `now` with the run's origin, where the epoch before was known by the same source."""
    if before is None or before.source is not now.source:
        kept = before.from_scratch if before is not None else 0
        return replace(now, origin=now.first, from_scratch=kept)
    return replace(now, origin=before.origin, from_scratch=before.from_scratch)


def restart(before: Shown | None, now: Shown) -> Restart | None:
    """Compare an epoch's first step with what the one before has shown; None: nothing compares.

    From scratch is a restart that begins where the run began, or before, FEW_STEPS or more behind
    the newest step. Steps by different sources are not compared.
    """
    if before is None or before.source is not now.source or now.source is StepSource.NONE:
        return None
    now = begun(before, now)
    if now.source is StepSource.UNSURE:
        return Restart(first=now.first, newest=before.step, redone=None, from_scratch=0, now=now)
    redone = max(0, before.step - now.first + 1)
    from_scratch = 0
    if now.first > before.origin:
        now = replace(now, from_scratch=0)
    elif redone >= FEW_STEPS:
        from_scratch = before.from_scratch + 1
        now = replace(now, from_scratch=from_scratch)
    return Restart(
        first=now.first, newest=before.step, redone=redone, from_scratch=from_scratch, now=now
    )


def newest_step(run_dir: Path) -> int | None:
    """Return the step that the script of a run has shown last, in any attempt; None: none.

    Raises:
        OSError: the record cannot be read.
    """
    shown = newest_shown(run_dir)
    return shown.step if shown is not None else None


def newest_shown(run_dir: Path) -> Shown | None:
    """Return what the script of a run has shown last, in any attempt; None: nothing.

    Raises:
        OSError: the record cannot be read.
    """
    files = (run_dir / "events").glob(f"{WRITER}*.jsonl")
    events = (Event.decode(line) for path in files for line in _tail(path))
    shown = [
        event
        for event in events
        if event is not None and event.event == "script.progress" and event.step
    ]
    if not shown:
        return None
    return Shown.of(max(shown, key=lambda each: (each.epoch or 0, each.step, each.t_unix)))


def _tail(path: Path) -> list[str]:
    """Return the last lines of a file; the first and the last may be torn."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().decode("utf-8", errors="replace").splitlines()
