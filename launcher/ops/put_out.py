"""Which nodes a run has put out: its next submission keeps off them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from elastic_trainer.events import Event
from launcher.errors import UserError

_STARTED: Final = "agent.started"
_EVICTED: Final = "member.evicted"
_READMITTED: Final = "member.readmitted"
_TELLING: Final = tuple(f'"{name}"'.encode() for name in (_STARTED, _EVICTED, _READMITTED))
_CLOCKS_S: Final = 3600.0
"""Files are read that were written last so long before the submission: clocks differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOut:
    """A node that is to be kept off."""

    host: str
    """As the platform calls it."""
    member: str
    """As the run calls it; on Kubernetes its pod."""
    reason: str
    """Why it was put out."""

    def to_json(self) -> dict[str, str]:
        """Return plain JSON types."""
        return asdict(self)


def put_out(events: Iterable[Event], *, since_unix: float) -> list[PutOut]:
    """Return the nodes that were put out since a submission, by name; each once. Pure.

    A node is the one its member ran on then: a pod of the same name may have gone to another one
    since, and may then take part again (`member.readmitted`), while the node stays put out. Only
    when the operator lets the member back in where it was, the node is fine again.

    Args:
        events: of the run, in order of time.
        since_unix: when it was submitted last. What was put out before has had its time.
    """
    hosts: dict[str, str] = {}
    found: dict[str, PutOut] = {}
    for event in events:
        member = event.fields.get("member")
        if event.event == _STARTED and event.node:
            hosts[event.node] = str(event.fields.get("host") or event.node)
        elif not isinstance(member, str) or event.t_unix < since_unix:
            continue
        elif event.event == _EVICTED:
            host = hosts.get(member, member)
            reason = str(event.fields.get("reason") or "no reason was written")
            found[host] = PutOut(host=host, member=member, reason=reason)
        elif event.event == _READMITTED:
            found.pop(hosts.get(member, member), None)
    return [found[host] for host in sorted(found)]


def read_put_out(run_dir: Path, *, since_unix: float) -> list[PutOut]:
    """Return the nodes that the run in `run_dir` has put out since `since_unix`; see `put_out`.

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
