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
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Final

Wait = Callable[[float], signal.Signals | None]
"""Returns the next signal, waiting at most so many seconds; None: there was none."""
_READ_BYTES: Final = 512


@contextlib.contextmanager
def taken_signals(numbers: Sequence[signal.Signals]) -> Iterator[Wait]:
    """Take signals while it is entered, those too that were held back; on the main thread.

    Args:
        numbers: which.
    """
    taken: deque[signal.Signals] = deque()
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wait(seconds: float) -> signal.Signals | None:
        if not taken and select.select([read], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                # The interpreter writes the number of each into the pipe, as a byte.
                taken.extend(map(signal.Signals, os.read(read, _READ_BYTES)))
        return taken.popleft() if taken else None

    # Handlers first, so that none that is pending takes its default action.
    before = {number: signal.signal(number, _noted) for number in numbers}
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield wait
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def _noted(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: without a handler nothing would be written into the pipe."""
