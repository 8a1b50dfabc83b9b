"""Sets of CPUs in the kernel's list format: 0-3,8 (cpuset(7), "List format"). Pure."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list.

    Raises:
        ValueError: it is none.
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpu_list(cpus: Collection[int]) -> str:
    """Return the list of a set."""
    parts = []
    for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        first, last = numbers[0], numbers[-1]
        parts.append(f"{first}-{last}" if last > first else f"{first}")
    return ",".join(parts)
