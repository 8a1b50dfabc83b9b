"""Processes that outlived their job: they hold GPUs, memory and CPUs of the next one.

An ordinary user sees files and environment of their own processes only; of others, cgroup and CPU
time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.fleet.preflight.tools import Wrong

FIRST_USER: Final = 1000
"""Below are the system's own users (UID_MIN of login.defs)."""
_BUSY: Final = 0.5
"""CPUs that a process has taken since its start, from which it slows others down."""
_JOB: Final = re.compile(r"/job_(\d+)(?:/|$)")
_JOB_VARIABLE: Final = re.compile(rb"(?:^|\0)SLURM_JOB_ID=(\d+)\0")
_GPU: Final = re.compile(r"/dev/(nvidia\d+|dri/renderD\d+|kfd)")
_SHOWN: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcStatus:
    """What /proc says of one process."""

    pid: int
    uid: int
    command: str
    job: str = ""
    """Slurm's job id; empty: of none, or not to be seen."""
    tracked: bool = False
    """Whether `job` is that of its cgroup, which no process can leave."""
    gpus: tuple[str, ...] = ()
    """Device files that it holds open."""
    cpus: float = 0.0
    """CPU seconds a second, since its start."""
    stuck: bool = False
    """It sleeps in the kernel, where no signal reaches it."""


def orphans(
    processes: Mapping[int, ProcStatus],
    *,
    me: int,
    own: frozenset[int],
    live: frozenset[str] | None,
) -> Iterator[Wrong]:
    """Return what is left of ended jobs, or belongs to none.

    Args:
        processes: pid -> process.
        me: user who asks.
        own: pids of the check itself, and of what started it.
        live: ids of the jobs on this node; None: nobody can say.
    """
    # Where the check itself is in a job's cgroup, every job's processes are.
    tracked = any(processes[pid].tracked for pid in own if pid in processes)
    others: dict[int, list[ProcStatus]] = {}
    for pid, process in sorted(processes.items()):
        who = f"process {pid} ({process.command[:_SHOWN]})"
        way_out = "it cannot be killed, reboot the node" if process.stuck else f"kill {pid}"
        # Where Slurm keeps jobs private, one sees one's own only.
        mine = me in (0, process.uid)
        if pid in own:
            continue
        if process.job and live is not None and mine and process.job not in live:
            words = f"{who} is of job {process.job}, which has ended: {way_out}"
            yield Wrong("warn", words)
        elif process.gpus and not process.job:
            held = ", ".join(process.gpus)
            yield Wrong("warn", f"{who} holds {held} and is of no job: {way_out}")
        elif tracked and not process.job and process.uid >= FIRST_USER and process.cpus > _BUSY:
            others.setdefault(process.uid, []).append(process)
    for uid, found in others.items():
        cpus, first = sum(each.cpus for each in found), found[0]
        who = f"process {first.pid} ({first.command[:_SHOWN]})"
        words = f"user {uid} takes {cpus:.1f} CPUs outside any job, as by {who}"
        yield Wrong("warn", f"{words}: end it, or ask its user to")


def read_processes(proc: Path = Path("/proc")) -> dict[int, ProcStatus]:
    """Return pid -> process, of all that can be seen; zombies hold nothing and are left out."""
    found = {}
    up_s = float((proc / "uptime").read_text().split()[0])
    tick = os.sysconf("SC_CLK_TCK")
    for folder in proc.iterdir():
        if folder.name.isdecimal():
            try:
                process = _read(folder, up_s, tick)
            except (OSError, ValueError, IndexError):
                continue  # it has ended
            if process is not None:
                found[process.pid] = process
    return found


def _read(folder: Path, up_s: float, tick: int) -> ProcStatus | None:
    # The name may have blanks and brackets; what follows the last bracket is numbers.
    name, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
    stat = rest.split()
    state, seconds = stat[0], (int(stat[11]) + int(stat[12])) / tick
    age_s = max(up_s - int(stat[19]) / tick, 1.0)
    if state == "Z":
        return None
    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    if not words and stat[1] in ("0", "2"):
        return None  # a thread of the kernel
    cgroup = _JOB.search((folder / "cgroup").read_text(errors="replace"))
    own = None
    gpus: set[str] = set()
    with contextlib.suppress(OSError):  # another user's
        own = _JOB_VARIABLE.search((folder / "environ").read_bytes())
        targets = [str(fd.readlink()) for fd in (folder / "fd").iterdir()]
        gpus = {match[1] for each in targets if (match := _GPU.fullmatch(each))}
    return ProcStatus(
        pid=int(folder.name),
        uid=folder.stat().st_uid,
        command=words or name.partition("(")[2],
        job=cgroup[1] if cgroup else own[1].decode() if own else "",
        tracked=cgroup is not None,
        gpus=tuple(sorted(gpus)),
        cpus=seconds / age_s,
        stuck=state == "D",
    )


def ancestors(pid: int, proc: Path = Path("/proc")) -> frozenset[int]:
    """Return a process and all above it: what has started a check is not left over."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            rest = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2]
        except OSError:
            break
        pid = int(rest.split()[1])
    return frozenset(found)


def mapped_segments(shm: str) -> frozenset[str]:
    """Return the names in `shm` that one's own processes have mapped or open."""
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            for line in (folder / "maps").read_text(errors="replace").splitlines():
                _, slash, path = line.partition(f" {shm}/")
                if slash:
                    found.add(path.removesuffix(" (deleted)"))
            for fd in (folder / "fd").iterdir():
                target = str(fd.readlink())
                if target.startswith(f"{shm}/"):
                    found.add(target.removeprefix(f"{shm}/").removesuffix(" (deleted)"))
        except OSError:
            continue  # it has ended, or is another user's
    return frozenset(found)
