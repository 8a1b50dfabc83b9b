"""A run directory on a file system of its own that can be frozen: writers wait, readers do not.

Needs root, a loop device and `fsfreeze` (util-linux); `why_not` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fault_matrix import events
from tiny_run import pids_of

_SIZE = "192M"


def why_not() -> str | None:
    """Return why storage cannot be frozen here; None: it can."""
    if os.geteuid() != 0:
        return "freezing a file system needs root"
    for tool in ("fsfreeze", "mkfs.ext4", "mount"):
        if shutil.which(tool) is None:
            return f"freezing a file system needs `{tool}`"
    return None if Path("/dev/loop-control").exists() else "there are no loop devices here"


class Disk:
    """A small ext4 file system, mounted at `folder/disk` while it is entered.

    Raises:
        PermissionError: it cannot be mounted here.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._image = folder / "disk", folder / "disk.img"
        self._lock = threading.Lock()
        self._frozen = False

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True)
        subprocess.run(["truncate", "-s", _SIZE, str(self._image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(self._image)], check=True)
        done = subprocess.run(
            ["mount", "-o", "loop", str(self._image), str(self.path)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise PermissionError(done.stderr.strip())
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        subprocess.run(["umount", "-l", str(self.path)], check=True)

    def freeze(self) -> float:
        """Freeze it; return when, by the wall clock."""
        with self._lock:
            subprocess.run(["fsfreeze", "-f", str(self.path)], check=True)
            self._frozen = True
        return time.time()

    def thaw(self) -> float:
        """Thaw it; return when that began, by the wall clock."""
        with self._lock:
            now = time.time()
            if self._frozen:
                subprocess.run(["fsfreeze", "-u", str(self.path)], check=True)
                self._frozen = False
        return now


@dataclass(frozen=True, slots=True)
class Freeze:
    """Storage that stands still for a while."""

    event: str = "step.completed"
    """The freeze begins at the first such event ..."""
    step: int = 0
    """... of at least this step, if it has any."""
    seconds: float = 4.0
    times: int = 1
    """More than one: slow storage, that answers for a moment in between."""
    gap_s: float = 0.1
    kill_rank: int | None = None
    """A worker that is killed while the storage is frozen: two at once."""


class Freezer(threading.Thread):
    """Carries out freezes of `disk` in turn; `windows` has when it was frozen for each."""

    def __init__(self, disk: Disk, run_dir: Path, freezes: Sequence[Freeze]) -> None:
        super().__init__(daemon=True)
        self._disk, self._run_dir, self._freezes = disk, run_dir, freezes
        self._ended = threading.Event()
        self.windows: list[list[tuple[float, float]]] = []

    def run(self) -> None:
        for freeze in self._freezes:
            while not self._seen(freeze):
                if self._ended.wait(0.02):
                    return
            windows: list[tuple[float, float]] = []
            for _ in range(freeze.times):
                begun = self._disk.freeze()
                if freeze.kill_rank is not None:
                    self._kill(freeze.kill_rank)
                self._ended.wait(freeze.seconds)
                windows.append((begun, self._disk.thaw()))
                if self._ended.wait(freeze.gap_s):
                    return
            self.windows.append(windows)

    def stop(self) -> None:
        self._ended.set()
        self.join()
        self._disk.thaw()

    def _seen(self, freeze: Freeze) -> bool:
        found = events(self._run_dir, freeze.event)
        return any((event.get("step") or 0) >= freeze.step for event in found)

    def _kill(self, rank: int) -> None:
        started = map(pids_of, events(self._run_dir, "workers.started"))
        pids = [pids[rank] for pids in started if rank in pids]
        os.kill(pids[-1], signal.SIGKILL)
