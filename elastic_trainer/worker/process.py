"""What Linux says of a process, and what is asked of it: children, CPUs, threads, open files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
from collections.abc import Callable, Collection, Iterator
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final

_PR_SET_CHILD_SUBREAPER = 36
# Looked up here, since a forked child should load no library.
prctl = ctypes.CDLL(None, use_errno=True).prctl


def adopt_orphans() -> None:
    """Be the parent of every descendant whose own parent ends, whatever its session."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> set[int]:
    """Return the process ids of this process's children, also of dead ones that were not reaped."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()  # the usual case, without a look at every process of the machine
    threads = list(Path("/proc/self/task").iterdir())
    if len(threads) == 1:  # the list has gaps where another thread reaps meanwhile (proc(5))
        with contextlib.suppress(OSError):  # a kernel without CONFIG_PROC_CHILDREN
            listed = (threads[0] / "children").read_text(encoding="ascii")
            return set(map(int, listed.split()))
    me, found = os.getpid(), set()
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  names are all it needs
        with contextlib.suppress(OSError):  # it has ended
            stat = Path("/proc", name, "stat").read_text(encoding="utf-8", errors="replace")
            # The name in parentheses may hold anything.
            if int(stat.rpartition(")")[2].split()[1]) == me:
                found.add(int(name))
    return found


def kill_children(pids: set[int]) -> None:
    """SIGKILL children that only the caller reaps: their ids are still theirs."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


# -- Sets of CPUs in the kernel's list format -----------------------------------------------------


def parse_cpus(text: str) -> frozenset[int]:
    """Read a list.

    Raises:
        ValueError: it has another form.
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


# -- Libraries that start threads on their own ----------------------------------------------------


_OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
"""OpenBLAS, which numpy brings along, starts as many threads as OMP_NUM_THREADS says, or the
machine has cores, while it is loaded. This variable goes before that one and is read only then
(blas_get_cpu_number in driver/others/memory.c). MKL and OpenMP start theirs when they are used."""
_SETTERS: Final = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)
"""As numpy's own build names it, then others."""


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Let libraries that are loaded within have one thread; leave os.environ as it was.

    `thread_setters` gives them back to the process that has been forked.
    """
    before = os.environ.get(_OPENBLAS)
    os.environ[_OPENBLAS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_OPENBLAS]
        else:
            os.environ[_OPENBLAS] = before


def thread_setters() -> list[Callable[[int], Any]]:
    """Return what sets the number of threads, of each OpenBLAS that is loaded."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        paths = {line.split(maxsplit=5)[5] for line in maps.splitlines() if "openblas" in line}
        libraries = [ctypes.CDLL(path) for path in sorted(paths)]
        found = [next((s for s in _SETTERS if hasattr(lib, s)), None) for lib in libraries]
        return [getattr(lib, name) for lib, name in zip(libraries, found, strict=True) if name]
    return []


def give_threads_back(setters: list[Callable[[int], Any]]) -> None:
    """Have libraries run on as many threads as where a process has loaded them itself."""
    number = len(os.sched_getaffinity(0))
    for name in (_OPENBLAS, "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):  # as blas_get_cpu_number
        wanted = re.match(r"\s*\+?(\d+)", os.environ.get(name, ""))
        if wanted is not None and int(wanted[1]) > 0:
            number = min(int(wanted[1]), number)
            break
    if number > 1:  # else they have what they need
        for setter in setters:
            setter(number)


# -- Open files -----------------------------------------------------------------------------------


def open_files() -> int:
    """Raise the limit of open files and sockets as far as this user may, and return it.

    The usual 1,024 are too few for the coordinator of a large job, and for the trainer's groups.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


# -- The name service -----------------------------------------------------------------------------
# torch asks for the name of each end of a store's connections, for its messages, until one
# question stays unanswered; then it asks no more in that process (`formatSockAddr` in
# c10d/socket.cpp). Where the name service is down that costs ten seconds (resolv.conf(5): 5 s,
# twice), and every worker of every epoch would wait so long. A worker forked from a process that
# has waited does not.


_NOBODY: Final = "127.94.3.17"
"""Of this machine alone, and in no hosts file: to know its name a name service is asked."""


def ask_for_a_name() -> None:
    """Have torch ask the name service once: 0.01 s where it answers, 10 s where it does not.

    Leaves no thread and no socket behind. On a machine without that address nothing is learnt.
    """
    from torch.distributed import DistError, TCPStore

    try:
        listener = socket.create_server((_NOBODY, 0))
        store = TCPStore(
            _NOBODY,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),  # the store owns it from here
        )
    except (OSError, DistError):
        return  # the first store of the job asks then
    del store
