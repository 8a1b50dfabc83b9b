"""Is there memory left for snapshots? Counts /dev/shm, the cgroup's limit and the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

RESERVE: Final = 0.1
"""Part of each limit that is left alone: the training needs memory too."""

_CGROUPS: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)
_UNLIMITED_BYTES: Final = 1 << 60
"""cgroup v1 says so with a number near 2**63."""


def limits(directory: Path, *, root: Path = Path("/")) -> Iterator[tuple[str, int, int]]:
    """Yield (name, bytes in all, bytes free) of everything that bounds files in `directory`.

    Args:
        directory: where snapshots are kept.
        root: of /proc and /sys; other than / only in tests.
    """
    disk = os.statvfs(directory)
    yield f"{directory.parent}", disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    memory = dict(
        line.split(":") for line in (root / "proc/meminfo").read_text().splitlines() if ":" in line
    )
    yield "memory", _kib(memory["MemTotal"]), _kib(memory["MemAvailable"])
    for limit_file, usage_file in _CGROUPS:
        try:
            limit = (root / limit_file[1:]).read_text().strip()
            usage = (root / usage_file[1:]).read_text().strip()
        except OSError:
            continue
        if limit != "max" and int(limit) < _UNLIMITED_BYTES:
            yield "the cgroup's memory", int(limit), int(limit) - int(usage)


def no_room(directory: Path, num_bytes: int, *, root: Path = Path("/")) -> str | None:
    """Say why `num_bytes` more cannot be kept in `directory`; None when they can."""
    for name, total_bytes, free_bytes in limits(directory, root=root):
        if free_bytes - num_bytes < RESERVE * total_bytes:
            return (
                f"{num_bytes / 2**20:.0f} MiB more do not fit {name}: {free_bytes / 2**20:.0f} of "
                f"{total_bytes / 2**20:.0f} MiB are free, and a tenth is left alone"
            )
    return None


def _kib(text: str) -> int:
    return int(text.split(maxsplit=1)[0]) << 10
