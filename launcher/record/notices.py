"""Which events of a run somebody wants to be told of, and in what words. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import EXIT_SAVED, Kind
from elastic_trainer.record.signatures import signature_of
from launcher.record.event import counts, node_names, parked_text, whole

_MARKS: Final = {
    "failure": ":warning:",
    "recovery": ":white_check_mark:",
    "parked": ":rotating_light:",
    "stopped": ":octagonal_sign:",
    "completed": ":checkered_flag:",
}
KINDS: Final = tuple(_MARKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One thing to tell."""

    run: str
    kind: str
    """One of KINDS."""
    text: str
    step: int | None
    """Newest completed step."""
    t_unix: float
    runbook: str = ""
    """The command that prints what to do; empty: nothing is to be done."""

    def to_json(self) -> dict[str, Any]:
        """Return the body of a webhook."""
        return asdict(self)

    def to_slack(self) -> dict[str, Any]:
        """Return the body of a Slack webhook."""
        step = "" if self.step is None else f" (step {self.step})"
        do = f"; {self.runbook}" if self.runbook else ""
        return {"text": f"{_MARKS[self.kind]} {self.run}: {self.text}{step}{do}"}


class Notices:
    """Turns one run's events into notices; one for each failure, however many ranks tell of it.

    Args:
        run: its name.
        lost: the platform's kind of a node's loss.
    """

    def __init__(self, run: str, lost: str = Kind.NODE_LOST) -> None:
        self._run, self._lost = run, lost
        self._runbook = self._of_the_run = f"holdfast runbook --for {run}"
        """Of the newest failure; where nothing tells, the doctor finds it."""
        self._step: int | None = None
        self._failed_unix: float | None = None
        """Time of the failure that the run has not recovered from."""
        self._parked = False

    def add(self, event: Event) -> Notice | None:
        """Take one event; return what it is to be told of."""
        self._take_cause(event)
        fields = event.fields
        match event.event:
            case "step.completed":
                self._step, self._runbook = event.step, self._of_the_run
                return self._recovered(event)
            case "epoch.aborted" | "member.lost":  # a coordinator that died aborts nothing
                if self._failed_unix is None:
                    self._failed_unix = event.t_unix
                    who = node_names(fields.get("victims") or [fields.get("member")])
                    text = f"{', '.join(who) or 'the epoch'} failed: {fields.get('reason', '?')}"
                    return self._notice("failure", event, text, self._runbook)
            case "membership.parked":
                if not self._parked:
                    self._parked = True
                    text = f"{parked_text(*counts(event))}; it waits for nodes"
                    return self._notice(
                        "parked", event, text, signature_of(self._lost, "").of.runbook
                    )
            case "run.ended":
                self._failed_unix, self._parked = None, False
                if (code := whole(event, "code")) == 0:
                    return self._notice("completed", event, "it has done its last step")
                text = f"it ended with exit code {code}: see holdfast why {self._run}"
                runbook = "" if code == EXIT_SAVED else self._of_the_run
                return self._notice("stopped", event, text, runbook)
        return None

    def _take_cause(self, event: Event) -> None:
        """Keep the runbook of what the event says has failed."""
        causes = {
            "worker.exit": event.fields.get("kind"),
            "worker.hung": Kind.HANG,
            "member.lost": self._lost,
        }
        kind = causes.get(event.event)
        if kind not in (None, "", Kind.COLLATERAL):
            said = event.fields.get("detail") or event.fields.get("reason") or ""
            self._runbook = signature_of(str(kind), str(said)).of.runbook

    def _recovered(self, event: Event) -> Notice | None:
        failed, was_parked = self._failed_unix, self._parked
        self._failed_unix, self._parked = None, False
        if failed is None and not was_parked:
            return None
        after = "" if failed is None else f" {event.t_unix - failed:.1f} s after the failure"
        return self._notice("recovery", event, f"it trains again{after}")

    def _notice(self, kind: str, event: Event, text: str, runbook: str = "") -> Notice:
        return Notice(
            run=self._run,
            kind=kind,
            text=text,
            step=self._step,
            t_unix=event.t_unix,
            runbook=runbook,
        )
