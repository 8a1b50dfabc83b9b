"""What the kernel says of a worker's process: evidence for hangs, read from /proc."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NOBODY = ""


@dataclass(frozen=True, slots=True)
class Shares:
    """Processor time of a process's main thread, from /proc/PID/schedstat."""

    ran_s: float
    held_s: float
    """It could have run, and waited for a processor."""


def state_of(pid: int) -> str:
    """Return the state's letter, as in proc_pid_stat(5); empty when it cannot be read."""
    return _state(Path(f"/proc/{pid}/stat"))


def is_stuck(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Return whether a thread of a process is in an uninterruptible wait: no signal ends it.

    Its first thread may have ended long before, and shows as a zombie.
    """
    return any(_state(stat) == "D" for stat in proc.glob(f"{pid}/task/*/stat"))


def _state(stat: Path) -> str:
    try:
        text = stat.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return NOBODY
    return text.rpartition(")")[2].split()[0]  # the name before may hold anything


def shares_of(pid: int) -> Shares:
    """Return its processor time so far; zeros when the kernel does not tell."""
    try:
        ran, held, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return Shares(0.0, 0.0)
    return Shares(int(ran) / 1e9, int(held) / 1e9)
