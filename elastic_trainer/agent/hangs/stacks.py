"""What hung workers are doing, gathered before they are killed, and what /proc says of them.

Of each worker: what the kernel says of its threads (the only source for a stopped one),
the Python stacks it writes itself, those that py-spy reads where it is installed and the
worker cannot answer, and torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.flight_recorder import Front
from elastic_trainer.storage.files import of_each, read_regular
from elastic_trainer.storage.typed import build, parse_json
from elastic_trainer.worker.worker_answers import (
    FLIGHT,
    FRONTS,
    SIGNALLED,
    STACKS,
    STACKS_SIGNAL,
    ask,
)

GATHER_S = 0.3
"""How long the workers' end is put off for it. Agents are not told at the same moment, and workers
whose peers have ended fail at once: they must be there until the last agent has looked."""
FRONTS_S = 0.2
"""How long workers may take to say how far they are in their collectives: part of the half second
that their agent has for its own answer (`hang_diagnosis.ANSWER_S`)."""
MAX_BYTES = 1 << 18
"""Longest file that is kept."""
MAX_THREADS = 64
"""Most threads of a worker that are looked at."""
_POLL_S = 0.01
_ENDED = frozenset({"", "Z"})
_SILENT = _ENDED | {"T", "t"}
"""States of processes that do not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackTarget:
    """A worker to look at."""

    rank: int
    pid: int
    heartbeat: Path


@dataclass(slots=True)
class _Dump:
    """A worker that was asked, and what is still to come."""

    target: StackTarget
    kernel: str
    answers: bool
    """It has a thread that answers."""
    spy: subprocess.Popen[bytes] | None = None
    signalled_from: int = -1
    """Size of what it has written on signals before this one; -1: it was sent none."""

    def done(self) -> bool:
        """Whether everything that can come has come."""
        answered = not self.answers or self.target.heartbeat.with_suffix(FLIGHT).exists()
        return (answered or state_of(self.target.pid) in _ENDED) and (
            self.spy is None or self.spy.poll() is not None
        )

    def signal(self) -> None:
        """Have it write its stacks by its signal handler."""
        status = _fields(_read(Path(f"/proc/{self.target.pid}/status")))
        if int(status.get("SigCgt", "0"), 16) >> (STACKS_SIGNAL - 1) & 1:  # else it would kill it
            self.signalled_from = size_of(self.target.heartbeat.with_suffix(SIGNALLED))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.target.pid, STACKS_SIGNAL)


@dataclass(slots=True)
class Dump:
    """What was gathered."""

    texts: dict[str, bytes] = field(default_factory=dict)
    """File name -> content."""
    seconds: float = 0.0


def gather_stacks(
    targets: Sequence[StackTarget], *, deadline_s: float = GATHER_S, spy_too: bool = False
) -> Dump:
    """Ask all workers at once and return what they said within `deadline_s`.

    Workers that are silent for half of it are sent a signal. With `spy_too` py-spy, where it is
    installed, looks at workers that answer as well: it says more, but takes longer.
    """
    begin = time.monotonic()
    spy = find_py_spy()
    asked = [_ask(target, spy, spy_too=spy_too) for target in targets]
    _wait(asked, until=begin + deadline_s / 2)
    for one in asked:
        if one.answers and not one.target.heartbeat.with_suffix(STACKS).exists():
            one.signal()
    _wait(asked, until=begin + deadline_s)
    dump = Dump()
    for one in asked:
        name = f"rank{one.target.rank}"
        dump.texts[f"{name}.txt"] = _text_of(one).encode()[:MAX_BYTES]
        if one.answers and (content := _read(one.target.heartbeat.with_suffix(FLIGHT))):
            # JSON that is cut cannot be read, and what does not fit says little.
            dump.texts[f"{name}.flight.json"] = content[: 16 * MAX_BYTES]
    dump.seconds = time.monotonic() - begin
    return dump


def _wait(asked: Sequence[_Dump], *, until: float) -> None:
    while time.monotonic() < until and not all(one.done() for one in asked):
        time.sleep(_POLL_S)


def gather_fronts(
    targets: Sequence[StackTarget], *, deadline_s: float = FRONTS_S
) -> dict[int, dict[str, Front]]:
    """Return rank -> how far it is in each process group, of those that say so in time."""
    begin = time.monotonic()
    asked = [t for t in targets if state_of(t.pid) not in _SILENT and ask(t.heartbeat)]
    found: dict[int, dict[str, Front]] = {}

    def said(target: StackTarget) -> tuple[int, dict[str, Front]]:
        raw = parse_json(read_regular(target.heartbeat.with_suffix(FRONTS), MAX_BYTES))
        return target.rank, build(_Fronts, {"groups": raw}).groups

    while True:
        silent = [target for target in asked if target.rank not in found]
        found.update(of_each(silent, said, lambda target: f"rank {target.rank}'s word"))
        if len(found) == len(asked) or time.monotonic() - begin >= deadline_s:
            return found
        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fronts:
    groups: dict[str, Front]


def find_py_spy() -> str | None:
    """Return where py-spy is: on PATH, or beside this interpreter, whose folder may not be."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def dump_stacks(
    targets: Sequence[StackTarget], stacks_dir: Path, epoch: int, log: EventLog
) -> threading.Thread:
    """Look at the workers and return, after GATHER_S, the thread that keeps what was seen.

    It writes to `stacks_dir`/`epoch`, perhaps slow storage; an event names the files.
    """
    begin = time.monotonic()
    dump, folder = gather_stacks(targets), stacks_dir / str(epoch)

    def write() -> None:
        files: list[str] = []
        seconds, problem = round(dump.seconds, 6), ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in dump.texts.items():
                (folder / name).write_bytes(content)
                files.append(name)
        except OSError as error:
            problem = str(error)
        at = str(folder)
        log.emit(
            "stacks.dumped", epoch=epoch, folder=at, files=files, seconds=seconds, problem=problem
        )

    writer = threading.Thread(target=write, name="holdfast-stacks", daemon=True)
    writer.start()
    time.sleep(max(begin + GATHER_S - time.monotonic(), 0.0))
    return writer


def _ask(target: StackTarget, spy: str | None, *, spy_too: bool) -> _Dump:
    kernel, state = kernel_view(target.pid), state_of(target.pid)
    asked = _Dump(target, kernel, answers=state not in _SILENT and ask(target.heartbeat))
    if spy is not None and state not in _ENDED and (spy_too or not asked.answers):
        asked.spy = subprocess.Popen(
            [spy, "dump", "--nonblocking", "--pid", str(target.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # why it may not look, for one
        )
    return asked


def _text_of(asked: _Dump) -> str:
    parts = [asked.kernel]
    if asked.answers:
        said = _read(asked.target.heartbeat.with_suffix(STACKS))
        if not said and asked.signalled_from >= 0:
            said = _read(asked.target.heartbeat.with_suffix(SIGNALLED))[asked.signalled_from :]
        parts.append("--- stacks, from the worker itself\n" + said.decode(errors="replace"))
    if asked.spy is not None:
        if asked.spy.poll() is None:
            asked.spy.kill()
        said, _ = asked.spy.communicate()
        parts.append("--- stacks, from py-spy\n" + said.decode(errors="replace"))
    return "\n".join(parts)


def kernel_view(pid: int) -> str:
    """Return what /proc says of a process and its threads: state, where each waits, and in what."""
    lines = [f"pid {pid}"]
    tasks = _listed(Path(f"/proc/{pid}/task"))
    for task in tasks[:MAX_THREADS]:
        status = _fields(_read(task / "status"))
        names = ("Name", "State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")
        said = ", ".join(f"{name} {status.get(name, '?')}" for name in names)
        lines.append(f"thread {task.name}: {said}")
        sources = ("wchan", "syscall", "stack")  # the last two for root only
        texts = (_read(task / source).decode(errors="replace").strip("\0\n ") for source in sources)
        lines += [
            f"  {source}: " + text.replace("\n", "\n    ")
            for source, text in zip(sources, texts, strict=True)
            if text
        ]
    if len(tasks) > MAX_THREADS:
        lines.append(f"and {len(tasks) - MAX_THREADS} more threads")
    return "\n".join(lines) + "\n"


def _fields(content: bytes) -> dict[str, str]:
    pairs = (line.partition(":") for line in content.decode(errors="replace").splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir(), key=lambda path: int(path.name))
    except OSError:
        return []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def size_of(path: Path) -> int:
    """Return how many bytes a file has so far; 0 where there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


# --- a process, by the kernel ---------------------------------------------------------


def state_of(pid: int) -> str:
    """Return the state's letter, as in proc_pid_stat(5); empty when it cannot be read."""
    return _state(Path(f"/proc/{pid}/stat"))


def is_stuck(pid: int, *, proc: Path = Path("/proc")) -> bool:
    """Return whether a thread of a process is in an uninterruptible wait: no signal ends it.

    Its first thread may have ended long before, and shows as a zombie.
    """
    return any(_state(stat) == "D" for stat in proc.glob(f"{pid}/task/*/stat"))


def _state(stat: Path) -> str:
    try:
        text = stat.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]  # the name before may hold anything


def held_s(pid: int) -> float:
    """Return how long its main thread could have run, and waited for a processor; 0.0: not known.

    Source: /proc/PID/schedstat.
    """
    try:
        _, held, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0.0
    return int(held) / 1e9
