"""Waits for signals, with a time-out, for the processes that are an agent's parent.

Not by sigtimedwait: where a stop (SIGSTOP, SIGCONT) breaks its wait off and the time is over by
then, CPython up to 3.14 returns a siginfo that nobody has filled in.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections import deque
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Final, Self

_READ_BYTES: Final = 512


class TakenSignals:
    """Takes signals from when it is entered, those too that were held back; on the main thread.

    Args:
        numbers: which.
    """

    def __init__(self, numbers: Sequence[signal.Signals]) -> None:
        self._numbers = numbers
        self._taken: deque[signal.Signals] = deque()
        self._before: dict[signal.Signals, Any] = {}
        self._mask: set[int] = set()

    def __enter__(self) -> Self:
        """Begin: handlers first, so that none that is pending takes its default action."""
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before = {number: signal.signal(number, _noted) for number in self._numbers}
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, self._numbers)
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        """Put back what was there."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._read)
        os.close(self._write)

    def wait(self, seconds: float) -> signal.Signals | None:
        """Return the next one, waiting at most `seconds`; None: there was none."""
        if not self._taken and select.select([self._read], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                # The interpreter writes the number of each into the pipe, as a byte.
                self._taken.extend(map(signal.Signals, os.read(self._read, _READ_BYTES)))
        return self._taken.popleft() if self._taken else None


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: without a handler nothing would be written into the pipe."""
