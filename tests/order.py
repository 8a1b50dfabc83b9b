"""In what order several workers of pytest-xdist get the tests, so that all end together.

With `--dist worksteal` each worker begins with an equal part of the list, and who is done takes
the end of another's. So each part begins with its share of what takes long, and ends with unit
tests, of which a second's worth can change hands. What shares a costly fixture stays together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_T = TypeVar("_T")

SECONDS = {"tests/slurm/": 20.0, "tests/kubernetes/": 20.0, "tests/cluster/": 4.0}
"""About how long a test takes there, by the beginning of its file's path."""
SHARED = ("tests/slurm/", "tests/kubernetes/")
"""One cluster serves all tests of such a folder; elsewhere fixtures are shared in a file."""


def dealt(tests: Sequence[tuple[str, _T]], num_workers: int) -> list[_T]:
    """Return all tests, in the order in which `num_workers` parts are cut from them.

    Args:
        tests: the path of its file and the test, in the order of collection.
        num_workers: parts, the first ones the shorter ones where it does not divide.
    """
    light: list[_T] = []
    groups: dict[str, list[_T]] = {}
    costs: dict[str, float] = {}
    for path, test in tests:
        folder = next((each for each in SECONDS if path.startswith(each)), None)
        if folder is None:
            light.append(test)
            continue
        group = folder if folder in SHARED else path
        groups.setdefault(group, []).append(test)
        costs[group] = costs.get(group, 0.0) + SECONDS[folder]
    # The longest group to whom has the least to do (Graham's rule).
    parts: list[list[_T]] = [[] for _ in range(num_workers)]
    loads = [0.0] * num_workers
    for group in sorted(groups, key=lambda each: -costs[each]):
        least = loads.index(min(loads))
        loads[least] += costs[group]
        parts[least] += groups[group]
    # As worksteal cuts: each its share, rounded down, of what is left.
    left, start = len(tests), 0
    for i, part in enumerate(parts):
        size = left // (num_workers - i)
        left -= size
        stop = start + max(0, size - len(part))
        part.extend(light[start:stop])
        start = stop
    return [test for part in parts for test in part] + light[start:]
