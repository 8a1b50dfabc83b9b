"""Which machines a run has excluded. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Final

from elastic_trainer.record.events import Event
from launcher.record.event import named

EXCLUSIONS: Final = ("member.evicted", "member.readmitted")
"""Events that say which machines are excluded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExcludedMachine:
    """A machine that the run excluded; its next submission does without it."""

    host: str
    """As the platform calls it."""
    member: str
    """The node it was then, as the run calls it; on Kubernetes a pod."""
    reason: str

    def __str__(self) -> str:
        """Return it for people."""
        return f"{named(self.host, self.member)}: {self.reason}"

    def to_json(self) -> dict[str, str]:
        """Return plain JSON types."""
        return asdict(self)


def excluded_machines(events: Iterable[Event], *, since_unix: float = 0.0) -> list[ExcludedMachine]:
    """Return the machines that were excluded and not readmitted, by name; each once.

    The pod that ran there may be on another one by now; the machine stays excluded until the
    operator readmits it.

    Args:
        events: of the run, in order of time.
        since_unix: what was excluded before this time is left out.
    """
    found: dict[str, ExcludedMachine] = {}
    for event in events:
        member = event.fields.get("member")
        if event.event not in EXCLUSIONS or not isinstance(member, str):
            continue
        host = str(event.fields.get("host") or member)
        if event.event == "member.readmitted":
            found.pop(host, None)
        elif event.t_unix >= since_unix:
            reason = str(event.fields.get("reason") or "no reason was written")
            found[host] = ExcludedMachine(host=host, member=member, reason=reason)
    return [found[host] for host in sorted(found)]
