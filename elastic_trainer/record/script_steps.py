"""A script's progress: the newest step it has shown, and whether a restart continues from there.

Each node that speaks for a script has a file of events. The rule is in docs/scripts.md; decisions
are pure.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.storage.files import of_each, read_end

WRITER: Final = "script-"
"""A node's name follows: `events/script-<node>.jsonl`."""
FEW_STEPS: Final = 5
"""A restart that goes back by fewer steps is not one from scratch."""
MOST_FROM_SCRATCH: Final = 2
"""The job ends with so many restarts from scratch in a row."""
_TAIL_BYTES: Final = 4096
"""Some events: stalls of the storage are reported among the steps."""


class StepSource(enum.IntEnum):
    """How a script's steps are known; the highest of several counts."""

    NONE = 0
    UNSURE = 1
    """Counted, but nothing tells which step of the training was the first: an optimizer that does
    not count itself, or several in turn."""
    OPTIMIZER = 2
    """Counted, and the optimizer's state says how many steps it had done."""
    SCRIPT = 3
    """`holdfast.progress`."""
    OUTPUT = 4
    """By --progress-pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a script has shown in an epoch."""

    epoch: int
    step: int
    """The newest."""
    first: int
    source: StepSource
    origin: int
    """First step of the run, by the same source."""
    from_scratch: int = 0
    """Restarts in a row that began there again."""

    def to_fields(self) -> dict[str, Any]:
        """Return the fields of `script.progress` besides the step."""
        by = self.source.name.lower()
        fields = {"first": self.first, "by": by, "origin": self.origin}
        return {**fields, "from_scratch": self.from_scratch} if self.from_scratch else fields

    @classmethod
    def of(cls, event: Event) -> Shown:
        """Read an event; missing fields are unknown."""
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
    """How a script began again."""

    first: int
    """Its first step."""
    newest: int
    """Newest step of the epoch before."""
    redone: int | None
    """Steps done again; None: unknown."""
    from_scratch: int
    """Restarts from scratch in a row, with this one; 0: it continues."""
    now: Shown
    """What to compare the next restart with."""


def begun(before: Shown | None, now: Shown) -> Shown:
    """Return `now` with the run's origin, where both epochs have the same source."""
    if before is None or before.source is not now.source:
        kept = before.from_scratch if before is not None else 0
        return replace(now, origin=now.first, from_scratch=kept)
    return replace(now, origin=before.origin, from_scratch=before.from_scratch)


def restart(before: Shown | None, now: Shown) -> Restart | None:
    """Compare an epoch's first step with the epoch before; None: they do not compare.

    A restart is from scratch if it begins where the run began, or before, FEW_STEPS or more behind
    the newest step. Steps of different sources do not compare.
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
    """Return the newest step that a run's script has shown, in any attempt; None: none."""
    shown = newest_shown(run_dir)
    return shown.step if shown is not None else None


def newest_shown(run_dir: Path) -> Shown | None:
    """Return what a run's script has shown last, in any attempt; None: nothing."""
    files = (run_dir / "events").glob(f"{WRITER}*.jsonl")
    ends = of_each(files, lambda path: read_end(path, _TAIL_BYTES))
    events = (Event.decode(line) for end in ends for line in end.splitlines())
    shown = [
        event
        for event in events
        if event is not None and event.event == "script.progress" and event.step
    ]
    if not shown:
        return None
    return Shown.of(max(shown, key=lambda each: (each.epoch or 0, each.step, each.t_unix)))
