"""SIGTERM and SIGINT where the agent answers them: schedulers signal every process of a job."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Final

_DEFAULTS: Final[dict[signal.Signals, Any]] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}


def leave_stops_to_the_agent() -> None:
    """Have SIGTERM and SIGINT mean nothing from here on, where no handler of the script's is set.

    To this process alone: what it starts or forks has Python's defaults, so that it can be ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) in (signal.SIG_DFL, default):
            # A handler, since programs that are executed would go on to ignore what is ignored.
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=_as_python_has_them)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """The agent has it too."""


def _as_python_has_them() -> None:
    for number, default in _DEFAULTS.items():
        if signal.getsignal(number) is _ignore:
            signal.signal(number, default)
