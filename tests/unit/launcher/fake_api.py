"""A few objects behind HTTP, and answers that a test puts before them: the edge of an API server.

It knows nothing of what objects mean: no validation, no controllers. What a cluster makes of
them is for tests/kubernetes.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import pytest
from websocket import ABNF, frame_buffer

CREATED = "2026-01-01T00:00:00Z"


@dataclass
class Reply:
    """An answer that comes instead of what the objects would give."""

    status: int
    body: Any = ""
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    """The request is carried out first; then the connection breaks off."""


@dataclass
class FakeApi:
    """Objects by path, and what was asked."""

    url: str = ""
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    """METHOD path?query, without dry runs' bodies."""
    accepted: list[tuple[str, str]] = field(default_factory=list)
    """The same, with the content type that is asked for."""
    bodies: list[tuple[str, Any]] = field(default_factory=list)
    """The same, with what is sent."""
    replies: list[tuple[Callable[[str], bool], list[Reply]]] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=list)
    """What watches send, one list for each."""
    logs: dict[str, str] = field(default_factory=dict)
    frames: list[tuple[int, bytes]] = field(default_factory=list)
    """What clients have sent to commands in pods: channel, data."""
    breaks_off: bool = False
    """The next command's connection breaks off after its first output."""
    version: int = 100

    def says(self, part: str, *replies: Reply) -> None:
        """Let the next calls that contain `part` be answered so, one after the other."""
        self.replies.append((lambda call: part in call, list(replies)))

    def asked(self, part: str) -> list[str]:
        """Return the calls that contain `part`."""
        return [call for call in self.calls if part in call]

    def reply(self, call: str) -> Reply | None:
        for matches, left in self.replies:
            if left and matches(call):
                return left.pop(0)
        return None

    def put(self, path: str, thing: dict[str, Any]) -> None:
        """Add an object."""
        self.version += 1
        metadata = thing.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{self.version}")
        metadata.setdefault("creationTimestamp", CREATED)
        metadata["resourceVersion"] = str(self.version)
        self.objects[path] = thing


def status_object(code: int, reason: str, message: str, **details: Any) -> dict[str, Any]:
    """Return what an API server says of a failure."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reason,
        "message": message,
        "details": details,
    }


@contextmanager
def fake_api() -> Iterator[FakeApi]:
    """Yield one that listens."""
    fake = FakeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes: the second waited for 40 ms

        def log_message(self, *_: object) -> None:
            return

        def handle_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size) or b"null")
            call = f"{self.command} {self.path}"
            fake.calls.append(call)
            fake.accepted.append((call, self.headers.get("Accept") or ""))
            fake.bodies.append((call, body))
            reply = fake.reply(call)
            if reply is None and "Upgrade" in self.headers:
                self.close_connection = True
                _exec(fake, self)
                return
            if reply is None or reply.after:
                answer = _carried_out(fake, self.command, self.path, body)
                if reply is not None:
                    self.close_connection = True
                    self.connection.close()
                    return
                reply = answer
            text = reply.body if isinstance(reply.body, str) else json.dumps(reply.body)
            data = text.encode()
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    for method in ("GET", "POST", "DELETE", "PATCH"):
        setattr(Handler, f"do_{method}", Handler.handle_any)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _exec(fake: FakeApi, handler: BaseHTTPRequestHandler) -> None:
    """Run a command here, its streams over a WebSocket as a kubelet has them (v4.channel)."""
    key = handler.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    digest = hashlib.sha1(key.encode(), usedforsecurity=False).digest()
    handler.send_response(101)
    for name, value in (
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Accept", b64encode(digest).decode()),
        ("Sec-WebSocket-Protocol", "v4.channel.k8s.io"),
    ):
        handler.send_header(name, value)
    handler.end_headers()
    query, lock = parse_qs(urlsplit(handler.path).query), threading.Lock()
    pipe = subprocess.PIPE
    process = subprocess.Popen(query["command"], stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)

    def send(data: bytes, opcode: int = ABNF.OPCODE_BINARY) -> None:
        frame = ABNF.create_frame(data, opcode)
        frame.mask_value = 0
        with lock, suppress(OSError):  # whose client has gone
            handler.wfile.write(frame.format())

    def receive(size: int) -> bytes:
        data = handler.rfile.read(size)
        if not data:
            raise ConnectionError("the client has gone")
        return data

    def takes_input() -> None:
        frames = frame_buffer(receive, skip_utf8_validation=True)
        with process.stdin, suppress(OSError, ValueError):  # the connection is closed meanwhile
            while (frame := frames.recv_frame()).opcode == ABNF.OPCODE_BINARY:
                fake.frames.append((frame.data[0], frame.data[1:]))
                if frame.data[0] == 0:
                    process.stdin.write(frame.data[1:])
        process.kill()

    def gives_output(channel: int, stream: Any) -> None:
        with stream:
            for data in iter(lambda: stream.read(30_000), b""):
                send(bytes([channel]) + data)
                if fake.breaks_off:
                    process.kill()
                    handler.connection.shutdown(2)

    threads = [
        threading.Thread(target=gives_output, args=(1, process.stdout)),
        threading.Thread(target=gives_output, args=(2, process.stderr)),
    ]
    for thread in (*threads, threading.Thread(target=takes_input, daemon=True)):
        thread.start()
    for thread in threads:
        thread.join()
    code = process.wait()
    told: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        told = status_object(500, "NonZeroExitCode", f"command terminated with exit code {code}")
        told["details"] = {"causes": [{"reason": "ExitCode", "message": str(code)}]}
    send(b"\x03" + json.dumps(told).encode())
    send(b"\x03\xe8", ABNF.OPCODE_CLOSE)


@pytest.fixture
def server():
    """Yield one for a test."""
    with fake_api() as fake:
        yield fake


@pytest.fixture
def waits():
    """Return a list for the pauses that a client makes."""
    return []


def _carried_out(fake: FakeApi, method: str, target: str, body: Any) -> Reply:
    parts = urlsplit(target)
    query, path = dict(parse_qsl(parts.query)), parts.path
    if method == "POST":
        return _create(fake, path, body, query)
    if method == "DELETE":
        return _delete(fake, path, body or {}, query)
    if method == "GET":
        return _get(fake, path, query)
    if path not in fake.objects:
        return _missing(path)
    metadata = fake.objects[path]["metadata"]
    fake.put(path, {**fake.objects[path], "metadata": metadata | body["metadata"]})
    return Reply(200, fake.objects[path])


def _get(fake: FakeApi, path: str, query: dict[str, str]) -> Reply:
    if path.endswith("/log"):
        return Reply(200, fake.logs.get(path.split("/")[-2], ""))
    if query.get("watch") == "true":
        lines = fake.lines.pop(0) if fake.lines else []
        return Reply(200, "".join(f"{line}\n" for line in lines))
    if path.rpartition("/")[2] not in _PLURALS:
        return Reply(200, fake.objects[path]) if path in fake.objects else _missing(path)
    found = [thing for name, thing in fake.objects.items() if name.rpartition("/")[0] == path]
    wanted = query.get("fieldSelector", "").removeprefix("metadata.name=")
    found = [one for one in found if not wanted or one["metadata"]["name"] == wanted]
    return Reply(200, {"items": found, "metadata": {"resourceVersion": str(fake.version)}})


_PLURALS = {
    *("pods", "configmaps", "events", "pytorchjobs", "jobsets", "trainjobs", "workloads"),
    *("secrets", "nodes", "resourcequotas"),
    *("poddisruptionbudgets", "roles", "rolebindings", "serviceaccounts", "trainingruntimes"),
}


def _create(fake: FakeApi, path: str, body: dict[str, Any], query: dict[str, str]) -> Reply:
    if path.endswith("/selfsubjectaccessreviews"):
        return Reply(201, body | {"status": {"allowed": True}})
    name = body["metadata"]["name"]
    whole = f"{path}/{name}"
    if whole in fake.objects:
        return Reply(409, status_object(409, "AlreadyExists", f'"{name}" already exists'))
    if query.get("dryRun") == "All":
        return Reply(201, body)
    fake.put(whole, body)
    return Reply(201, body)


def _delete(fake: FakeApi, path: str, options: dict[str, Any], query: dict[str, str]) -> Reply:
    if "labelSelector" in query:
        for name in [name for name in fake.objects if name.startswith(f"{path}/")]:
            del fake.objects[name]
        return Reply(200, {"items": []})
    if path not in fake.objects:
        return _missing(path)
    uid = (options.get("preconditions") or {}).get("uid")
    if uid and uid != fake.objects[path]["metadata"]["uid"]:
        return Reply(409, status_object(409, "Conflict", "the UID in the precondition differs"))
    return Reply(200, fake.objects.pop(path))


def _missing(path: str) -> Reply:
    name = path.rpartition("/")[2]
    return Reply(404, status_object(404, "NotFound", f'"{name}" not found', name=name, kind="x"))


def kubeconfig(url: str, *, namespace: str = "train", context: str = "here") -> str:
    """Return a kubeconfig for the API server at `url`."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": context,
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
            "contexts": [
                {"name": context, "context": {"cluster": "c", "user": "u", "namespace": namespace}}
            ],
        }
    )
