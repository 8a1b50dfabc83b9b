"""Monotonic seconds without those in which this process was stopped. Pure.

`scontrol suspend`, a debugger or a frozen cgroup stop a process; CLOCK_MONOTONIC continues. Who
compares that with when a peer was heard last takes everybody for dead as soon as it continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 2.0
"""Its reader looks at least every second, so a longer gap is a stop; it counts as no time."""


class RunningClock:
    """For one thread that reads it at least once a second, as its loop's waits are limited.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last = clock, clock()
        self.stopped_s = 0.0
        """Total of what was left out."""

    def __call__(self) -> float:
        """Return the time; a gap since the last reading of over LONGEST_S is left out."""
        now = self._clock()
        if now - self._last > LONGEST_S:
            self.stopped_s += now - self._last
        self._last = now
        return now - self.stopped_s
