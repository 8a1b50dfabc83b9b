"""What hung workers are doing, gathered before they are killed.

Of each worker: what the kernel says of its threads (the only source for a stopped one),
the Python stacks it writes itself on a signal, those that py-spy reads where it is
installed and the worker cannot answer, and torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_trainer.agent.hangs.procfs import state_of
from elastic_trainer.event_log import EventLog
from elastic_trainer.flight_recorder import Front
from elastic_trainer.stack_signal import (
    FLIGHT_SIGNAL,
    STACKS_SIGNAL,
    flight_path,
    fronts_path,
    stacks_path,
)

GATHER_S = 0.3
"""How long the workers' end may be put off for it."""
FRONTS_S = 0.2
"""How long workers may take to say how far they are in their collectives: part of the half second
that their agent has for its own answer (`hang_diagnosis.ANSWER_S`)."""
MAX_BYTES = 1 << 18
"""Of one file that is kept."""
MAX_THREADS = 64
"""Of one worker that are looked at."""
_POLL_S = 0.01
_SILENT = frozenset({"", "T", "t", "Z"})
"""States of processes that answer no signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A worker to look at."""

    rank: int
    pid: int
    heartbeat: Path


@dataclass(slots=True)
class _Asked:
    """A worker that was asked, and what is still to come."""

    target: Target
    kernel: str
    stacks_from: int = -1
    """Size of its file of stacks before; -1: it cannot answer."""
    flight: bool = False
    spy: subprocess.Popen[bytes] | None = None

    def done(self) -> bool:
        """Whether everything that can come has come."""
        return self._stacks_done() and self._flight_done() and self._spy_done()

    def _stacks_done(self) -> bool:
        if self.stacks_from < 0:
            return True
        # Pending until the main thread takes it, blocked there until the handler has written all.
        status = _fields(_read(Path(f"/proc/{self.target.pid}/status")))
        masks = (int(status.get(name, "0"), 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
        answering = any(mask >> (STACKS_SIGNAL - 1) & 1 for mask in masks)
        return not answering and _size(stacks_path(self.target.heartbeat)) > self.stacks_from

    def _flight_done(self) -> bool:
        return not self.flight or flight_path(self.target.heartbeat).exists()

    def _spy_done(self) -> bool:
        return self.spy is None or self.spy.poll() is not None


@dataclass(slots=True)
class Dump:
    """What was gathered."""

    texts: dict[str, bytes] = field(default_factory=dict)
    """File name -> content."""
    seconds: float = 0.0


def gather_stacks(
    targets: Sequence[Target],
    *,
    deadline_s: float = GATHER_S,
    spy_too: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Dump:
    """Ask all workers at once and return what they said within `deadline_s`.

    With `spy_too` py-spy, where it is installed, looks at workers that answer as well: it
    says more, but takes longer.
    """
    begin = clock()
    spy = find_py_spy()
    asked = [_ask(target, spy, spy_too=spy_too) for target in targets]
    while clock() - begin < deadline_s and not all(one.done() for one in asked):
        time.sleep(_POLL_S)
    dump = Dump()
    for one in asked:
        name = f"rank{one.target.rank}"
        dump.texts[f"{name}.txt"] = _text_of(one).encode()[:MAX_BYTES]
        if one.flight and (content := _read(flight_path(one.target.heartbeat))):
            # Cut JSON is no JSON, and what does not fit says little.
            dump.texts[f"{name}.flight.json"] = content[: 16 * MAX_BYTES]
    dump.seconds = clock() - begin
    return dump


def gather_fronts(
    targets: Sequence[Target],
    *,
    deadline_s: float = FRONTS_S,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, dict[str, Front]]:
    """Return rank -> how far it is in each process group, of those that say so in time."""
    begin = clock()
    asked = [
        target
        for target in targets
        if state_of(target.pid) not in _SILENT
        and _ask_for_flight(target, _signal_masks(target.pid))
    ]
    found: dict[int, dict[str, Front]] = {}
    while len(found) < len(asked) and clock() - begin < deadline_s:
        for target in asked:
            if target.rank not in found and (said := _read(fronts_path(target.heartbeat))):
                found[target.rank] = {
                    group: (completed, begun)
                    for group, (completed, begun) in json.loads(said).items()
                }
        time.sleep(_POLL_S)
    return found


def find_py_spy() -> str | None:
    """Return where py-spy is: on PATH, or beside this interpreter, whose folder may not be."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def dump_stacks(
    targets: Sequence[Target], stacks_dir: Path, epoch: int, log: EventLog
) -> threading.Thread:
    """Look at the workers, which takes GATHER_S at most, and keep what was seen.

    Returns:
        The thread that writes it to `stacks_dir`/`epoch`; an event names the files.
    """
    dump, folder = gather_stacks(targets), stacks_dir / str(epoch)

    def done(files: list[str], problem: str) -> None:
        log.emit(
            "stacks.dumped",
            epoch=epoch,
            folder=str(folder),
            files=files,
            seconds=round(dump.seconds, 6),
            problem=problem,
        )

    return keep_stacks(dump, folder, done)


def keep_stacks(
    dump: Dump, folder: Path, done: Callable[[list[str], str], None]
) -> threading.Thread:
    """Write `dump` to `folder`, perhaps slow storage, on a thread; then call `done`.

    `done` takes the names of the files written, and what went wrong or an empty text.
    """

    def write() -> None:
        files, problem = [], ""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in dump.texts.items():
                (folder / name).write_bytes(content)
                files.append(name)
        except OSError as error:
            problem = str(error)
        done(files, problem)

    thread = threading.Thread(target=write, name="holdfast-stacks", daemon=True)
    thread.start()
    return thread


def _ask(target: Target, spy: str | None, *, spy_too: bool = False) -> _Asked:
    asked = _Asked(target, kernel_view(target.pid))
    state, masks = state_of(target.pid), _signal_masks(target.pid)
    runs = state not in _SILENT
    # Without a handler the signal would kill it: a script's worker, or one that just started.
    if runs and masks.get("SigCgt", 0) >> (STACKS_SIGNAL - 1) & 1:
        asked.stacks_from = _size(stacks_path(target.heartbeat))
        _signal(target.pid, STACKS_SIGNAL)
    silent = asked.stacks_from < 0
    if spy is not None and state not in {"", "Z"} and (spy_too or silent):
        asked.spy = subprocess.Popen(
            [spy, "dump", "--nonblocking", "--pid", str(target.pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # why it may not look, for one
        )
    asked.flight = runs and _ask_for_flight(target, masks)
    return asked


def _ask_for_flight(target: Target, masks: Mapping[str, int]) -> bool:
    """Ask a worker that runs for its flight recorder; return whether it can answer."""
    if not masks.get("SigBlk", 0) >> (FLIGHT_SIGNAL - 1) & 1:
        return False
    for path in (flight_path(target.heartbeat), fronts_path(target.heartbeat)):
        path.unlink(missing_ok=True)
    _signal(target.pid, FLIGHT_SIGNAL)
    return True


def _text_of(asked: _Asked) -> str:
    parts = [asked.kernel]
    if asked.stacks_from >= 0:
        content = _read(stacks_path(asked.target.heartbeat))[asked.stacks_from :]
        parts.append("--- stacks, from the worker itself\n" + content.decode(errors="replace"))
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


def _signal_masks(pid: int) -> Mapping[str, int]:
    """Return what a process catches, and what all of its threads block.

    A thread that was there before and blocks less would take the signal, and the process die of it.
    Who waits for the signal is left out: the kernel shows it as not blocked meanwhile.
    """
    status = _fields(_read(Path(f"/proc/{pid}/status")))
    masks: dict[str, int] = {
        name: int(status[name], 16) for name in ("SigBlk", "SigCgt") if name in status
    }
    for task in _listed(Path(f"/proc/{pid}/task")):
        found = _fields(_read(task / "status")).get("SigBlk")
        if found is not None and b"sigtimedwait" not in _read(task / "wchan"):
            masks["SigBlk"] = masks.get("SigBlk", 0) & int(found, 16)
    return masks


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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _signal(pid: int, number: signal.Signals | int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
