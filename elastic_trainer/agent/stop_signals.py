"""The agent's signals, put aside until its loop takes them.

SIGTERM, SIGINT, SIGHUP, SIGQUIT (`--signals-to-handle`) and SIGUSR2 ask for a save and an end. They
may come any number of times, since schedulers and process managers repeat themselves, and each
process of a step gets its own. Only SIGINT, AGAIN_S or more after the first wish, means: at once,
without saving. That is a person at a terminal, or `launcher.node` when time is up.

SIGUSR1 asks for a checkpoint on storage now; the job continues. SIGRTMIN asks this node alone to
leave: it is drained.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any, Final, Self

STOPS: Final = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})
"""torchrun's, passed on to scripts by their names."""
ALWAYS: Final = frozenset({"SIGTERM", "SIGINT"})
"""Ask for a stop whatever `--signals-to-handle` says."""
STOP_WORKERS: Final = signal.SIGTERM.name
"""What scripts get for a wish that came by another way."""
URGENT: Final = signal.SIGINT.name
AGAIN_S: Final = 1.0
"""Two SIGINT within this are one Ctrl-C: a terminal and a parent that passes it on both send it."""
REPEATABLE: Final = signal.SIGUSR2.name
SAVE: Final = signal.SIGUSR1.name
LEAVE: Final = signal.SIGRTMIN.name


class StopSignals:
    """Handles them while it is entered, on the main thread; `wake` wakes the loop."""

    def __init__(self, wake: Callable[[], None], stops: Collection[str] = STOPS) -> None:
        self._wake = wake
        self._names = {*stops, REPEATABLE, SAVE, LEAVE}
        self._seen: list[int] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        """Install the handler; SIGHUP that is ignored (nohup) stays so."""
        numbers = {signal.Signals[name] for name in self._names}
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            numbers.discard(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        """Put back what was there."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def taken(self) -> list[str]:
        """Return the names of the signals that came since the last call."""
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
