"""Has the kernel give a buffer its pages before it is needed, off the training thread.

The first write to a fresh page costs about 1 microsecond where the machine has the memory at
hand, and 12 in a virtual machine that gets it from its host: more than the copy itself.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

WORTH_BYTES: Final = 8 << 20
"""Below it the training thread may as well do it: 2 to 25 ms."""
_PAGE: Final = 4096
_CHUNK_BYTES: Final = 4 << 20
"""At a time, without the interpreter's lock: whoever stops it waits for no more."""
_NICE: Final = 19


def fault_in(buffer: Tensor, stop: threading.Event) -> None:
    """Write one byte into each page of `buffer`, whose contents nobody needs yet.

    Args:
        buffer: contiguous, on the CPU, fresh.
        stop: once it is set the rest is left.
    """
    flat = buffer.reshape(-1).view(torch.uint8)
    for at in range(0, flat.numel(), _CHUNK_BYTES):
        if stop.is_set():
            return
        flat[at : at + _CHUNK_BYTES : _PAGE].zero_()


def start_idle(body: Callable[[], object], name: str) -> threading.Thread:
    """Run `body` in a thread that gives way to all others, and return it."""

    def run() -> None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it; it is only a courtesy
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        body()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread
