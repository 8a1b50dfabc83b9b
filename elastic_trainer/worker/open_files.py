"""How many files and sockets a process may have open."""

from __future__ import annotations

import contextlib
import resource


def open_files() -> int:
    """Return how many files and sockets this process may have open, as far as it is allowed.

    The usual 1,024 would not do for the coordinator of a large job, nor for the trainer's groups,
    so the limit is raised first as far as this user may.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
