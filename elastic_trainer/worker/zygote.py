"""A warm process that forks workers: imports paid once, before anybody waits for them.

The only link between agent and trainer. It is forked from the agent, which has imported torch and
has no thread yet, so that a node imports torch once; one that replaces a dead one starts in its own
interpreter. It imports the trainer (or the module that the job runs), makes no accelerator call,
process group or thread, forks a worker for every request on its Unix socket, reaps it and reports.
Once an epoch's last worker has ended it kills whatever they have started and left behind, in
whatever session: the device's memory is free only then. Workers die with it. When the agent dies it
ends the workers and what they started, then itself.

A *standby* is a fork made ahead, while an epoch runs: it calls `warm_up()` of the module `target`,
if that has one, at a low priority, says so, and waits. The next request for its local rank is
handed to it; where it is not ready it is killed, and a worker is forked as without it.

What is *prepared* is a worker of an epoch that may come: it connects with its peers, builds its
model and waits, in a standby or a new fork, until that epoch starts, or until it is dropped. So is
one of an epoch that is formed while the last one's workers end: its start may come before it waits.

Messages are JSON objects, one a line. From the agent:

    {"op": "start", "epoch", "local_rank", "kind", "target", "args", "env", "log", "error_log",
     "cwd", "fresh", "count_steps", "cpus"}
    {"op": "standby", "local_rank", "kind", "target", "env", "cwd", "cpus"}
    {"op": "prepare", …}                as start; HOLDFAST_URGENT in "env": its epoch is formed
    {"op": "drop"}                      SIGKILL to what is prepared
    {"op": "kill"}                      SIGKILL to every worker and what it started

A start with "prepared": true is of a worker that waits; without one it ends as that did.

And back:

    {"event": "ready", "seconds", "tasks", "error"}
    {"event": "started", "epoch", "local_rank", "pid", "how", "why"}
    {"event": "exited", "epoch", "local_rank", "pid", "status"}
    {"event": "standby", "local_rank", "pid", "seconds", "private_mib"}    one is ready
    {"event": "prepared", "epoch", "local_rank"}                           a worker waits
    {"event": "unprepared", "epoch", "local_rank", "status"}               it has ended
    {"event": "cleared", "epoch"}       no worker is left, nor anything that one started

`kind` is `main` (call `main()` of the module `target`), `module` (as `python -m`), `script` (as
`python file`) or `command` (an executable). A command, `fresh` work, and everything when the
preloading failed or left threads behind, starts by exec: `how` is then `fresh` and `why` says why;
else it is `zygote` or `standby`. With `error_log` stderr has its own log. With `count_steps` the
optimizer's steps are the worker's progress, where torch was imported. `cpus` are those that the
worker and what it starts run on, as 0-3,8; null: all of the zygote's. `status` is an exit code, or
minus a signal's number.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from elastic_trainer.worker import fresh_process
from elastic_trainer.worker.fresh_process import HELD, frozen_path, leave_stops_to_the_agent
from elastic_trainer.worker.process import (
    adopt_orphans,
    children,
    give_threads_back,
    kill_children,
    no_threads,
    open_files,
    parse_cpus,
    prctl,
    thread_setters,
)
from elastic_trainer.worker.worker_answers import answer_when_asked

DEFAULT_PRELOAD = "elastic_trainer.train.main"
NAME = "holdfast-zygote"
WORKER_NAME = "holdfast-worker"
"""Names of the processes, as ps and top show them (15 characters at most)."""
EXIT_USER_ERROR = 93
_AHEAD_NICE = 10
"""What is done ahead gets a tenth of the workers' share of a CPU (the kernel's weights are 110 and
1024). With 19, weight 15, it is never done where CPUs are scarce."""

_READ_BY_IMPORTS = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_"),
    *("TORCH_LOGS", "TORCH_TRACE", "PYTORCH_JIT"),
)
"""How variables begin that torch and its libraries read while they are imported."""
_LEFT_OPEN = frozenset({"TORCHINDUCTOR_CACHE_DIR"})
"""Read later, or again."""

_HELD = b"{}\n"
"""What a prepared worker says that waits."""
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process `number` when process `parent` ends.

    Exits at once when `parent` is gone: the kernel's promise, which survives exec, holds only for a
    parent that was alive when it was asked for.
    """
    if prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


@dataclass(slots=True)
class _Standby:
    pid: int
    sock: socket.socket
    ready: bool = False
    epoch: int | None = None
    """That it is prepared for, and then `ready` says whether it waits for it."""
    how: str = "prepared"
    """Of what is prepared, what its start is reported as."""


class Zygote:
    """Serves one agent, process `parent`, over `sock` until that closes."""

    def __init__(self, sock: socket.socket, preload: str, *, parent: int) -> None:
        self._sock, self._parent = sock, parent
        self._preload = preload
        self._why_fresh: str | None = None
        self._workers: dict[int, tuple[int, int]] = {}
        """Process id -> epoch and local rank."""
        self._standbys: dict[int, _Standby] = {}
        self._prepared: dict[int, _Standby] = {}
        """Both by local rank."""
        self._unprepared: dict[int, int] = {}
        """Local rank -> how what was prepared for it has ended, a status."""
        self._own: set[int] = set()
        """Children that importing has started."""
        self._epoch: int | None = None
        """Of workers that may have left something behind."""
        self._unread = b""
        self._ours: dict[str, Any] = {}
        self._setters: list[Callable[[int], Any]] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def serve(self) -> None:
        """Preload, then answer requests until the agent closes its end."""
        adopt_orphans()  # what workers leave behind comes here to be killed, not to pid 1
        self._ours = fresh_process.settings()  # what differs later was set by what is imported
        self._warm_up()
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        while True:
            warming = {
                standby.sock.fileno(): (places, local_rank)
                for places in (self._standbys, self._prepared)
                for local_rank, standby in places.items()
                if not standby.ready
            }
            ready, _, _ = select.select([self._sock.fileno(), self._wake_read, *warming], [], [])
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            for fd in warming.keys() & set(ready):
                self._hear(*warming[fd])
            self._reap()
            if self._sock.fileno() in ready and not self._receive():
                self._kill()
                while left := children():
                    kill_children(left)
                    os.waitpid(-1, 0)  # each leaves its own children here
                return

    def _warm_up(self) -> None:
        begin = time.monotonic()
        gc.disable()  # what is imported stays: looking for garbage in it is a fifth of the time
        try:
            if self._preload:
                with no_threads():
                    importlib.import_module(self._preload)
        except BaseException as error:  # noqa: BLE001  a fresh worker will say it in its own log
            self._why_fresh = f"{self._preload}: {type(error).__name__}: {error}"
        # The kernel's count: threads of native libraries are not in threading.enumerate().
        tasks = len(list(Path("/proc/self/task").iterdir()))
        if tasks != 1:
            self._why_fresh = f"importing {self._preload} started {tasks - 1} threads: cannot fork"
        # Keeps the collector from touching, and so copying, the shared pages. Not collected
        # before: the holes would be filled, and so copied, by every worker (gc's manual).
        gc.freeze()
        gc.enable()
        self._setters = thread_setters()
        self._own = children()
        # Only from here on can it end others before itself; it must do so even if it was stopped.
        die_with_parent(self._parent, signal.SIGCONT)
        seconds = round(time.monotonic() - begin, 3)
        self._send(event="ready", seconds=seconds, tasks=tasks, error=self._why_fresh)

    def _receive(self) -> bool:
        """Serve what has arrived. Returns False when the agent closed its end."""
        try:
            chunk = self._sock.recv(1 << 16)
        except ConnectionResetError:
            return False
        if not chunk:
            return False
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["op"] == "start":
                self._start(request)
            elif request["op"] == "standby":
                self._stand_by(request)
            elif request["op"] == "prepare":
                self._prepare(request)
            elif request["op"] == "drop":
                self._drop_prepared()
            else:
                assert request["op"] == "kill", request
                self._kill()
        return True

    def _start(self, request: dict[str, Any]) -> None:
        epoch, local_rank = request["epoch"], request["local_rank"]
        why = self._why_fresh
        if request.get("prepared"):
            self._start_prepared(epoch, local_rank)
            return
        if request["kind"] == "command":
            why = "a command of its own"
        elif request["fresh"]:
            why = "asked for"
        if why is not None:
            how, pid = "fresh", self._fork(request, fresh=True)
        elif (standby := self._hand_over(request)) is not None:
            how, pid = "standby", standby
        else:
            how, pid = "zygote", self._fork(request, fresh=False)
        self._now_works(pid, epoch, local_rank, how=how, why=why)

    def _start_prepared(self, epoch: int, local_rank: int) -> None:
        """Have the worker that waits for an epoch run; where it is gone, say how it ended."""
        prepared = self._prepared.pop(local_rank, None)
        if prepared is not None and prepared.epoch == epoch:
            with contextlib.suppress(OSError), prepared.sock:  # it has died: it will be reaped
                prepared.sock.sendall(f"{time.monotonic()!r}\n".encode())
            self._now_works(prepared.pid, epoch, local_rank, how=prepared.how, why=None)
            return
        if prepared is not None:
            self._drop(prepared)
        status = self._unprepared.pop(local_rank, -int(signal.SIGKILL))
        self._send(event="exited", epoch=epoch, local_rank=local_rank, pid=0, status=status)

    def _now_works(
        self, pid: int, epoch: int, local_rank: int, *, how: str, why: str | None
    ) -> None:
        self._workers[pid] = epoch, local_rank
        self._epoch = epoch
        self._send(event="started", epoch=epoch, local_rank=local_rank, pid=pid, how=how, why=why)

    def _fork(
        self, request: dict[str, Any], *, fresh: bool, link: socket.socket | None = None
    ) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, parent=parent, fresh=fresh, link=link)
        return pid

    def _become_worker(
        self,
        request: dict[str, Any],
        *,
        parent: int,
        fresh: bool,
        link: socket.socket | None,
    ) -> NoReturn:
        """Turn this forked child into the worker of `request`.

        With `link` to the zygote it waits: as a standby, whose work comes later, or once it is
        prepared.
        """
        code, born_mono, how = 1, time.monotonic(), "fresh" if fresh else "forked"
        hold: Callable[[], float] | None = None
        try:
            die_with_parent(parent)
            os.setsid()  # a group of its own, to be killed as one; and no terminal's Ctrl-C
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            others = (*self._standbys.values(), *self._prepared.values())
            links = (other.sock.fileno() for other in others)
            for fd in (self._sock.fileno(), self._wake_read, self._wake_write, *links):
                os.close(fd)
            if link is not None:
                request, how, hold = _linked(request, link)
                born_mono = time.monotonic()
            prctl(_PR_SET_NAME, WORKER_NAME.encode(), 0, 0, 0)  # until it executes another program
            _redirect(request, how=how)
            _bind(request["cpus"])
            os.chdir(request["cwd"])
            os.environ.update(request["env"], HOLDFAST_BORN=repr(born_mono))
            is_main = request["kind"] == "main"
            if is_main:
                leave_stops_to_the_agent()
            fresh_process.undo(self._ours)
            if is_main:
                open_files()  # large jobs have many sockets
            if fresh:
                _exec(request)
            faulthandler.enable()
            answer_when_asked(Path(os.environ["HOLDFAST_HEARTBEAT"]))
            if not is_main:
                give_threads_back(self._setters)
            code = _run(request, called=self._preload, hold=hold)
        except SystemExit as error:
            code = fresh_process.exit_code(error.code)
        except BaseException as error:  # noqa: BLE001  the last frame: what is not written here is lost
            traceback.print_exc()
            _write_error_file(error)
            user_error = fresh and isinstance(error, FileNotFoundError | PermissionError)
            code = EXIT_USER_ERROR if user_error else 1
        finally:
            fresh_process.flush()
            if code < 0:
                fresh_process.die_of(-code)
            os._exit(code & 0xFF)

    def _stand_by(self, request: dict[str, Any]) -> None:
        """Fork a standby, unless workers are started fresh or there is one."""
        local_rank = request["local_rank"]
        if self._why_fresh is None and local_rank not in self._standbys:
            self._fork_linked(self._standbys, request)

    def _prepare(self, request: dict[str, Any]) -> None:
        """Have a standby, or a new fork, begin the work of an epoch that may come."""
        local_rank = request["local_rank"]
        if (older := self._prepared.pop(local_rank, None)) is not None:
            self._drop(older)
        self._unprepared.pop(local_rank, None)
        if (standby := self._standbys.pop(local_rank, None)) is not None:
            standby.ready, standby.epoch = False, request["epoch"]
            standby.how = "standby" if "HOLDFAST_URGENT" in request["env"] else "prepared"
            self._prepared[local_rank] = standby
            with contextlib.suppress(OSError):  # it has died: it will be reaped
                standby.sock.sendall(json.dumps(request).encode() + b"\n")
        elif self._why_fresh is None:
            self._fork_linked(self._prepared, request)
        else:
            self._send(event="unprepared", epoch=request["epoch"], local_rank=local_rank, status=1)

    def _fork_linked(self, places: dict[int, _Standby], request: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        standby = _Standby(0, ours, epoch=request.get("epoch"))
        places[request["local_rank"]] = standby  # the child closes our end
        with theirs:
            standby.pid = self._fork(request, fresh=False, link=theirs)

    def _hear(self, places: dict[int, _Standby], local_rank: int) -> None:
        """Pass on that a standby is warm, or that what is prepared waits."""
        standby = places[local_rank]
        said = standby.sock.recv(1 << 12)
        if not said:  # it is dead, and reaped elsewhere
            standby.ready = True
        for line in said.splitlines():
            news = json.loads(line)
            standby.ready = standby.epoch is None or not news
            if news:
                self._send(event="standby", local_rank=local_rank, pid=standby.pid, **news)
            else:
                self._send(event="prepared", epoch=standby.epoch, local_rank=local_rank)

    def _hand_over(self, request: dict[str, Any]) -> int | None:
        """Have the standby of a local rank do what is requested; None: none is ready."""
        local_rank = request["local_rank"]
        standby = self._standbys.get(local_rank)
        if standby is None:
            return None
        if standby.ready:
            with contextlib.suppress(OSError):  # it has died
                standby.sock.sendall(json.dumps(request).encode() + b"\n")
                del self._standbys[local_rank]
                standby.sock.close()
                return standby.pid
        self._drop(self._standbys.pop(local_rank))
        return None

    def _drop_prepared(self) -> None:
        while self._prepared:
            self._drop(self._prepared.popitem()[1])

    def _drop(self, standby: _Standby) -> None:
        standby.sock.close()
        _kill_with_group(standby.pid)

    def _kill(self) -> None:
        for pid in self._workers:
            _kill_with_group(pid)

    def _reap(self) -> None:
        # Its pid is reaped, and free for others, only once its group is gone too.
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):  # none is left
            while (ended := os.waitid(os.P_ALL, 0, look)) is not None:
                self._bury(ended.si_pid)
        if self._epoch is not None and not self._workers:
            self._clear(self._epoch)

    def _bury(self, pid: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is not None:
            _kill_with_group(pid)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._own.discard(pid)
        for places in (self._standbys, self._prepared):
            for local_rank, standby in list(places.items()):
                if standby.pid == pid:
                    places.pop(local_rank).sock.close()
                    self._lost(standby, local_rank, status)
        if worker is not None:  # the others are what workers left behind
            epoch, local_rank = worker
            self._send(event="exited", epoch=epoch, local_rank=local_rank, pid=pid, status=status)

    def _lost(self, standby: _Standby, local_rank: int, status: int) -> None:
        """Say that what was prepared has ended; of a standby nobody needs to know."""
        if (epoch := standby.epoch) is not None:
            self._unprepared[local_rank] = status
            self._send(event="unprepared", epoch=epoch, local_rank=local_rank, status=status)

    def _clear(self, epoch: int) -> None:
        """Kill what the workers left behind; the death of each brings its own children here."""
        waiting = (*self._standbys.values(), *self._prepared.values())
        left = children() - self._own - {standby.pid for standby in waiting}
        kill_children(left)
        if not left:
            self._epoch = None
            self._send(event="cleared", epoch=epoch)

    def _send(self, **message: Any) -> None:
        # A closed socket shows as end of file on the reading side.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")


def _kill_with_group(pid: int) -> None:
    """SIGKILL the process group of worker `pid`, and the worker should it lead none yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


def _linked(
    request: dict[str, Any], link: socket.socket
) -> tuple[dict[str, Any], str, Callable[[], float] | None]:
    """Return the work of a process that has a link, how it came to it, and where it waits."""
    how = "prepared"
    if request["op"] == "standby":
        request, how = _wait_warm(request, link), "standby"
    if request["op"] == "prepare":
        return request, how, partial(_wait_prepared, link)
    link.close()
    return request, how, None


def _wait_warm(request: dict[str, Any], link: socket.socket) -> dict[str, Any]:
    """Rehearse, say so, and wait for the request of an epoch."""
    begun = time.monotonic()
    if request["cpus"] is not None:  # threads that the warm-up leaves keep to them too
        with contextlib.suppress(OSError):  # said when the worker begins
            os.sched_setaffinity(0, parse_cpus(request["cpus"]))
    os.chdir(request["cwd"])
    sys.path[:] = frozen_path(sys.path, os.environ)
    warm_up = getattr(sys.modules.get(request["target"]), "warm_up", None)
    if request["kind"] == "main" and warm_up is not None:
        # In a thread: the priority is one of threads, and only root may raise it again. And what
        # torch keeps for each thread (meshes, how DTensors are dispatched) is not the worker's.
        with ThreadPoolExecutor(1, initializer=os.nice, initargs=(_AHEAD_NICE,)) as aside:
            aside.submit(warm_up, {**os.environ, **request["env"]}).result()
    ready = {"seconds": round(time.monotonic() - begun, 3), "private_mib": _private_mib()}
    link.sendall(json.dumps(ready).encode() + b"\n")
    return dict(json.loads(_next_line(link)))


def _wait_prepared(link: socket.socket) -> float:
    """Say that this worker is prepared, wait for its epoch, return when that began (monotonic)."""
    with link:
        with contextlib.suppress(BrokenPipeError):  # it has begun already
            link.sendall(_HELD)
        return float(_next_line(link))


def _next_line(link: socket.socket) -> bytes:
    """Return the zygote's next line, and read no more; ends this process where it has no use."""
    line = b""
    while not line.endswith(b"\n"):
        seen = link.recv(1 << 16, socket.MSG_PEEK)
        if not seen:
            os._exit(0)
        line += link.recv(seen.find(b"\n") + 1 or len(seen))
    return line


def _private_mib() -> float | None:
    """Return the MiB of memory that only this process has; None: the kernel does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return round(sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024)


def _read_nothing() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _redirect(request: dict[str, Any], *, how: str) -> None:
    """Point the standard streams at the worker's log, appending; input is empty."""
    _read_nothing()
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for fd, path in ((1, request["log"]), (2, request.get("error_log") or request["log"])):
        try:
            log = os.open(path, flags, 0o666)  # the umask decides
        except OSError as error:
            # A full or lost disk must not stop training: the agent's own output has to do.
            sys.stderr.write(f"worker {os.getpid()}: no log: {error}\n")
            return
        os.dup2(log, fd)
        os.close(log)
    for stream in (sys.stdout, sys.stderr):
        if not stream.write_through:  # type: ignore[union-attr]  # without -u
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    env = request["env"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    sys.stderr.write(
        f"--- {now} epoch {request['epoch']} rank {env.get('RANK')} "
        f"local_rank {request['local_rank']} pid {os.getpid()} {how} ---\n"
    )


def _bind(cpus: str | None) -> None:
    """Run on these CPUs only, and say so in the worker's log."""
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, parse_cpus(cpus))
        sys.stderr.write(f"--- on CPUs {cpus}, which are near the GPU ---\n")
    except OSError as error:
        # Slower at worst: others may have taken CPUs away from the job.
        sys.stderr.write(f"cannot run on CPUs {cpus}: {error}\n")


def _exec(request: dict[str, Any]) -> NoReturn:
    for number in fresh_process.IGNORED_BY_PYTHON:
        signal.signal(number, signal.SIG_DFL)
    target, args = request["target"], request["args"]
    safe = ["-P"] if sys.flags.safe_path else []
    argv = {
        "command": [target, *args],
        "script": [sys.executable, "-u", target, *args],
        "module": [sys.executable, "-u", "-m", target, *args],
        "main": [sys.executable, *safe, "-u", "-m", target, *args],
    }[request["kind"]]
    sys.stderr.flush()
    os.execvpe(argv[0], argv, os.environ)  # noqa: S606  an argument list of the job's own


def _run(request: dict[str, Any], *, called: str, hold: Callable[[], float] | None = None) -> int:
    """Do the work; a `main` that is prepared calls `hold` where it can do no more ahead."""
    target = request["target"]
    sys.path[:] = frozen_path(sys.path, os.environ)
    if request["kind"] == "main":
        sys.argv = [target, *request["args"]]
        if target != called:
            importlib.import_module(target)
        main = sys.modules[target].main
        return fresh_process.exit_code(main() if hold is None else main(hold))
    if request.get("count_steps") and "torch" in sys.modules:
        from elastic_trainer.worker.progress import step_counter

        if (counter := step_counter()) is not None:
            counter.count_optimizer_steps()
    if "torch.distributed" in sys.modules:
        from elastic_trainer.worker.torch_private import keep_process_groups, use_one_thread

        keep_process_groups()
        use_one_thread()
    fresh_process.draw_apart()
    tell = _late_variables_teller() if "torch" in sys.modules else None
    kind, args = request["kind"], request["args"]
    try:
        return fresh_process.run_as_main(kind, target, args, failed=_write_error_file)
    finally:
        if tell is not None:
            tell()


def _late_variables_teller() -> Callable[..., None]:
    """Return what says, once, which variables the script has set too late for torch to read.

    An optimizer's first step calls it too: by then they are set, and training is long.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    given, told = dict(os.environ), list[str]()

    def tell(*_: Any) -> None:
        hook.remove()
        late = [
            name
            for name, value in os.environ.items()
            if name.startswith(_READ_BY_IMPORTS) and name not in _LEFT_OPEN
            if given.get(name) != value and name not in told
        ]
        told.extend(late)
        if late:
            fresh_process.say(
                f"holdfast: {', '.join(sorted(late))}: set by the script without effect, since "
                "torch was imported before; set it outside the script, or use --fresh\n"
            )

    hook = register_optimizer_step_post_hook(tell)
    return tell


def _write_error_file(error: BaseException) -> None:
    """Write torchelastic's error file, unless the worker did so itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists():
        return
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as problem:
        with contextlib.suppress(Exception):  # a script may have closed it
            sys.stderr.write(f"cannot write {path}: {problem}\n")


def become_zygote(
    sock: socket.socket, *, parent: int, preload: str, env: Mapping[str, str], cwd: str
) -> NoReturn:
    """Turn this child, forked from the agent (process `parent`), into its zygote.

    `env`, for this process and its workers, replaces the agent's; an empty `preload` imports
    nothing.
    """
    code = 1
    try:
        os.setsid()  # a terminal's Ctrl-C is for the agent
        _read_nothing()
        os.environ.clear()
        os.environ.update(env)
        threads, torch = env.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
        if torch is not None and threads.isdigit():  # it reads the variable as it is loaded
            torch.set_num_threads(int(threads))
        _serve(sock, parent=parent, preload=preload, cwd=cwd)
        code = 0
    except BaseException:  # noqa: BLE001  the last frame: what is not written here is lost
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(sock: socket.socket, *, parent: int, preload: str, cwd: str) -> None:
    die_with_parent(parent)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208  whole before the first is closed
        # What the agent was started with: a pipe that a worker holds open has no end.
        if int(name) not in (0, 1, 2, sock.fileno()):
            with contextlib.suppress(OSError):  # of the listing itself
                os.close(int(name))
    prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)  # sent to a whole step: the agent decides
    os.chdir(cwd)
    if not sys.flags.safe_path:
        del sys.path[0]  # of the agent; a script has its own folder there
    Zygote(sock, preload, parent=parent).serve()


def main() -> None:
    """Serve the agent that started this process: `FD AGENT_PID PRELOAD CWD STARTED`."""
    fd, parent, preload, cwd, started = sys.argv[1:]
    fresh_process.take_over(started)
    os.set_inheritable(int(fd), False)
    with socket.socket(fileno=int(fd)) as sock:
        _serve(sock, parent=int(parent), preload=preload, cwd=cwd)


if __name__ == "__main__":
    main()
