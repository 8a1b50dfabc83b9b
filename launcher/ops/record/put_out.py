"""Which machines a run has put out: its next submission keeps off them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from elastic_trainer.events import Event
from launcher.errors import UserError

_EVICTED: Final = "member.evicted"
_READMITTED: Final = "member.readmitted"
_TELLING: Final = tuple(f'"{name}"'.encode() for name in (_EVICTED, _READMITTED))
_CLOCKS_S: Final = 3600.0
"""Files are read that were written last so long before the submission: clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOut:
    """A machine that is to be kept off."""

    host: str
    """As the platform calls it."""
    member: str
    """The node it was then, as the run calls it; on Kubernetes a pod."""
    reason: str
    """Why it was put out."""

    def __str__(self) -> str:
        """Return it for people."""
        who = "" if self.member == self.host else f" ({self.member})"
        return f"{self.host}{who}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """Return plain JSON types."""
        return asdict(self)


def put_out(events: Iterable[Event], *, since_unix: float) -> list[PutOut]:
    """Return the machines that were put out since a submission, by name; each once. Pure.

    The pod that ran there then may be on another one by now; the machine stays put out until the
    operator lets it back in.

    Args:
        events: of the run, in order of time.
        since_unix: when it was submitted last. What was put out before has had its time.
    """
    found: dict[str, PutOut] = {}
    for event in events:
        member = event.fields.get("member")
        if not isinstance(member, str) or event.t_unix < since_unix:
            continue
        host = str(event.fields.get("host") or member)
        if event.event == _EVICTED:
            reason = str(event.fields.get("reason") or "no reason was written")
            found[host] = PutOut(host=host, member=member, reason=reason)
        elif event.event == _READMITTED:
            found.pop(host, None)
    return [found[host] for host in sorted(found)]


def read_put_out(run_dir: Path, *, since_unix: float) -> list[PutOut]:
    """Return the machines that the run in `run_dir` has put out since `since_unix`; see `put_out`.

    Raises:
        UserError: HF613 its record cannot be read.
    """
    try:
        events = list(_telling(run_dir / "events", since_unix - _CLOCKS_S))
    except OSError as error:
        raise UserError(
            "HF613", f"{run_dir / 'events'} cannot be read: {error.strerror or error}"
        ) from error
    return put_out(sorted(events, key=lambda event: event.t_unix), since_unix=since_unix)


def _telling(folder: Path, since_unix: float) -> Iterator[Event]:
    """Yield the few events that count, of files written since; records of months are long."""
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if not entry.name.endswith(".jsonl") or entry.stat().st_mtime < since_unix:
            continue
        with Path(entry.path).open("rb") as file:
            for line in file:
                if not any(name in line for name in _TELLING):
                    continue
                event = Event.decode(line.decode("utf-8", errors="replace"))
                if event is not None and isinstance(event.t_unix, int | float):
                    yield event
