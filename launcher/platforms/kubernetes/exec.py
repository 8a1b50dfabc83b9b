"""Runs commands in a pod, over a WebSocket: with bytes to stdin, or with the user's terminal.

The protocol (v4.channel.k8s.io) cannot close stdin, so its content says its length. The official
client opens the connection; its WSClient would keep all output in memory, so frames are read here.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import select
import shutil
import signal
import ssl
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final

from launcher.platforms.commands import CommandResult
from launcher.platforms.kubernetes.api import KubernetesApi
from launcher.platforms.kubernetes.documents import Resource
from launcher.platforms.kubernetes.errors import BrokenOffError, Call, refusal
from launcher.spec.errors import PermanentError

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = range(5)
_CHUNK_BYTES: Final = 4 * 1024
"""Sent at once. A ready socket has a third of its buffer free, 16 KiB by default (tcp(7),
tcp_wmem), so this does not block while the command waits for its output to be read."""
_MOST_STDERR: Final = 64 * 1024
_EXEC: Final = Resource("v1", "pods/exec")


class ExecFailedError(PermanentError):
    """A command in a pod did not start, did not end in time, or its connection broke off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodExec:
    """Commands in pods, beside their agents."""

    api: KubernetesApi
    namespace: str
    container: str

    def run(
        self,
        pod: str,
        argv: Sequence[str],
        *,
        stdin: IO[bytes] | None = None,
        out: IO[bytes] | None = None,
        timeout_s: float,
    ) -> CommandResult:
        """Run a command in a pod to its end.

        `stdin` is an open file, read to a length that the command knows; `out` takes stdout as it
        comes, None: it is in the answer. `timeout_s` counts once the connection is open.

        Raises:
            UserError: HF753 a right is missing; HF755 the namespace is.
            NotThereError: the pod does not exist.
            UnreachableError, BrokenOffError: nobody answers.
            ExecFailedError: it did not start, or did not end in time.
        """
        kept, err, status = io.BytesIO(), b"", b""
        source = None if stdin is None else stdin.fileno()
        with self._connected(pod, argv, stdin=stdin is not None) as socket:
            socket.settimeout(timeout_s)  # for a frame of which a part has come
            for channel, data in _frames(socket, pod, source, timeout_s):
                if channel == _STDOUT:
                    (out or kept).write(data)
                elif channel == _STDERR:
                    err = (err + data)[-_MOST_STDERR:]
                elif channel == _ERROR:
                    status += data
        return CommandResult(
            argv=tuple(argv),
            code=exit_code(status, pod, _text(err)),
            out=_text(kept.getvalue()),
            err=_text(err),
        )

    def terminal(self, pod: str, argv: Sequence[str]) -> int:
        """Run a command with this process's terminal, or its pipes; return its exit code.

        Raises:
            UserError, PlatformError: as `run`.
        """
        is_tty, status = sys.stdin.isatty() and sys.stdout.isatty(), b""
        streams = {_STDOUT: sys.stdout.buffer, _STDERR: sys.stderr.buffer}
        with (
            self._connected(pod, argv, stdin=True, is_tty=is_tty) as socket,
            _raw_terminal(socket) if is_tty else contextlib.nullcontext(),
        ):
            for channel, data in _frames(socket, pod, sys.stdin.fileno(), math.inf):
                if channel == _ERROR:
                    status += data
                elif channel in streams:
                    streams[channel].write(data)
                    streams[channel].flush()
        return exit_code(status, pod)

    @contextlib.contextmanager
    def _connected(
        self, pod: str, argv: Sequence[str], *, stdin: bool, is_tty: bool = False
    ) -> Iterator[Any]:
        """Start a command; yield the WebSocket. Once that is closed the command may continue."""
        from kubernetes.client import ApiClient, ApiException, CoreV1Api
        from kubernetes.stream import stream
        from websocket import WebSocketBadStatusException

        where, server = self.namespace, self.api.server
        call = Call(verb="create", resource=_EXEC, namespace=where, name=pod, server=server)
        # A new one: stream() swaps methods of it.
        core = CoreV1Api(ApiClient(self.api.client.configuration))
        try:
            socket = stream(
                core.connect_get_namespaced_pod_exec,
                pod,
                where,
                container=self.container,
                command=list(argv),
                stdin=stdin,
                stdout=True,
                stderr=not is_tty,
                tty=is_tty,
                _preload_content=False,
                binary=True,
            ).sock
        except ApiException as error:  # of status 0, whatever has happened: that is its context
            cause = error.__context__
            if isinstance(cause, WebSocketBadStatusException):
                body, headers = cause.resp_body or b"", dict(cause.resp_headers or {})
                text = _text(body) if isinstance(body, bytes) else str(body)
                raise refusal(call, int(cause.status_code), text, headers) from error
            if isinstance(cause, KeyboardInterrupt | SystemExit):
                raise cause from None
            raise BrokenOffError(
                f"pod {pod} cannot be reached through {server}: {error.reason}"
            ) from error
        try:
            yield socket
        finally:
            with contextlib.suppress(OSError, ValueError):
                socket.close(timeout=1)
                socket.shutdown()  # close() leaves open what the other end has closed


def exit_code(status: bytes, pod: str, said: str = "") -> int:
    """Return the exit code in the API's last word about a command. Pure.

    Raises:
        ExecFailedError: the command did not run, or nothing was said.
    """
    try:
        found = json.loads(status)
        if found["status"] == "Success":
            return 0
        causes = (found.get("details") or {}).get("causes") or ()
        for cause in causes:
            if cause.get("reason") == "ExitCode":
                return int(cause["message"])
        message = str(found.get("message") or found)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        message = _text(status) or said or "nothing was said"
    raise ExecFailedError(f"the command in pod {pod} did not run: {' '.join(message.split())}")


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")


def _frames(
    socket: Any, pod: str, stdin: int | None, timeout_s: float
) -> Iterator[tuple[int, bytes]]:
    """Yield channel and bytes of the output until the command ends; send it `stdin`."""
    from websocket import ABNF, WebSocketConnectionClosedException, WebSocketException

    end = time.monotonic() + timeout_s
    try:
        while (left_s := end - time.monotonic()) > 0.0:
            # TLS reads ahead, which select() does not see.
            ahead = isinstance(socket.sock, ssl.SSLSocket) and socket.sock.pending() > 0
            sources = [socket] if stdin is None else [socket, stdin]
            ready = select.select(sources, (), (), 0.0 if ahead else min(left_s, 60.0))[0]
            if stdin is not None and stdin in ready:
                # What comes is read meanwhile: the command may wait for that before it reads on.
                wait_s = 0.0 if ahead else min(left_s, 60.0)
                ready, has_room, _ = select.select([socket], [socket], (), wait_s)
                if has_room:
                    if data := os.read(stdin, _CHUNK_BYTES):
                        socket.send_binary(bytes([_STDIN]) + data)
                    else:
                        stdin = None  # it has ended; the command cannot be notified
            if ahead or socket in ready:
                opcode, data = socket.recv_data(control_frame=True)
                if opcode == ABNF.OPCODE_CLOSE:
                    return
                if data and opcode in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT):
                    yield data[0], data[1:]
    except WebSocketConnectionClosedException:
        return
    except (WebSocketException, OSError) as broken:
        raise ExecFailedError(f"the connection to pod {pod} broke off: {broken}") from broken
    raise ExecFailedError(f"the command in pod {pod} did not end in {timeout_s:g} s")


@contextlib.contextmanager
def _raw_terminal(socket: Any) -> Iterator[None]:
    """Hand every key to the pod, and the size of the window, until the end."""

    def resize(*_: object) -> None:
        size = shutil.get_terminal_size()
        text = json.dumps({"Width": size.columns, "Height": size.lines})
        socket.send_binary(bytes([_RESIZE]) + text.encode())

    number = sys.stdin.fileno()
    before, former = termios.tcgetattr(number), signal.getsignal(signal.SIGWINCH)
    try:
        tty.setraw(number)
        signal.signal(signal.SIGWINCH, resize)
        resize()
        yield
    finally:
        signal.signal(signal.SIGWINCH, former)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
