"""`beat`: raises a number in a file as long as the batch script lives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.node.attempt import Attempt

BEAT_S = 2.0
"""One small write to shared storage by one node; caretakers read it five times as rarely."""


def period_s(env: Mapping[str, str]) -> float:
    """Return seconds between two beats; HOLDFAST_BEAT_S changes them, for tests."""
    return float(env.get("HOLDFAST_BEAT_S") or BEAT_S)


def beat(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Beat until the batch script is gone. Storage that fails is tried again.

    What Slurm sends to all of the job does not end it: the script still waits for its agents.
    """
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    script = _script(env)
    born = started(script)
    count = 0
    while born is not None and started(script) == born:
        count += 1
        # Written over, never replaced: readers on NFS see a new inode late.
        try:
            fd = os.open(attempt.beat, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(fd, b"%012d\n" % count, 0)
            finally:
                os.close(fd)
        except OSError:
            pass  # read as a beat that was lost, until storage is back
        time.sleep(period_s(env))
    return 0


def read(attempt: Attempt) -> str | None:
    """Return what the beat's file says; None where it cannot be read.

    Opened anew each time: on NFS that asks the server, a stat may not.
    """
    try:
        return attempt.beat.read_text(encoding="ascii")
    except (OSError, ValueError):
        return None


def started(pid: int) -> str | None:
    """Return when process `pid` started, in clock ticks since boot; None: it is gone.

    A pid alone may have been given to another process since.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *words = text[text.rindex(")") + 2 :].split()
    return None if state == "Z" else words[18]


def _script(env: Mapping[str, str]) -> int:
    """Return the batch shell's process: Slurm names it. Our parent may be a subshell of it."""
    named = env.get("SLURM_TASK_PID", "")
    return int(named) if named.isdigit() and started(int(named)) else os.getppid()
