"""Processes that outlived their job: they hold GPUs, memory and CPUs of the next one.

What is left over is decided by a pure function; /proc is read beside it. As an ordinary user one
sees the files and environment of one's own processes only, of others their cgroup and CPU time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.fleet.preflight.hardware import Wrong

PROC: Final = Path("/proc")
FIRST_USER: Final = 1000
"""Below are the system's own users (UID_MIN of login.defs)."""
_BUSY: Final = 0.5
"""CPUs that a process has taken since its start, from which it slows others down."""
_JOB: Final = re.compile(r"/job_(\d+)(?:/|$)")
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
        if pid in own:
            continue
        # Where Slurm keeps jobs private, one sees one's own only.
        mine = me in (0, process.uid)
        if process.job and live is not None and mine and process.job not in live:
            ended = f"is of job {process.job}, which has ended"
            yield Wrong("warn", f"{_who(process)} {ended}: {_way(process)}")
        elif process.gpus and not process.job:
            held = ", ".join(process.gpus)
            yield Wrong("warn", f"{_who(process)} holds {held} and is of no job: {_way(process)}")
        elif tracked and not process.job and process.uid >= FIRST_USER and process.cpus > _BUSY:
            others.setdefault(process.uid, []).append(process)
    for uid, found in others.items():
        cpus = sum(each.cpus for each in found)
        who = f"user {uid} takes {cpus:.1f} CPUs outside any job, as by {_who(found[0])}"
        yield Wrong("warn", f"{who}: end it, or ask its user to")


def _who(process: ProcStatus) -> str:
    return f"process {process.pid} ({process.command[:_SHOWN]})"


def _way(process: ProcStatus) -> str:
    if process.stuck:
        return "it cannot be killed, reboot the node"
    return f"kill {process.pid}"


def read_processes(proc: Path = PROC) -> dict[int, ProcStatus]:
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
    return ProcStatus(
        pid=int(folder.name),
        uid=folder.stat().st_uid,
        command=words or name.partition("(")[2],
        job=cgroup[1] if cgroup else _job_of(folder),
        tracked=cgroup is not None,
        gpus=_gpus_of(folder),
        cpus=seconds / age_s,
        stuck=state == "D",
    )


def _job_of(folder: Path) -> str:
    """Return the job in a process's environment; empty: none, or another user's process."""
    try:
        raw = (folder / "environ").read_bytes()
    except OSError:
        return ""
    match = re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)\0", raw)
    return match[1].decode() if match else ""


def _gpus_of(folder: Path) -> tuple[str, ...]:
    try:
        targets = [str(fd.readlink()) for fd in (folder / "fd").iterdir()]
    except OSError:
        return ()  # another user's
    return tuple(sorted({match[1] for each in targets if (match := _GPU.fullmatch(each))}))


def ancestors(pid: int, proc: Path = PROC) -> frozenset[int]:
    """Return a process and all above it: what has started a check is no left-over."""
    found: set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            rest = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2]
        except OSError:
            break
        pid = int(rest.split()[1])
    return frozenset(found)


def unused_segments(
    segments: Mapping[str, int], mapped: frozenset[str], *, prefixes: tuple[str, ...]
) -> dict[str, int]:
    """Return name -> bytes of shared memory that libraries have left: nobody has it mapped."""
    return {
        name: size
        for name, size in segments.items()
        if name.startswith(prefixes) and name not in mapped
    }


def mapped_segments(shm: str, proc: Path = PROC) -> frozenset[str]:
    """Return the names in `shm` that one's own processes have mapped or open."""
    found = set()
    for folder in proc.iterdir():
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
