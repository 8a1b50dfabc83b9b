"""Logs of containers, and commands in them over a websocket, as a kubelet serves them."""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import json
import os
import queue
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from api_request import Request
from api_resources import ApiError
from api_server import Handler
from pod_container import Container
from wsproto import ConnectionType
from wsproto.connection import Connection
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
_PROTOCOLS = ("v5.channel.k8s.io", "v4.channel.k8s.io")
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255
_POLL_S = 0.05


def log_lines(path: Path, request: Request, going_on: Callable[[], bool]) -> Iterator[bytes]:
    """Yield what a client asked for of a log; with follow, until `going_on` is false."""
    query = request.query
    since = _since(request)
    tail, limit = query.number("tailLines"), query.number("limitBytes")
    data = path.read_bytes() if path.exists() else b""
    done = data.rfind(b"\n") + 1
    lines = data[:done].splitlines(keepends=True)
    lines = [line for line in lines if since is None or _time(line) >= since]
    if tail is not None:
        lines = lines[len(lines) - min(tail, len(lines)) :]
    text = b"".join(_shown(line, times=query.flag("timestamps")) for line in lines)
    yield text[:limit]
    while query.flag("follow"):
        last = not going_on()
        if path.exists():
            with path.open("rb") as file:
                file.seek(done)
                data = file.read()
            end = data.rfind(b"\n") + 1
            done += end
            more = [
                _shown(line, times=query.flag("timestamps"))
                for line in data[:end].splitlines(keepends=True)
            ]
            yield b"".join(more)
        if last:
            return
        time.sleep(_POLL_S)


def send_log(out: Handler, chunks: Iterator[bytes]) -> None:
    """Send a log in chunks, as it comes."""
    out.start_chunks("text/plain")
    for chunk in chunks:
        if chunk:
            out.chunk(chunk)
    out.chunk(b"")


def _since(request: Request) -> str | None:
    if text := request.query.get("sinceTime"):
        then = dt.datetime.fromisoformat(text)
    elif (seconds := request.query.number("sinceSeconds")) is not None:
        then = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=seconds)
    else:
        return None
    return then.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _time(line: bytes) -> str:
    return line.split(b" ", 1)[0].decode()


def _shown(line: bytes, *, times: bool) -> bytes:
    stamp, tag, text = line.split(b" ", 2)
    if tag == b"P":
        text = text.rstrip(b"\n")
    return stamp + b" " + text if times else text


def serve_exec(request: Request, out: Handler, container: Container) -> None:
    """Run a command in a container and carry its streams over a websocket.

    Raises:
        ApiError: 400, no websocket is asked for; 500, the container is gone.
    """
    key = out.headers.get("Sec-WebSocket-Key")
    if "websocket" not in (out.headers.get("Upgrade") or "").lower() or key is None:
        raise ApiError(400, "unable to upgrade: missing upgrade headers in request")
    asked = [p.strip() for p in (out.headers.get("Sec-WebSocket-Protocol") or "").split(",")]
    protocol = next((p for p in _PROTOCOLS if p in asked), None)
    if protocol is None:
        raise ApiError(403, f"unable to upgrade: unknown protocols {asked}")
    wants_stdin = request.query.flag("stdin")
    try:
        process = container.run(request.query.all("command"), stdin=wants_stdin)
    except ProcessLookupError:
        raise ApiError(500, "container not running") from None
    digest = hashlib.sha1((key + _GUID).encode(), usedforsecurity=False).digest()
    out.send_response(101)
    out.send_header("Upgrade", "websocket")
    out.send_header("Connection", "Upgrade")
    out.send_header("Sec-WebSocket-Accept", base64.b64encode(digest).decode())
    out.send_header("Sec-WebSocket-Protocol", protocol)
    out.end_headers()
    out.close_connection = True
    _Session(out.connection, process, lambda: out.server.stopping).run()


class _Session:
    """One command; a single thread reads and writes, since a TLS socket stands no two."""

    def __init__(
        self,
        connection: socket.socket,
        process: subprocess.Popen[bytes],
        stopping: Callable[[], bool],
    ) -> None:
        self._socket, self._process, self._stopping = connection, process, stopping
        self._ws = Connection(ConnectionType.SERVER)
        self._selector = selectors.DefaultSelector()
        self._open = True
        self._message = b""
        self._input: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._feed, daemon=True).start()

    def run(self) -> None:
        process = self._process
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            self._selector.register(self._socket, selectors.EVENT_READ, None)
            self._selector.register(process.stdout, selectors.EVENT_READ, _STDOUT)
            self._selector.register(process.stderr, selectors.EVENT_READ, _STDERR)
            while self._open and not self._stopping() and len(self._selector.get_map()) > 1:
                for key, _ in self._selector.select(0.5):
                    if key.data is None:
                        self._hear()
                    else:
                        self._forward(key.fileobj, key.data)
            if self._open:
                self._finish()
        except OSError:
            return  # the client went
        finally:
            self._end()

    def _forward(self, pipe: IO[bytes], channel: int) -> None:
        data = os.read(pipe.fileno(), 1 << 15)
        if data:
            self._send(channel, data)
        else:
            self._selector.unregister(pipe)

    def _hear(self) -> None:
        data = self._socket.recv(1 << 16)
        while pending := getattr(self._socket, "pending", int)():
            data += self._socket.recv(pending)
        self._ws.receive_data(data or None)
        for event in self._ws.events():
            if isinstance(event, CloseConnection):
                self._open = False
                if data:
                    self._socket.sendall(self._ws.send(event.response()))
            elif isinstance(event, Ping):
                self._socket.sendall(self._ws.send(event.response()))
            elif isinstance(event, (TextMessage, BytesMessage)):
                content = event.data
                self._message += content.encode() if isinstance(content, str) else bytes(content)
                if event.message_finished:
                    message, self._message = self._message, b""
                    self._to_process(message)

    def _to_process(self, message: bytes) -> None:
        if message[:1] == bytes([_STDIN]):
            self._input.put(message[1:])
        elif message[:2] == bytes([_CLOSE, _STDIN]):
            self._input.put(None)

    def _feed(self) -> None:
        """Write what comes to the command; a thread of its own, since a full pipe waits."""
        stdin = self._process.stdin
        try:
            while (data := self._input.get()) is not None and stdin is not None:
                while data:
                    data = data[os.write(stdin.fileno(), data) :]
        except OSError:
            return  # the command reads no more
        finally:
            if stdin is not None:
                stdin.close()

    def _finish(self) -> None:
        code = self._process.wait(timeout=60)
        code = code if code >= 0 else 128 - code
        status: dict[str, object] = {"metadata": {}, "status": "Success"}
        if code:
            status = {
                "metadata": {},
                "status": "Failure",
                "message": f"command terminated with non-zero exit code: exit status {code}",
                "reason": "NonZeroExitCode",
                "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
            }
        self._send(_ERROR, json.dumps(status).encode())
        self._socket.sendall(self._ws.send(CloseConnection(code=1000)))

    def _send(self, channel: int, data: bytes) -> None:
        self._socket.sendall(self._ws.send(BytesMessage(data=bytes([channel]) + data)))

    def _end(self) -> None:
        self._selector.close()
        self._input.put(None)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=30)
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
