"""Loads libraries that start threads on their own, without these: who has threads cannot fork."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

_ONE: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS, which numpy brings along, starts as many threads as OMP_NUM_THREADS says, or the
machine has cores, while it is loaded. This variable goes before that one and is read only then
(blas_get_cpu_number in driver/others/memory.c). MKL and OpenMP start theirs when they are used."""
_SETTERS: Final = tuple(
    f"{prefix}openblas_set_num_threads{suffix}"
    for prefix in ("scipy_", "")
    for suffix in ("64_", "")
)
"""As numpy's own build names it, then others."""


@contextmanager
def no_threads(env: MutableMapping[str, str]) -> Iterator[None]:
    """Let libraries that are loaded within have one thread; leave `env` as it was.

    `thread_setters` gives them back to the process that has been forked.

    Args:
        env: os.environ, which libraries read.
    """
    before = {name: env.get(name) for name in _ONE}
    env.update(_ONE)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del env[name]
            else:
                env[name] = value


def thread_setters() -> list[Callable[[int], Any]]:
    """Return what sets the number of threads, of each OpenBLAS that is loaded."""
    with suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}
        libraries = [ctypes.CDLL(path) for path in sorted(paths)]
        found = [next((s for s in _SETTERS if hasattr(lib, s)), None) for lib in libraries]
        return [getattr(lib, name) for lib, name in zip(libraries, found, strict=True) if name]
    return []


def blas_threads(env: Mapping[str, str], cpus: int) -> int:
    """Return how many threads OpenBLAS takes by itself, as blas_get_cpu_number has it. Pure.

    Args:
        env: of the process.
        cpus: that it may run on.
    """
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        number = re.match(r"\s*\+?(\d+)", env.get(name, ""))
        if number is not None and int(number[1]) > 0:
            return min(int(number[1]), cpus)
    return cpus


def give_threads_back(setters: list[Callable[[int], Any]]) -> None:
    """Have libraries run on as many threads as where a process has loaded them itself."""
    number = blas_threads(os.environ, len(os.sched_getaffinity(0)))
    if number > 1:  # else they have what they need
        for setter in setters:
            setter(number)
