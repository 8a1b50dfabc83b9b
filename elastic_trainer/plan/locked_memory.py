"""Whether a process may lock the memory that RDMA registers. Pure."""

from __future__ import annotations

import resource
from typing import Final

_MAY_LOCK: Final = 1 << 14
"""CAP_IPC_LOCK (linux/capability.h): its holders lock as much memory as they like."""


def locked_memory(status: str, limit: int) -> str | None:
    """Return what keeps RDMA from registering memory; None: nothing does. Pure.

    `status` is /proc/self/status, `limit` RLIMIT_MEMLOCK in bytes. A container that is granted
    IPC_LOCK, and does not run as root, has it among those that it may get, and not effective.
    """
    lines = (line.partition(":")[2] for line in status.splitlines() if line.startswith("CapEff:"))
    if limit == resource.RLIM_INFINITY or int(next(lines, "0"), 16) & _MAY_LOCK:
        return None
    return (
        f"at most {limit >> 10} KiB may be locked in memory, and RDMA locks all that it sends: set "
        "the limit to unlimited (LimitMEMLOCK=infinity of the container runtime or of slurmd)"
    )
