"""Runs commands in a pod, over a WebSocket: with bytes to stdin, or with the user's terminal.

The protocol (v4.channel.k8s.io) cannot close stdin, so what is sent says its own length.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import ssl
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final

from launcher.backends.commands import Answer
from launcher.backends.kubernetes.api import KubernetesApi
from launcher.backends.kubernetes.documents import Resource
from launcher.backends.kubernetes.errors import BrokenOffError, Call, refusal
from launcher.errors import PermanentError

_STDIN, _STDOUT, _STDERR, _ERROR, _RESIZE = range(5)
_CHUNK_BYTES: Final = 64 * 1024
_MOST_STDERR: Final = 64 * 1024
_CLOSED: Final = -1
"""In place of a channel: the other end has closed the connection."""
_EXEC: Final = Resource("v1", "pods/exec")


class ExecFailedError(PermanentError):
    """A command could not be started in a pod, did not end in time, or its connection broke off."""


class Channels:
    """One connection: numbered streams of bytes in both directions.

    Args:
        socket: a websocket-client's WebSocket, connected.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket

    def fileno(self) -> int:
        """For select(); see `has_more` too."""
        number: int = self._socket.fileno()
        return number

    def has_more(self) -> bool:
        """Whether something has come that select() does not see: TLS reads ahead."""
        inner = self._socket.sock
        return isinstance(inner, ssl.SSLSocket) and inner.pending() > 0

    def send(self, channel: int, data: bytes) -> None:
        """Send some bytes."""
        self._socket.send_binary(bytes([channel]) + data)

    def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Return (channel, bytes); None: nothing came in time."""
        from websocket import ABNF, WebSocketConnectionClosedException

        if not self.has_more() and not select.select([self], (), (), max(0.0, timeout_s))[0]:
            return None
        try:
            opcode, frame = self._socket.recv_data_frame(True)
        except WebSocketConnectionClosedException:
            return _CLOSED, b""
        if opcode == ABNF.OPCODE_CLOSE:
            return _CLOSED, b""
        if opcode not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or not frame.data:
            return None
        data: bytes = frame.data
        return data[0], data[1:]

    def close(self) -> None:
        """Close the connection; the command may go on."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.close(timeout=1)
            self._socket.shutdown()  # close() leaves open what the other end has closed


def run_in_pod(
    api: KubernetesApi,
    namespace: str,
    pod: str,
    argv: Sequence[str],
    *,
    container: str,
    stdin: bytes | IO[bytes] = b"",
    out: Callable[[bytes], object] | None = None,
    timeout_s: float,
    mono: Callable[[], float] = time.monotonic,
) -> Answer:
    """Run a command in a pod to its end.

    Args:
        api: the cluster.
        namespace: the pod's.
        pod: its name.
        argv: the command; no shell reads it.
        container: which of its containers.
        stdin: what it is given, to be read to a length that it knows.
        out: takes what it writes to stdout as it comes; None: it is in the answer.
        timeout_s: for all of it.
        mono: monotonic seconds.

    Raises:
        UserError: HF753 no right to; HF755 no such namespace.
        NotThereError: there is no such pod.
        ExecFailedError: it did not start, or did not end in time.
    """
    from websocket import WebSocketException

    kept: list[bytes] = []
    channels = _open(api, namespace, pod, argv, container=container, stdin=bool(stdin))
    with contextlib.closing(channels):
        try:
            for chunk in _chunks(stdin):
                channels.send(_STDIN, chunk)
            status, error = _until_the_end(channels, out or kept.append, mono() + timeout_s, mono)
        except (WebSocketException, OSError) as broken:
            raise ExecFailedError(f"the connection to pod {pod} broke off: {broken}") from broken
    if status is None:
        raise ExecFailedError(f"{argv[0]} in pod {pod} did not end in {timeout_s:g} s")
    said = error.decode("utf-8", errors="replace")
    return Answer(
        argv=tuple(argv),
        code=exit_code(status, pod, said),
        out=b"".join(kept).decode("utf-8", errors="replace"),
        err=said,
    )


def _until_the_end(
    channels: Channels,
    out: Callable[[bytes], object],
    end: float,
    mono: Callable[[], float],
) -> tuple[bytes | None, bytes]:
    """Return the API's last word about the command (None: time was up), and its stderr."""
    status, error = b"", b""
    while mono() < end:
        came = channels.receive(min(end - mono(), 5.0))
        if came is None:
            continue
        channel, data = came
        if channel == _CLOSED:
            return status, error
        if channel == _STDOUT and data:
            out(data)
        elif channel == _STDERR:
            error = (error + data)[-_MOST_STDERR:]
        elif channel == _ERROR:
            status += data
    return None, error


def exit_code(status: bytes, pod: str, said: str = "") -> int:
    """Return the exit code that the API's last word about a command has. Pure.

    Raises:
        ExecFailedError: it says that the command did not run, or nothing.
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
    except (ValueError, KeyError, TypeError, AttributeError):
        message = status.decode("utf-8", errors="replace") or said or "nothing was said"
    raise ExecFailedError(f"the command in pod {pod} did not run: {' '.join(message.split())}")


def terminal_in_pod(
    api: KubernetesApi, namespace: str, pod: str, argv: Sequence[str], *, container: str
) -> int:
    """Run a command in a pod with this process's terminal, or its pipes; return its exit code.

    Raises:
        UserError, PlatformError: as `run_in_pod`.
    """
    is_tty = sys.stdin.isatty() and sys.stdout.isatty()
    channels = _open(api, namespace, pod, argv, container=container, stdin=True, is_terminal=is_tty)
    status = b""
    with contextlib.closing(channels), _raw_terminal(channels, is_tty):
        source: int | None = sys.stdin.fileno()
        while True:
            ready: list[Any] = [channels] if source is None else [channels, source]
            wait_s = 0.0 if channels.has_more() else 1.0
            found, _, _ = select.select(ready, (), (), wait_s)
            if source is not None and source in found:
                data = os.read(source, _CHUNK_BYTES)
                if data:
                    channels.send(_STDIN, data)
                else:
                    source = None  # a pipe has ended; the command cannot be told so
            came = channels.receive(0.0)
            if came is None:
                continue
            channel, data = came
            if channel == _CLOSED:
                return exit_code(status, pod)
            if channel == _ERROR:
                status += data
            elif channel in (_STDOUT, _STDERR):
                to = sys.stdout.buffer if channel == _STDOUT else sys.stderr.buffer
                to.write(data)
                to.flush()


def _open(
    api: KubernetesApi,
    namespace: str,
    pod: str,
    argv: Sequence[str],
    *,
    container: str,
    stdin: bool,
    is_terminal: bool = False,
) -> Channels:
    """Open the connection."""
    from kubernetes.client import ApiClient, ApiException, CoreV1Api
    from kubernetes.stream import stream
    from websocket import WebSocketBadStatusException

    call = Call(verb="create", resource=_EXEC, namespace=namespace, name=pod, server=api.server)
    client = ApiClient(api.client.configuration)  # of its own: stream() swaps methods of it
    try:
        opened = stream(
            CoreV1Api(client).connect_get_namespaced_pod_exec,
            pod,
            namespace,
            container=container,
            command=list(argv),
            stdin=stdin,
            stdout=True,
            stderr=not is_terminal,
            tty=is_terminal,
            _preload_content=False,
            binary=True,
        )
        return Channels(opened.sock)
    except ApiException as error:  # of status 0, whatever has happened: that is its context
        cause = error.__context__
        if isinstance(cause, WebSocketBadStatusException):
            body = cause.resp_body or b""
            text = body.decode("utf-8", errors="replace") if isinstance(body, bytes) else str(body)
            headers = dict(cause.resp_headers or {})
            raise refusal(call, int(cause.status_code), text, headers) from error
        if isinstance(cause, KeyboardInterrupt | SystemExit):
            raise cause from None
        raise BrokenOffError(
            f"pod {pod} cannot be reached through {api.server}: {error.reason}"
        ) from error


def _chunks(stdin: bytes | IO[bytes]) -> Iterator[bytes]:
    if isinstance(stdin, bytes):
        for start in range(0, len(stdin), _CHUNK_BYTES):
            yield stdin[start : start + _CHUNK_BYTES]
        return
    yield from iter(lambda: stdin.read(_CHUNK_BYTES), b"")


@contextlib.contextmanager
def _raw_terminal(channels: Channels, is_tty: bool) -> Iterator[None]:
    """Hand every key to the pod, and the size of the window, until the end."""
    if not is_tty:
        yield
        return

    def resize(*_: object) -> None:
        size = shutil.get_terminal_size()
        text = json.dumps({"Width": size.columns, "Height": size.lines})
        channels.send(_RESIZE, text.encode())

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
