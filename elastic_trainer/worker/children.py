"""A process's children, those of its dead children and their children included."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# Looked up here, since a forked child should load no library.
prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """Be the parent of every descendant whose own parent ends, whatever its session."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of this process's children, those that wait to be reaped too."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # the usual case, without a look at every process of the machine
    me, found = os.getpid(), set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  names are all it needs
        with contextlib.suppress(OSError):  # it has ended
            stat = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
            # The name in parentheses may hold anything.
            if int(stat.rpartition(")")[2].split()[1]) == me:
                found.add(int(name))
    return found


def kill_children(pids: set[int]) -> None:
    """SIGKILL children that only the caller reaps: their ids are still theirs."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
