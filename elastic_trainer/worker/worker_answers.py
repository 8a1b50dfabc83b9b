"""A worker's answer when its agent asks what it is doing: stacks, and its collectives.

The agent writes to a pipe beside the heartbeat, `.ask`, and a thread of the worker answers with
files there, in memory: `.stacks`, `.flight` and `.fronts`. The thread holds Python's lock while it
reads the others' frames. A signal handler needs no lock, but frames that change while it reads them
can crash the worker: it is for workers whose thread is silent, as where a call into C keeps the
lock. Its signal is a real-time one: scripts use SIGUSR1 and SIGUSR2.
"""

from __future__ import annotations

import _thread
import faulthandler
import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from elastic_trainer.record.flight_recorder import fronts_of

STACKS_SIGNAL: Final = signal.SIGRTMIN + 5
"""Caught by workers that answer: all threads' stacks, appended to `.signalled`."""

ASK: Final = ".ask"
"""Suffix, beside the heartbeat, of the pipe on which the worker is asked."""
STACKS: Final = ".stacks"
FLIGHT: Final = ".flight"
"""Its flight recorder, as JSON; empty where it has none."""
FRONTS: Final = ".fronts"
"""How far it is in each process group."""
SIGNALLED: Final = ".signalled"

_signalled: IO[bytes] | None = None
_dump: Callable[[], bytes] = bytes


def answer_when_asked(heartbeat: Path) -> None:
    """From now on write the stacks of all threads whenever the agent asks; once is enough."""
    global _signalled  # noqa: PLW0603  the handler needs it open for the life of the process
    if _signalled is not None:
        return
    _signalled = heartbeat.with_suffix(SIGNALLED).open("ab")
    faulthandler.register(STACKS_SIGNAL, file=_signalled, all_threads=True)
    heartbeat.with_suffix(ASK).unlink(missing_ok=True)
    os.mkfifo(heartbeat.with_suffix(ASK), 0o600)
    # For writing too: the pipe then has no end when the agent closes it.
    asked = os.open(heartbeat.with_suffix(ASK), os.O_RDWR)
    # Not one of `threading`, whose list scripts may join, and deaf to signals: they are the main
    # thread's, which may hold them back to wait for them.
    deaf = signal.valid_signals() - {STACKS_SIGNAL}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    _thread.start_new_thread(_answer, (asked, os.fstat(asked), heartbeat))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def answer_with_flight(dump: Callable[[], bytes]) -> None:
    """From now on answer with `dump()`, a flight recorder's JSON, and the fronts in it as well.

    The agent reads the fronts of all its workers, for which whole dumps are too long.
    """
    global _dump  # noqa: PLW0603  the thread runs before there is a recorder
    _dump = dump


def _answer(asked: int, pipe: os.stat_result, heartbeat: Path) -> None:
    part = heartbeat.with_suffix(".part")
    while _is_asked(asked, pipe):
        with part.open("wb") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        part.replace(heartbeat.with_suffix(STACKS))  # whole or not at all
        content = _dump()
        part.write_bytes(content)
        part.replace(heartbeat.with_suffix(FLIGHT))
        part.write_bytes(json.dumps(fronts_of(content) if content else {}).encode())
        part.replace(heartbeat.with_suffix(FRONTS))


def _is_asked(asked: int, pipe: os.stat_result) -> bool:
    """Wait until the agent asks; return False once the script has closed descriptor `asked`.

    A script may close all descriptors that it does not know, and open its own under their numbers.
    """
    try:
        is_ours = os.path.samestat(os.fstat(asked), pipe)
        return is_ours and bool(os.read(asked, select.PIPE_BUF))  # all meanwhile is one question
    except OSError:
        return False


def ask(heartbeat: Path) -> bool:
    """Have the worker with this heartbeat answer again; return whether it has who answers."""
    for suffix in (STACKS, FLIGHT, FRONTS):
        heartbeat.with_suffix(suffix).unlink(missing_ok=True)
    try:
        pipe = os.open(heartbeat.with_suffix(ASK), os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # another kind of program, one that just started or has ended
        return False
    try:
        os.write(pipe, b"?")
    except BlockingIOError:  # full of questions
        pass
    except BrokenPipeError:
        return False
    finally:
        os.close(pipe)
    return True


def forget_answers(heartbeat: Path) -> None:
    """Remove what the worker with this heartbeat, which has ended, has left."""
    for suffix in (ASK, STACKS, FLIGHT, FRONTS, SIGNALLED):
        heartbeat.with_suffix(suffix).unlink(missing_ok=True)
