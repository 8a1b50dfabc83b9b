"""How long a rank's device computes in the parts of a step, by CUDA events.

The host runs ahead: its times are those of launching kernels, on a slow device as on a fast one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Final, Protocol, Self

from elastic_trainer.worker.heartbeat import Heartbeat, StepPart

TIMED: Final = frozenset({StepPart.FORWARD, StepPart.BACKWARD})
"""FSDP has its stream wait for parameters before our hooks, so these are without that wait."""


class TimedEvent(Protocol):
    """As torch.cuda.Event with `enable_timing`."""

    def record(self) -> None:
        """Note the time once the device has come here."""

    def query(self) -> bool:
        """Return whether it has."""

    def elapsed_time(self, end_event: Self) -> float:
        """Return the milliseconds until `end_event`."""


class DeviceTimes:
    """Marks for the heartbeat that record an event each; read a step late, nothing is waited for.

    Args:
        heartbeat: takes the marks, and the device's times of TIMED in place of the host's.
        new_event: makes an event of the device.
    """

    def __init__(self, heartbeat: Heartbeat, new_event: Callable[[], TimedEvent]) -> None:
        self._heartbeat, self._new_event = heartbeat, new_event
        self._spare: list[TimedEvent] = []
        self._before: list[tuple[int, TimedEvent]] = []
        """Of the last step."""
        self._now: list[tuple[int, TimedEvent]] = []
        heartbeat.time_elsewhere(TIMED)

    def begin_step(self) -> None:
        """Forget what was marked between steps: a validation."""
        self._spare += [event for _, event in self._now]
        self._now = []

    def mark(self, part: int) -> None:
        """Record that the host enters `part`, and when its device does."""
        event = self._spare.pop() if self._spare else self._new_event()
        event.record()
        self._now.append((part, event))
        self._heartbeat.mark(part)

    def end_step(self) -> None:
        """Add up the times of the step before this one; if its device still works, drop them."""
        before, self._before, self._now = self._before, self._now, []
        if before and before[-1][1].query():
            for (part, begin), (_, end) in pairwise(before):
                if part in TIMED:
                    self._heartbeat.add_time(part, begin.elapsed_time(end) / 1e3)
        self._spare += [event for _, event in before]
