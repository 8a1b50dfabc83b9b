"""The newest of what a run's record says, from the ends of its files: quick for runs of months."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.command import UNKNOWN_STEPS
from elastic_trainer.config import TrainConfig
from elastic_trainer.events import Event
from launcher.errors import UserError
from launcher.ops import run_dir as run_dirs
from launcher.ops.record.progress import Progress
from launcher.ops.record.put_out import PutOut, put_out
from launcher.ops.record.timeline import layouts_of
from launcher.ops.record.verdict import this_attempt

_LONG_TAILS = 64
"""So many files, those written last, are read further back: trainers', the coordinator's."""
_LONG_BYTES = 256 * 1024
_SHORT_BYTES = 8 * 1024
_MAX_FILES = 8192
SAVE_ENDS = ("checkpoint.committed", "checkpoint.failed")
_OF_SUBMIT = ("code", "environment")
"""Events of these families come before the first attempt, or between two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a run's own record says of it last."""

    config: TrainConfig
    progress: Progress
    code: int | None
    """How the newest attempt ended; None: it has not, or nobody could say so."""
    reason: str
    """Why it ended."""
    last_unix: float | None
    """When the newest event was written; None: there is none."""
    events: list[Event]
    """The ends of the record, by time."""

    @property
    def put_out(self) -> list[PutOut]:
        """Machines that the newest attempt has put out."""
        return put_out(this_attempt(self.events), since_unix=0.0)

    @property
    def failed_save(self) -> Event | None:
        """The newest save, where it failed; None: it did not."""
        ended = (event for event in reversed(self.events) if event.event in SAVE_ENDS)
        newest = next(ended, None)
        return newest if newest is not None and newest.event == "checkpoint.failed" else None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        now = self.progress
        return {
            "state": now.state if self.last_unix is not None else None,
            "epoch": now.epoch,
            "step": now.step,
            "steps_asked": now.total_steps,
            "loss": now.loss,
            "tokens_per_s": now.tokens_per_s,
            "layout": now.layout or None,
            "nodes": list(now.members),
            "spares": list(now.spares),
            "parked": None
            if now.parked is None
            else {"have": now.parked[0], "need": now.parked[1]},
            "put_out": [each.to_json() for each in self.put_out],
            "saved_step": now.saved_step,
            "code": self.code,
            "reason": self.reason or None,
            "last_event_unix": self.last_unix,
        }


def read_news(run_dir: Path) -> News:
    """Read the ends of the record of `run_dir`; a run that has none yet has no news.

    Raises:
        UserError: HF613 its job.json cannot be read.
    """
    config = run_dirs.load(run_dir)
    return news_of(tail_events(run_dir), config)


def news_of(events: list[Event], config: TrainConfig) -> News:
    """Return what `events`, by time, come to. Pure."""
    progress = Progress(
        name=config.run_id,
        total_steps=None if config.train.steps == UNKNOWN_STEPS else config.train.steps,
        num_nodes=config.ladder.max_nodes,
        layouts=layouts_of(config),
        start_step=config.start_from.step if config.start_from else 0,
    )
    # What submit itself has noted says nothing of a run that waits.
    events = [event for event in events if event.event.partition(".")[0] not in _OF_SUBMIT]
    progress.apply(events)
    code, reason = _end(events)
    return News(
        config=config,
        progress=progress,
        code=code,
        reason=reason,
        last_unix=events[-1].t_unix if events else None,
        events=events,
    )


def tail_events(run_dir: Path) -> list[Event]:
    """Return the events at the ends of the files of `run_dir`, by time."""
    events: list[Event] = []
    for index, path in enumerate(_newest_files(run_dir / "events")):
        events.extend(_tail(path, _LONG_BYTES if index < _LONG_TAILS else _SHORT_BYTES))
    return sorted(events, key=lambda event: event.t_unix)


def _newest_files(folder: Path) -> list[str]:
    """Return the paths of the event files, the one written last first."""
    try:
        with os.scandir(folder) as entries:
            found = [
                (entry.stat().st_mtime, entry.path)
                for entry in entries
                if entry.name.endswith(".jsonl")
            ]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError("HF613", f"{folder} cannot be read: {error.strerror or error}") from error
    return [path for _, path in sorted(found, reverse=True)[:_MAX_FILES]]


def _tail(path: str, num_bytes: int) -> Iterable[Event]:
    """Yield the whole events at the end of a file."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - num_bytes)
            file.seek(start)
            lines = file.read(num_bytes).split(b"\n")
    except OSError:
        return  # removed meanwhile, or not ours to read; the others tell enough
    for line in lines[1 if start else 0 : -1]:
        event = Event.decode(line.decode("utf-8", errors="replace"))
        if event is not None and isinstance(event.t_unix, int | float):
            yield event


def _end(events: list[Event]) -> tuple[int | None, str]:
    """Return the code and reason that the newest attempt ended with.

    The launcher's own `run.ended`, of a local run, has no reason; the agents' `job.stopped` has.
    """
    ended: int | None = None
    for event in reversed(events):
        code, reason = event.fields.get("code"), str(event.fields.get("reason") or "")
        if event.event in ("run.ended", "job.stopped") and isinstance(code, int):
            ended = code if ended is None else ended
            if reason:
                return ended, reason
        if event.event == "trainer.finished":
            return 0 if ended is None else ended, ""
        if event.event in ("run.started", "epoch.formed", "step.completed", "agent.started"):
            break
    return ended, ""
