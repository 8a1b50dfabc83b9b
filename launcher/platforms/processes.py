"""Finding and killing the processes of one emulated node, by /proc.

A node's processes are those that carry its marker in the environment they were
started with, those of the agent's session, and all their descendants: three
nets, since a power loss must leave nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

MARKER = "HOLDFAST_EMULATED_NODE"
"""Environment variable that marks every process of an emulated node: `<job id>/<node>`."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Process:
    """One row of the process table."""

    pid: int
    ppid: int
    session: int
    state: str
    """One letter as in proc(5); Z is a zombie, which holds nothing any more."""


def process_table(proc: Path = Path("/proc")) -> list[Process]:
    """Return every process that can be seen; those that end meanwhile are left out."""
    table = []
    for entry in os.scandir(proc):
        if not entry.name.isdigit():
            continue
        try:
            text = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        # The command in parentheses may hold anything: fields start after the last one.
        fields = text[text.rindex(")") + 2 :].split()
        table.append(Process(int(entry.name), int(fields[1]), int(fields[3]), fields[0]))
    return table


def node_pids(marker: str, session: int, proc: Path = Path("/proc")) -> set[int]:
    """Return the live processes of the node with `marker`, whose agent leads `session`."""
    table = [row for row in process_table(proc) if row.state not in ("Z", "X")]
    mine = {
        row.pid for row in table if row.session == session or _has_marker(proc, row.pid, marker)
    }
    while True:
        grown = mine | {row.pid for row in table if row.ppid in mine}
        if grown == mine:
            return mine - {os.getpid()}
        mine = grown


def child_named(parent: int, name: str, proc: Path = Path("/proc")) -> int | None:
    """Return the child of process `parent` that calls itself `name`; None: there is none.

    What a child forks may have the same name, but has another parent.
    """
    for row in process_table(proc):
        if row.ppid != parent or row.state in ("Z", "X"):
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            if (proc / str(row.pid) / "comm").read_text(encoding="utf-8") == f"{name}\n":
                return row.pid
    return None


def _has_marker(proc: Path, pid: int, marker: str) -> bool:
    try:
        environ = (proc / str(pid) / "environ").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return False
    return f"{MARKER}={marker}".encode() in environ.split(b"\0")


def catches(pid: int, number: int, proc: Path = Path("/proc")) -> bool:
    """Return whether process `pid` has a handler for signal `number`; else it might kill it."""
    try:
        lines = (proc / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    except OSError:  # ended meanwhile
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None: it is gone, or a zombie.

    A pid alone may have been given to another process since.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *words = text[text.rindex(")") + 2 :].split()
    return None if state == "Z" else int(words[18])


def signal_all(pids: set[int], number: int) -> None:
    """Send `number` to each; one that is gone already is no error."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def die_with_parent() -> Callable[[], None]:
    """Return a function for the child side of fork: SIGKILL when its parent dies.

    The library is looked up here, since between fork and exec little is safe.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before we were armed
            os._exit(1)

    return arm
