"""The agent's end of the zygote: starts the process, speaks to it, buries it.

Knows processes and messages, nothing of epochs' meaning; see `elastic_trainer/zygote.py`
for the messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

SEND_TIMEOUT_S = 10.0
"""A zygote that takes no message for this long is broken."""


class ZygoteDiedError(Exception):
    """The zygote is gone, and its workers with it; `str` says how it ended."""


class ZygoteClient:
    """One zygote process. Start it from the main thread, and before anything slow."""

    def __init__(self, *, preload: str, env: Mapping[str, str], cwd: str) -> None:
        # The kernel ties a child's fate to the *thread* that started it.
        assert threading.current_thread() is threading.main_thread(), "start from the main thread"
        ours, theirs = socket.socketpair()
        with theirs:
            # -P passes on: no module of the working directory shadows a library.
            command = [sys.executable, *(["-P"] if sys.flags.safe_path else []), "-u"]
            command += ["-m", "elastic_trainer.zygote"]
            command += ["--fd", str(theirs.fileno()), "--parent", str(os.getpid())]
            self._process = subprocess.Popen(
                [*command, "--preload", preload],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for the agent
            )
        ours.settimeout(SEND_TIMEOUT_S)
        self._sock = ours
        self._unread = b""

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

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

    def close(self) -> None:
        """Kill the zygote, and thereby its workers. Never raises, may be called twice."""
        self._bury("closed")

    def _bury(self, why: str) -> str:
        """Make sure that the process is gone and return how it ended."""
        self._sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            # It may be on its way out by itself, with a status worth telling.
            self._process.wait(0.2 if why != "closed" else 0.0)
        ended = self._process.returncode
        self._process.kill()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            return f"{why}; process {self.pid} cannot be killed"
        if ended is None:
            return why
        return f"signal {signal.Signals(-ended).name}" if ended < 0 else f"exit code {ended}"
