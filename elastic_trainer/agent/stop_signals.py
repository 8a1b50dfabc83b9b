"""SIGTERM, SIGINT, SIGUSR2, SIGUSR1 and SIGRTMIN, put aside until the agent's loop takes them.

The first three ask for a save and an end, and so does any other that torchrun's
--signals-to-handle names. A second SIGTERM or SIGINT means: at once, without
saving. Slurm signals every process of a step, and `launcher.node` passes on what it gets; so the
same wish comes twice, and it does so as SIGUSR2, which may come any number of times.

SIGUSR1 asks for a checkpoint on storage now; the job continues. SIGRTMIN asks this node alone to
leave: it is drained.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from types import FrameType, TracebackType
from typing import Any, Final, Self

NUMBERS: Final = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGUSR1),
    signal.SIGRTMIN,
)
REPEATABLE: Final = signal.SIGUSR2.name
SAVE: Final = signal.SIGUSR1.name
LEAVE: Final = signal.SIGRTMIN.name


class StopSignals:
    """Handles them while it is entered, on the main thread.

    Args:
        wake: called from the handler, to wake the loop.
        others: names of more signals.
    """

    def __init__(self, wake: Callable[[], None], others: Collection[str] = ()) -> None:
        self._wake = wake
        self._numbers = {*NUMBERS, *(signal.Signals[name] for name in others)}
        self._seen: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the handler."""
        self._before = {number: signal.signal(number, self._note) for number in self._numbers}
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        """Put back what was there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def taken(self) -> list[str]:
        """Return the names of those that came since the last call."""
        count = len(self._seen)
        taken, self._seen[:count] = self._seen[:count], []
        return [signal.Signals(number).name for number in taken]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._seen.append(number)
        self._wake()


class Waker:
    """A self-pipe that wakes the agent's loop, from any thread and from signal handlers."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Make `fileno` readable."""
        with contextlib.suppress(BlockingIOError):  # full, so readable already
            os.write(self._write, b".")

    def drain(self) -> None:
        """Make it unreadable again."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def fileno(self) -> int:
        """Return the reading end."""
        return self._read

    def close(self) -> None:
        """Close both ends; nobody may wake any more."""
        os.close(self._read)
        os.close(self._write)
