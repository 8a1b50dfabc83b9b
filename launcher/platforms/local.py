"""The emulated cluster: one agent per "node", all on this machine.

A node is a process group: the agent, its zygote, its workers. Each has its own loopback address, so
nodes meet as they would over a network.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import not_
from pathlib import Path
from typing import Final, NamedTuple, Self

from elastic_trainer.plan.injected import VARIABLE as FAULTS
from elastic_trainer.plan.injected import Inside
from launcher.platforms.base import JobId
from launcher.platforms.retries import polled
from launcher.spec.errors import PermanentError

SCRATCH = Path("/dev/shm")  # noqa: S108  where agents keep heartbeats, see agent/workers/workers.py
"""A killed agent leaves `holdfast-<run id>-<node>-<random>` here, with a file whose lock it held
(agent/workers/environment.py). After an emulated power loss we tidy it."""
_LOCK: Final = "owner"
_KILL_S: Final = 10.0
SMALL_DISK_BYTES = 1 << 30
"""The largest file system that is filled on purpose."""

ZYGOTE = "holdfast-zygote"
"""What an agent's zygote calls itself."""


@dataclass(slots=True)
class LocalNode:
    """One emulated node."""

    name: str
    address: str
    process: subprocess.Popen[bytes] | None = None
    killed_at: float | None = None
    """Monotonic time at which a power loss was emulated; None: it runs, or ended by itself."""
    paused: bool = False
    starts: int = 0

    @property
    def alive(self) -> bool:
        """Whether its agent runs."""
        return self.process is not None and self.process.poll() is None


def loopback_address(run_id: str, index: int) -> str:
    """Return the address of node `index`: 127.a.b.n, with a and b from the run's id.

    So a stray agent of one run never reaches another. a and b are neither 0 nor 255.
    """
    assert 0 <= index < 250, f"node {index}: an emulated cluster has at most 250 nodes"
    digest = hashlib.sha256(run_id.encode()).digest()
    return f"127.{1 + digest[0] % 254}.{1 + digest[1] % 254}.{1 + index}"


class LocalCluster:
    """Starts, kills, pauses and returns the nodes of one run.

    Use it as a context: leaving it kills whatever is left. Start it from the main thread: agents
    die with the thread that started them, so a killed launcher leaves none behind.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        run_id: str,
        job_id: JobId,
        attempt: int,
        num_nodes: int,
        command: Callable[[LocalNode], Sequence[str]] | None = None,
    ) -> None:
        self.run_dir, self.run_id, self.job_id, self.attempt = run_dir, run_id, job_id, attempt
        self._command = command or self._agent_command
        self.nodes = {
            f"node{index}": LocalNode(f"node{index}", loopback_address(run_id, index))
            for index in range(num_nodes)
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def start(self) -> None:
        """Start an agent on every node."""
        for name in self.nodes:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Power on `name`, new or again.

        Raises:
            PermanentError: its agent cannot be started.
        """
        node = self.nodes[name]
        assert not node.alive, f"{name} runs already"
        log = self.agent_log(name)
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                node.process = subprocess.Popen(
                    self._command(node),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=self._environment(name),
                    start_new_session=True,
                    preexec_fn=die_with_parent(),  # noqa: PLW1509  it only calls prctl
                )
        except OSError as error:
            raise PermanentError(f"the agent of {name} cannot be started: {error}") from error
        node.killed_at, node.paused, node.starts = None, False, node.starts + 1

    def agent_log(self, name: str) -> Path:
        """Return the log of the agent of `name`, with all its starts in this attempt."""
        return self.run_dir / "logs" / str(self.attempt) / name / "agent.log"

    def pids(self, name: str) -> set[int]:
        """Return the live processes of node `name`."""
        process = self.nodes[name].process
        return set() if process is None else node_pids(self._marker(name), process.pid)

    def kill_node(self, name: str) -> None:
        """Emulate a power loss: agent, zygote and workers die at once; returns when all are gone.

        Raises:
            PermanentError: processes are left after 10 s.
        """
        node = self.nodes[name]
        process = node.process
        if process is None:
            return
        # Whoever left the agent's session must be found before its parents die.
        strays = self.pids(name)
        with contextlib.suppress(ProcessLookupError):  # it had ended by itself; strays may be left
            os.killpg(process.pid, signal.SIGKILL)
        signal_all(strays, signal.SIGKILL)
        node.killed_at, node.paused = time.monotonic(), False

        def kill() -> set[int]:
            process.poll()
            left = self.pids(name)
            signal_all(left, signal.SIGKILL)
            return left

        left = polled(kill, not_, for_s=_KILL_S, every_s=0.005)
        process.wait(_KILL_S)
        if left:
            raise PermanentError(f"{name} was killed, but these processes stay: {sorted(left)}")

    def kill_agent(self, name: str) -> None:
        """SIGKILL the agent of `name` and nothing else."""
        node = self.nodes[name]
        assert node.process is not None, f"{name} was never started"
        node.process.kill()
        node.process.wait()
        node.killed_at, node.paused = time.monotonic(), False

    def kill_zygote(self, name: str) -> None:
        """SIGKILL the zygote of `name` and nothing else; PermanentError: it has none now."""
        process = self.nodes[name].process
        found = None if process is None else child_named(process.pid, ZYGOTE)
        if found is None:
            raise PermanentError(f"{name} has no zygote now")
        signal_all({found}, signal.SIGKILL)

    def ask_worker(self, number: Inside, pid: int) -> None:
        """Inject a fault that only a trainer itself can bring about; else PermanentError."""
        if not catches(pid, number):
            raise PermanentError(f"process {pid} takes no such fault: not a trainer, or starting")
        self.signal_worker(number, pid)

    def signal_worker(self, number: int, pid: int) -> None:
        """Send a signal to one live process of this cluster; PermanentError: it is not one."""
        if not any(pid in self.pids(name) for name in self.nodes):
            raise PermanentError(f"process {pid} is not a live worker of this run")
        signal_all({pid}, number)

    def pause_node(self, name: str) -> None:
        """SIGSTOP everything on `name`: silent, but no connection is closed."""
        signal_all(self.pids(name), signal.SIGSTOP)
        self.nodes[name].paused = True

    def resume_node(self, name: str) -> None:
        """SIGCONT everything on `name`."""
        signal_all(self.pids(name), signal.SIGCONT)
        self.nodes[name].paused = False

    def longest_dead(self) -> str | None:
        """Return the first killed node of those still dead, if any."""
        dead = [node for node in self.nodes.values() if node.killed_at is not None]
        return min(dead, key=lambda node: node.killed_at or 0.0).name if dead else None

    def stop(self) -> None:
        """Ask every agent for a clean stop (SIGTERM): workers save, all leave with 91."""
        for node in self.nodes.values():
            if node.paused:
                self.resume_node(node.name)
            if node.alive and node.process is not None:
                node.process.send_signal(signal.SIGTERM)

    def check_small_disk(self) -> None:
        """Check that the run directory's file system may be filled; else PermanentError."""
        if not self.run_dir.is_mount():
            raise PermanentError(f"{self.run_dir} is no file system of its own")
        status = os.statvfs(self.run_dir)
        if status.f_blocks * status.f_frsize > SMALL_DISK_BYTES:
            raise PermanentError(f"{self.run_dir} is larger than {SMALL_DISK_BYTES >> 30} GiB")

    def fill_disk(self, *, left_bytes: int) -> None:
        """Fill the run directory's file system but for `left_bytes`; `check_small_disk` first."""
        block = bytes(1 << 12)
        with self._filler.open("wb", buffering=0) as file:
            with contextlib.suppress(OSError):
                while file.write(block):
                    pass
            file.truncate(max(0, file.tell() - left_bytes))

    def free_disk(self) -> None:
        """Undo `fill_disk`."""
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.run_dir / ".filler"

    def kill_all(self) -> None:
        """Kill every node; nothing of this run is left afterwards."""
        for name, node in self.nodes.items():
            if node.process is not None and (node.alive or self.pids(name)):
                self.kill_node(name)
            self._tidy(name)

    def _tidy(self, name: str) -> None:
        """Remove what killed agents of `name` left in memory, as a power loss would."""
        for path in SCRATCH.glob(f"{glob.escape(f'holdfast-{self.run_id}-{name}-')}*"):
            try:
                lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                continue  # being made, or removed, by an agent
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # its owner lives: an agent of another job on the same run
            else:
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)

    def alive(self) -> list[str]:
        """Return the nodes whose agents run, paused ones included."""
        return [name for name, node in self.nodes.items() if node.alive]

    def codes(self) -> dict[str, int]:
        """Return exit codes of the agents that ended by themselves, by node."""
        return {
            name: node.process.returncode
            for name, node in self.nodes.items()
            if node.process is not None and not node.alive and node.killed_at is None
        }

    def wait(self, timeout_s: float) -> bool:
        """Wait until no agent runs; return False when `timeout_s` passed before."""
        deadline = time.monotonic() + timeout_s
        for node in self.nodes.values():
            if node.process is None:
                continue
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _marker(self, name: str) -> str:
        return f"{self.job_id}/{name}"

    def _environment(self, name: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": python_path(),
            "OMP_NUM_THREADS": "1",  # many nodes share few cores
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
            MARKER: self._marker(name),
            FAULTS: "emulated",
        }

    def _agent_command(self, node: LocalNode) -> list[str]:
        return [
            # -P: no module of the user's working directory shadows a library.
            *(sys.executable, "-P", "-u", "-m", "elastic_trainer.agent"),
            *("--run-dir", str(self.run_dir)),
            *("--node", node.name),
            *("--local-addr", node.address),
            *("--job", self.job_id),
            *("--attempt", str(self.attempt)),
        ]


def python_path() -> str:
    """Return this process's PYTHONPATH with the packages it runs from, such as a checkout's."""
    root, given = Path(__file__).resolve().parents[2], os.environ.get("PYTHONPATH", "")
    if root.name in ("site-packages", "dist-packages"):
        return given
    return os.pathsep.join(filter(None, (str(root), given)))


# -- Processes of one emulated node ---------------------------------------------------------------
# A node's processes have its marker in their first environment, or are in the agent's session, or
# descend from those: three nets, since a power loss must leave nothing.


MARKER = "HOLDFAST_EMULATED_NODE"
"""Environment variable that marks every process of an emulated node: `<job id>/<node>`."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PROC: Final = Path("/proc")


class Process(NamedTuple):
    """One row of the process table."""

    pid: int
    ppid: int
    session: int
    state: str
    """One letter as in proc(5); a zombie (Z) holds nothing any more."""


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s stat, from the state on; empty: the process is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command in parentheses may hold anything: fields start after the last one.
    return text[text.rindex(")") + 2 :].split()


def process_table() -> list[Process]:
    """Return every visible process."""
    pids = [int(path.name) for path in _PROC.iterdir() if path.name.isdigit()]
    return [
        Process(pid, int(fields[1]), int(fields[3]), fields[0])
        for pid in pids
        if (fields := _stat(pid))
    ]


def node_pids(marker: str, session: int) -> set[int]:
    """Return the live processes of the node with `marker`, whose agent leads `session`."""
    table = [row for row in process_table() if row.state not in ("Z", "X")]
    mine = {row.pid for row in table if row.session == session or _has_marker(row.pid, marker)}
    while True:
        grown = mine | {row.pid for row in table if row.ppid in mine}
        if grown == mine:
            return mine - {os.getpid()}
        mine = grown


def child_named(parent: int, name: str) -> int | None:
    """Return the child of process `parent` that calls itself `name`, if any.

    What a child forks may have the same name, but has another parent.
    """
    for row in process_table():
        if row.ppid != parent or row.state in ("Z", "X"):
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            if (_PROC / str(row.pid) / "comm").read_text(encoding="utf-8") == f"{name}\n":
                return row.pid
    return None


def _has_marker(pid: int, marker: str) -> bool:
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # ended meanwhile, or another user's
        return False
    return f"{MARKER}={marker}".encode() in environ.split(b"\0")


def catches(pid: int, number: int) -> bool:
    """Return whether process `pid` has a handler for signal `number`; else it might kill it."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8").splitlines()
    except OSError:  # ended meanwhile
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None: it is gone, or a zombie.

    Process ids alone are reused.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def signal_all(pids: set[int], number: int) -> None:
    """Send `number` to each that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def die_with_parent() -> Callable[[], None]:
    """Return a function for the child side of fork: SIGKILL when its parent dies.

    The library is looked up here, since little is safe between fork and exec.
    """
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it died before we were armed
            os._exit(1)

    return arm
