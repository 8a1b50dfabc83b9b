"""`beat`: raises a number in a file as long as the batch script lives.

Beside it, what else the batch host does while the job runs: machines that fail get their strikes in
the fleet's ledger, and nodes that Slurm drains are asked to leave.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

from launcher.node.attempt import Attempt
from launcher.node.leaving import Drains, look_after
from launcher.node.strikes import Strikes
from launcher.platforms.commands import SystemCommands
from launcher.platforms.local import start_ticks

BEAT_S = 2.0
"""One small write to shared storage by one node; watchdogs read it five times as rarely."""
HARVESTS: Final = 30
"""The ledger has a strike after so many beats, a minute."""
DRAINS: Final = 5
"""Slurm is asked after so many beats, 10 s, which nodes of the job drain."""


def period_s(env: Mapping[str, str]) -> float:
    """Return seconds between two beats; HOLDFAST_BEAT_S changes them, for tests."""
    return float(env.get("HOLDFAST_BEAT_S") or BEAT_S)


def beat(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Beat until the batch script is gone. Storage that fails is tried again.

    What Slurm sends to all of the job does not end it: the script still waits for its agents.
    """
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    # Slurm names the batch shell's process. Our parent may be a subshell of it.
    named = env.get("SLURM_TASK_PID", "")
    script = int(named) if named.isdigit() and start_ticks(int(named)) else os.getppid()
    born = start_ticks(script)
    # Threads of their own: what stalls them must not stop the beat more than it does itself.
    Strikes(attempt.run_dir, env, every_s=HARVESTS * period_s(env)).start()
    drains = Drains(attempt, env, SystemCommands(env))
    args = (attempt, drains, DRAINS * period_s(env))
    threading.Thread(target=look_after, args=args, daemon=True).start()
    count = 0
    while born is not None and start_ticks(script) == born:
        count += 1
        # Storage that fails is read as a beat that was lost, until it is back.
        with contextlib.suppress(OSError):
            # Written over, never replaced: readers on NFS see a new inode late.
            fd = os.open(attempt.beat, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                os.pwrite(fd, b"%012d\n" % count, 0)
            finally:
                os.close(fd)
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
