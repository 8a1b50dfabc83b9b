"""A worker's answer when its agent asks what it is doing: stacks, and its collectives.

Two real-time signals, since scripts and schedulers use SIGUSR1 and SIGUSR2. The answers
lie beside the heartbeat, in memory: `.stacks`, `.flight` and `.fronts`. A signal handler
writes the stacks, so a worker that hangs inside a call answers too; one that is stopped cannot.
"""

from __future__ import annotations

import faulthandler
import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from elastic_trainer.flight_recorder import fronts_of

STACKS_SIGNAL: Final = signal.SIGRTMIN + 5
"""Caught by workers that answer with their stacks."""
FLIGHT_SIGNAL: Final = signal.SIGRTMIN + 6
"""Blocked in workers that answer with their flight recorder: a thread waits for it."""

_file: IO[bytes] | None = None


def stacks_path(heartbeat: Path) -> Path:
    """Return where the worker with this heartbeat writes its stacks."""
    return heartbeat.with_suffix(".stacks")


def flight_path(heartbeat: Path) -> Path:
    """Return where the worker with this heartbeat writes its flight recorder, as JSON."""
    return heartbeat.with_suffix(".flight")


def fronts_path(heartbeat: Path) -> Path:
    """Return where the worker with this heartbeat writes how far it is in each process group."""
    return heartbeat.with_suffix(".fronts")


def answer_with_stacks(heartbeat: Path) -> None:
    """From now on append the stacks of all threads whenever STACKS_SIGNAL comes; once is enough."""
    global _file  # noqa: PLW0603  the handler needs it open for the life of the process
    if _file is None:
        _file = stacks_path(heartbeat).open("ab")
        faulthandler.register(STACKS_SIGNAL, file=_file, all_threads=True)


def answer_with_flight(heartbeat: Path, dump: Callable[[], bytes]) -> None:
    """From now on write `dump()`, and the fronts in it, whenever FLIGHT_SIGNAL comes.

    A thread waits for it. The agent reads the fronts of all its workers, for which whole dumps are
    too long. Call it before other threads start: they must inherit that the signal is blocked.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})
    part = heartbeat.with_suffix(".part")

    def write(path: Path, content: bytes) -> None:
        part.write_bytes(content)
        part.replace(path)  # whole or not at all

    def serve() -> None:
        while True:
            signal.sigwait({FLIGHT_SIGNAL})
            content = dump()
            write(flight_path(heartbeat), content)
            write(fronts_path(heartbeat), json.dumps(fronts_of(content)).encode())

    threading.Thread(target=serve, name="holdfast-flight", daemon=True).start()
