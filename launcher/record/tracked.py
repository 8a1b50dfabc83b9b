"""The points of a run's curves for experiment trackers: each step once, in order. Pure.

A tracker cannot take a point back. So a step is a point once it will not be redone: it is
committed, or an epoch started from it, and it is over, with its validation. Where the run goes
back all the same (its state was lost, its numbers were wrong), the points of the first time stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import EXIT_DONE
from launcher.record.event import number

_SERIES: Final = {
    "step.completed": ("train", ("loss", "grad_norm", "lr", "step_s", "mfu")),
    "validation.completed": ("validation", ("loss",)),
}
"""Event -> group of series, and the fields that are one each."""


@dataclass(slots=True)
class Point:
    """One step's values by series, as train/loss; `t_unix` when it was done."""

    step: int
    t_unix: float
    values: dict[str, float] = field(default_factory=dict)


class TrackedSteps:
    """Takes a run's events in about the order of time and returns its points."""

    def __init__(self) -> None:
        self._pending: dict[int, Point] = {}
        self._ranks: dict[tuple[int, str], tuple[int, int]] = {}
        """(step, group) -> epoch and lowest rank that it is known from."""
        self._epoch = self._resumed = self._committed = self._newest = self._taken = 0
        self.ended_unix: float | None = None
        """When the run had done its last step; None: it has not."""

    def add(self, event: Event) -> None:
        """Take one event."""
        step, epoch = event.step, event.epoch or 0
        match event.event:
            case "run.ended" | "job.stopped" if event.fields.get("code") == EXIT_DONE:
                self.ended_unix = event.t_unix
            case "trainer.started" if epoch > self._epoch:
                resumed = event.fields.get("resume_step", step)
                self._begin(epoch, resumed if isinstance(resumed, int) else 0)
            case "step.committed" if step is not None and epoch == self._epoch:
                self._committed = max(self._committed, step)
            case "step.completed" | "validation.completed" if step is not None:
                if step > self._taken and (epoch >= self._epoch or step <= self._resumed):
                    self._note(event, step, epoch)

    def take(self, until_unix: float) -> list[Point]:
        """Return the points that have become certain and were done before `until_unix`.

        A step's events come from several files: give the last of them time to be seen.
        """
        # A validation belongs to its step, which is over when the next one is done.
        sure = min(self._committed, self._newest - 1)
        if self.ended_unix is not None and self.ended_unix <= until_unix:
            sure = self._newest
        found = []
        for step in sorted(self._pending):
            if step > sure or self._pending[step].t_unix > until_unix:
                break
            found.append(self._pending.pop(step))
            self._taken = step
        return found

    def _begin(self, epoch: int, resumed: int) -> None:
        self._epoch, self._resumed = epoch, resumed
        self._committed = self._newest = resumed
        self._newest += 1  # the step before it is over
        self._pending = {step: each for step, each in self._pending.items() if step <= resumed}
        self._ranks = {key: known for key, known in self._ranks.items() if key[0] <= resumed}

    def _note(self, event: Event, step: int, epoch: int) -> None:
        group, fields = _SERIES[event.event]
        rank = event.rank or 0
        known = self._ranks.get((step, group))
        if known is not None and known[0] == epoch and known[1] < rank:
            return
        self._ranks[step, group] = (epoch, rank)
        if group == "train":
            self._newest = max(self._newest, step)
            if len(self._ranks) > 2 * _KEPT:
                self._ranks = {k: v for k, v in self._ranks.items() if k[0] > step - _KEPT}
        point = self._pending.setdefault(step, Point(step, event.t_unix))
        found = {name: number(event, name) for name in fields}
        if (tokens := number(event, "tokens")) and (seconds := found.get("step_s")):
            found["tokens_per_s"] = tokens / seconds
        point.values |= {
            f"{group}/{name}": value for name, value in found.items() if value is not None
        }


_KEPT: Final = 1000
"""Steps whose rank is remembered."""
