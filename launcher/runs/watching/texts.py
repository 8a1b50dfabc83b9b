"""Names and times for people. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence


def names(nodes: Sequence[str], most: int = 8) -> str:
    """Return node names for people: the first few, and how many there are."""
    shown = " ".join(nodes[:most])
    return shown if len(nodes) <= most else f"{shown} … ({len(nodes):,} nodes)"


def times(count: int) -> str:
    """Return `once`, `twice`, `3 times`."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


def when(t_unix: float, now_unix: float) -> str:
    """Return a time for people: how long ago or until then, and the local time."""
    text = span(abs(t_unix - now_unix))
    day = time.localtime(t_unix)[:3] == time.localtime(now_unix)[:3]
    clock = time.strftime("%H:%M:%S" if day else "%Y-%m-%d %H:%M", time.localtime(t_unix))
    return f"{text} ago ({clock})" if t_unix <= now_unix else f"in {text} ({clock})"


def span(seconds: float) -> str:
    """Return a span of time for people, by its largest two units."""
    left = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if left >= size or (unit == "s" and not parts):
            parts.append(f"{left // size} {unit}")
        left %= size
    return " ".join(parts[:2])


def seconds_text(seconds: float) -> str:
    """Return a short span, as that of a step: `0.3 s`, `12 s`, `1 min 5 s`."""
    return f"{seconds:.2g} s" if seconds < 10 else span(seconds)
