"""Loads libraries that start threads on their own, without these: who has threads cannot fork."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Final

_ONE: Final = {"OPENBLAS_NUM_THREADS": "1"}
"""OpenBLAS, which numpy brings along, starts as many threads as OMP_NUM_THREADS says, or the
machine has cores, while it is loaded. This variable goes before that one and is read only then
(blas_get_cpu_number in driver/others/memory.c). MKL and OpenMP start theirs when they are used."""


@contextmanager
def no_threads(env: MutableMapping[str, str]) -> Iterator[None]:
    """Let libraries that are loaded within have one thread; leave `env` as it was.

    numpy's BLAS then has one thread in forked workers too; torch, which has a BLAS of its own, has
    as many as the variable says.

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
