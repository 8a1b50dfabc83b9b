"""The agent's end of the zygote: starts the process, speaks to it, buries it.

Knows processes and messages, nothing of epochs' meaning; see `elastic_trainer/worker/zygote.py`
for the messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from elastic_trainer.worker.fresh_process import HELD, handed_on
from elastic_trainer.worker.process import adopt_orphans, children, kill_children
from elastic_trainer.worker.zygote import become_zygote

SEND_TIMEOUT_S = 10.0
"""A zygote that takes no message for this long is broken."""


class ZygoteDiedError(Exception):
    """The zygote is gone, and its workers with it; `str` says how it ended."""


class ZygoteClient:
    """One zygote process, a child of this one."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        sock.settimeout(SEND_TIMEOUT_S)
        self._sock, self.pid = sock, pid
        self._own = children() - {pid}
        self._ended: int | None = None
        """As subprocess.Popen.returncode."""
        self._unread = b""

    @classmethod
    def forked(cls, *, preload: str, env: Mapping[str, str], cwd: str) -> ZygoteClient:
        """Fork a zygote that has what this process has imported; no thread may run yet."""
        _assert_main_thread()
        adopt_orphans()
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            become_zygote(theirs, parent=parent, preload=preload, env=env, cwd=cwd)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def spawned(cls, *, preload: str, env: Mapping[str, str], cwd: str) -> ZygoteClient:
        """Start a zygote in a new interpreter: this process may have threads."""
        _assert_main_thread()
        adopt_orphans()
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.set_inheritable(True)
            # -P passes on: no module of the working directory shadows a library.
            safe = ["-P"] if sys.flags.safe_path else []
            command = [sys.executable, *safe, "-u", "-m", "elastic_trainer.worker.zygote"]
            ends = [str(theirs.fileno()), str(os.getpid())]
            pid = os.posix_spawn(
                sys.executable,
                [*command, *ends, preload, cwd, handed_on()],
                env,
                file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
                setsigmask=HELD,
                setsid=True,  # a terminal's Ctrl-C is for the agent
            )
        return cls(ours, pid)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `receive` has news."""
        return self._sock.fileno()

    def send(self, **message: Any) -> None:
        """Send one message.

        Raises:
            ZygoteDiedError: it is gone, or takes no more messages (it is killed then).
        """
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise ZygoteDiedError(self._bury(str(error) or type(error).__name__)) from error

    def receive(self, timeout_s: float = 0.0) -> list[dict[str, Any]]:
        """Return the messages that have arrived, waiting up to `timeout_s` for the first.

        Raises:
            ZygoteDiedError: it is gone. Messages sent before were returned earlier.
        """
        if self._sock.fileno() < 0:  # `send` has found it out
            raise ZygoteDiedError(self._bury("closed its socket"))
        if not select.select([self._sock], [], [], max(0.0, timeout_s))[0]:
            return []
        try:
            chunk = self._sock.recv(1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise ZygoteDiedError(self._bury("closed its socket"))
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self, timeout_s: float) -> list[int]:
        """Kill the zygote, its workers and what they started. May be called twice.

        Returns:
            The ids of processes that have not ended within `timeout_s`.
        """
        self._bury("closed")
        deadline = time.monotonic() + timeout_s
        while left := self._orphans():
            kill_children(left)
            for pid in left:
                os.waitpid(pid, os.WNOHANG)
            if time.monotonic() >= deadline:
                return sorted(left)
            time.sleep(0.002)
        return []

    def _orphans(self) -> set[int]:
        """Return what has become this process's child since the zygote, and was not started by it.

        The zygote and all below it have left this process's session.
        """
        mine, found = os.getsid(0), set()
        for pid in children() - self._own:
            with contextlib.suppress(ProcessLookupError):  # another thread's, and reaped meanwhile
                if os.getsid(pid) != mine:
                    found.add(pid)
        return found

    def _bury(self, why: str) -> str:
        """Make sure that the process is gone and return how it ended."""
        self._sock.close()
        # It may be on its way out by itself, with a status worth telling.
        ended = self._wait(0.2 if why != "closed" else 0.0)
        if ended is None:
            os.kill(self.pid, signal.SIGKILL)
            if self._wait(5.0) is None:
                return f"{why}; process {self.pid} cannot be killed"
            return why
        return f"signal {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"

    def _wait(self, timeout_s: float) -> int | None:
        """Reap the process; None: it has not ended within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while self._ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ended = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.002)
        return self._ended


def _assert_main_thread() -> None:
    # The kernel ties a child's fate to the *thread* that started it.
    assert threading.current_thread() is threading.main_thread(), "start from the main thread"
