"""How many of this node's accelerators answer, without touching one: the driver's tool is asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence

QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_TIMEOUT_S = 30.0
"""A driver that does not answer within this time is broken."""


def healthy(wanted: int, env: Mapping[str, str], query: Sequence[str] = QUERY) -> int:
    """Return how many accelerators workers can use here, at most `wanted`.

    Without the tool nobody knows, and workers have to find out. A GPU that has fallen off the
    bus has no line in its answer, or the tool fails as a whole.

    Args:
        wanted: workers of this node, one for each accelerator.
        env: of the agent; CUDA_VISIBLE_DEVICES limits what workers see.
        query: command that prints a line for each accelerator that answers.
    """
    if shutil.which(query[0]) is None:
        return wanted
    try:
        answer = subprocess.run(
            query, capture_output=True, text=True, timeout=QUERY_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return min(wanted, count(answer.stdout, env.get("CUDA_VISIBLE_DEVICES")))


def count(answer: str, visible: str | None) -> int:
    """Return how many of the accelerators that answered workers may see.

    Args:
        answer: lines with an index each; anything else is an accelerator that is in trouble.
        visible: CUDA_VISIBLE_DEVICES; None: all. Indices, or names that are just counted.
    """
    lines = {line.strip() for line in answer.splitlines()}
    found = {line for line in lines if line.isdecimal()}
    if visible is None:
        return len(found)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    named = [name for name in names if not name.isdecimal() or name in found]
    return min(len(found), len(named))
