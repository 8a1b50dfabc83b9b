"""Clients that take turns at each system call or request, and what fails them.

All in one process, in threads of which one runs at a time: what comes next is drawn, so a history
can be played again.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from config_map_server import ConfigMaps

from elastic_trainer.board.kubernetes_board import ApiReply, KubernetesBoard, NotSentError

WAIT_S = 60.0
CALLS = ("open", "write", "fsync", "link", "unlink", "mkdir", "rename", "listdir", "scandir")
RUNS = (1, 1, 2, 3, 8, 40)
"""A client's calls in a row."""


class Crash(BaseException):
    """The client ends here; what it would still do on its way out is not done."""


class Client:
    """A thread; `faults` maps the number of its call to what happens there."""

    def __init__(
        self,
        turns: Turns,
        act: Callable[[Client], None],
        *,
        faults: Mapping[int, str],
        skew_s: float = 0.0,
    ) -> None:
        self.faults, self.skew_s = faults, skew_s
        self.is_dead = self.is_lost = self.is_over = False
        self.calls = self.left = 0
        self.listed: list[str] = []
        self.go = threading.Semaphore(0)
        self._turns, self._act = turns, act
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self._turns.here.client = self
        assert self.go.acquire(timeout=WAIT_S)
        try:
            self._act(self)
        except Crash:
            pass
        except BaseException as error:  # noqa: BLE001  raised by Turns.run
            self._turns.error = error
        self.is_over = True
        self._turns.back.release()

    def pause(self) -> None:
        """Let others take a turn."""
        if self.is_dead:
            raise Crash
        self.left -= 1
        if self.left > 0:
            return
        self._turns.back.release()
        assert self.go.acquire(timeout=WAIT_S)
        if self.is_dead:
            raise Crash

    def fault(self) -> str:
        """Return what happens at this call; a crash happens here."""
        self.calls += 1
        kind = self.faults.get(self.calls, "")
        if kind == "crash":
            self.crash()
        return kind

    def crash(self) -> None:
        self.is_dead = True
        raise Crash


class Turns:
    """Runs clients; `rng` says who is next."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.here, self.back = rng, threading.local(), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.mono = 0.0

    @property
    def client(self) -> Client | None:
        """That of the thread that asks; None: it is no client's."""
        return getattr(self.here, "client", None)

    def run(self, clients: list[Client], between: Callable[[int], bool] = lambda _: True) -> None:
        """Run all to their ends; or until `between`, asked before each turn, says no: all crash."""
        turn = 0
        while alive := [each for each in clients if not each.is_over]:
            turn += 1
            if not between(turn):
                for each in alive:
                    each.is_dead = each.is_lost = True
            each = self.rng.choice(alive)
            each.left = self.rng.choice(RUNS)
            each.go.release()
            assert self.back.acquire(timeout=WAIT_S)
        if self.error is not None:
            raise self.error

    def sleep(self, seconds: float) -> None:
        self.mono += seconds
        assert self.client is not None
        self.client.left = 0
        self.client.pause()


class Disk:
    """The system calls of clients, below `folder`.

    `lies`: an fsync of a file's content does nothing. `may_be_old` says of a listing that a client
    had before, and of what is there now, whether it may have the former again, as NFS keeps it.
    """

    def __init__(
        self,
        turns: Turns,
        folder: Path,
        *,
        lies: bool = False,
        may_be_old: Callable[[list[str], list[str]], bool] = lambda *_: False,
    ) -> None:
        self._turns, self._folder, self._lies = turns, folder, lies
        self._may_be_old = may_be_old
        self._real = {name: getattr(os, name) for name in CALLS}
        self._names: list[tuple[str, bytes | None]] = []
        """Not yet on the disk: names that were made (None), or removed, and what they held."""
        self._dirty: dict[int, None] = {}
        """Inodes whose content is not yet on the disk, in the order of their writes."""

    @contextmanager
    def mounted(self) -> Iterator[None]:
        hooks = {name: partial(self.call, name) for name in CALLS}
        with mock.patch.multiple(os, **hooks):
            yield

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        client, real = self._turns.client, self._real[name]
        if client is None:
            return real(*args, **kwargs)
        client.pause()
        kind = client.fault()
        if kind == "error":
            raise OSError(errno.EIO, "drawn")
        if name == "write" and kind in {"torn", "short"}:
            written = real(args[0], args[1][: len(args[1]) // 2])
            self._dirty[os.fstat(args[0]).st_ino] = None
            return client.crash() if kind == "torn" else written
        held = self._held(args[0]) if name == "unlink" else None
        result = real(*args, **kwargs)
        if name == "listdir":
            old = self._may_be_old(client.listed, result) and self._turns.rng.random() < 0.5
            result = client.listed = client.listed if old else result
        self._note(name, args, held, client)
        if kind in {"lost", "exists"} and name in {"link", "rename", "unlink", "fsync"}:
            code = errno.EEXIST if kind == "exists" and name == "link" else errno.EIO
            raise OSError(code, "its reply is lost")
        return result

    @staticmethod
    def _held(path: Any) -> bytes | None:
        try:
            return Path(path).read_bytes()
        except OSError:
            return None

    def _note(self, name: str, args: tuple[Any, ...], held: bytes | None, client: Client) -> None:
        if name == "open" and args[1] & os.O_CREAT:
            self._names.append((str(args[0]), None))
        elif name in {"link", "rename"}:
            self._names.append((str(args[1]), None))
        elif name == "unlink":
            self._names.append((str(args[0]), held))
        elif name == "write":
            self._dirty[os.fstat(args[0]).st_ino] = None
            at = time.time() + client.skew_s
            os.utime(args[0], (at, at))
        elif name == "fsync":
            where = Path(f"/proc/self/fd/{args[0]}").resolve()
            if where.is_dir():
                self._names = [each for each in self._names if Path(each[0]).parent != where]
            elif not self._lies:
                self._dirty.pop(os.fstat(args[0]).st_ino, None)

    def lose_power(self) -> None:
        """Undo any of what is not yet on the disk."""
        rng = self._turns.rng
        for name, held in reversed(self._names):
            if rng.random() < 0.5:
                continue
            if held is None:
                Path(name).unlink(missing_ok=True)
            elif not Path(name).exists():
                Path(name).write_bytes(held)
        paths = {path.stat().st_ino: path for path in self._folder.rglob("*") if path.is_file()}
        for path in (paths[inode] for inode in self._dirty if inode in paths):
            os.truncate(path, rng.randint(0, path.stat().st_size))
        self._names.clear()
        self._dirty.clear()


class FailingApi:
    """An API server with ConfigMaps, as clients see it that lose its answers.

    A request whose answer is lost may be carried out later. What is read is the newest, but for
    requests that say that any will do.
    """

    FAULTS = (
        "crash",
        "crash after",
        "unsent",
        "before",
        "after",
        "late",
        "429",
        "500",
        "504 after",
    )

    def __init__(self, turns: Turns) -> None:
        self._turns, self._store = turns, ConfigMaps()
        self._late: list[tuple[str, str, Any]] = []
        self._olds: list[dict[str, Any]] = []
        self._numbers = map(str, itertools.count())

    def board(self, name: str) -> KubernetesBoard:
        number, sleep = self._numbers.__next__, self._turns.sleep
        return KubernetesBoard(self, "train", name, number=number, sleep=sleep)

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> ApiReply:
        client = self._turns.client
        assert client is not None
        client.pause()
        kind = client.fault()
        if kind == "unsent":
            raise NotSentError
        if kind in {"429", "500"}:
            return ApiReply(int(kind), {}, 1.0)
        if kind in {"before", "late"}:
            if kind == "late" and method != "GET":
                self._late.append((method, path, _copy(body)))
            raise TimeoutError
        path, _, query = path.partition("?")
        status, found = self._store.carry_out(method, path, _copy(body))
        if status < 300:
            self._olds.append(found)
        if "resourceVersion=0" in query and self._olds:
            found = self._turns.rng.choice(self._olds)
        reply = ApiReply(status, _copy(found))
        if kind == "crash after":
            client.crash()
        client.pause()
        if kind == "after":
            raise TimeoutError
        return ApiReply(504, {}) if kind == "504 after" else reply

    def carry_out_late(self, _: int) -> bool:
        if self._late and self._turns.rng.random() < 0.3:
            self._store.carry_out(*self._late.pop(self._turns.rng.randrange(len(self._late))))
        return True


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))
