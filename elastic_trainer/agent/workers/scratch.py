"""An agent's directory in memory: heartbeats, error files, snapshots. Gone with the agent."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  memory, so no disk can stall a heartbeat
_PREFIX = "holdfast-"
_LOCK = "owner"


class Scratch:
    """Makes the directory, and removes those of dead agents of this user on this machine.

    An agent that is killed cannot tidy up, and its snapshots may be most of a node's memory.
    A lock tells whether the owner lives: a process id may be another's, or of another namespace.

    Args:
        run_id: of the run.
        node: name of this node.
        root: directory in memory; a temporary one where it cannot be written.
    """

    def __init__(self, run_id: str, node: str, *, root: Path = SHARED_MEMORY) -> None:
        if not os.access(root, os.W_OK):
            root = Path(tempfile.gettempdir())
        _remove_stale(root)
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{run_id}-{node}-", dir=root))
        self._lock = _lock(self.path)
        self.snapshots = self.path / "snapshots"
        self.snapshots.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove the directory and give its memory back."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def make_again(path: Path, snapshots: Path | None) -> bool:
    """Make a directory of this process again where somebody has removed it, or what is in it.

    As systemd-logind does when the user's last session ends (RemoveIPC), and cleaners of /tmp.

    Returns:
        Whether anything was missing.
    """
    wanted = [path] if snapshots is None else [path, snapshots]
    if all(each.is_dir() for each in wanted):
        return False
    for each in wanted:
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not (path / _LOCK).exists():
        _lock(path)  # until this process ends
    return True


def _lock(path: Path) -> int:
    unlocked = path / "new"
    lock = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(path / _LOCK)  # seen only once it is locked
    return lock


def _remove_stale(root: Path) -> None:
    for path in root.glob(f"{_PREFIX}*"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another agent makes or removes it just now
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)
