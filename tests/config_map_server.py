"""ConfigMaps over real HTTPS, with an API server's rules and faults at the edge of each request."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

BEFORE, AFTER = "before", "after"
FIRST_TOKEN, SECOND_TOKEN = "secret-1", "secret-2"


@dataclass
class Fault:
    """What happens to a request: instead of it, or once it has been carried out."""

    when: str
    status: int | None = None
    """Answered; None: the connection ends without an answer."""
    methods: tuple[str, ...] = ("PUT", "POST")
    headers: dict[str, str] = field(default_factory=dict)
    hold_s: float = 0.0


class ConfigMaps:
    """Objects by path, by the rules of an API server."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.meanwhile: Callable[[], None] | None = None
        """Called once, before the next write is carried out."""
        self._lock = threading.Lock()
        self._version = 100

    def carry_out(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if method != "GET" and (other := self.meanwhile) is not None:
            self.meanwhile = None
            other()
        with self._lock:
            if method == "POST":
                path = f"{path}/{body['metadata']['name']}"
                if path in self.objects:
                    return 409, status("already exists")
                return 201, self._store(path, body)
            here = self.objects.get(path)
            if here is None:
                return 404, status("configmaps not found")
            if method == "GET":
                return 200, here
            base = body["metadata"].get("resourceVersion")  # without one it is put over any other
            if base is not None and base != here["metadata"]["resourceVersion"]:
                return 409, status("the object has been modified")
            return 200, self._store(path, body)

    def _store(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 7
        body["metadata"]["resourceVersion"] = f"{self._version}"
        body["metadata"].setdefault("uid", f"uid-{self._version}")
        self.objects[path] = json.loads(json.dumps(body))
        return self.objects[path]


class Server(ConfigMaps, ThreadingHTTPServer):
    """Of one API server; `faults` strike the next requests that they fit, in order."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, context: ssl.SSLContext | None, address: str) -> None:
        ConfigMaps.__init__(self)
        ThreadingHTTPServer.__init__(self, (address, 0), Handler)
        if context is not None:
            # The handshake is the handler's: a client that falls silent in it blocks nobody else.
            self.socket = context.wrap_socket(
                self.socket, server_side=True, do_handshake_on_connect=False
            )
        self.token = FIRST_TOKEN
        self.denied: set[str] = set()
        self.faults: list[Fault] = []
        self.connections = 0
        self.requests: list[tuple[str, str]] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are part of the tests."""

    def fault(self, method: str, when: str) -> Fault | None:
        with self._lock:
            found = next((f for f in self.faults if f.when == when and method in f.methods), None)
            if found is not None:
                self.faults.remove(found)
            return found


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: the second waited for 40 ms
    server: Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve("GET")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def do_POST(self) -> None:
        self._serve("POST")

    def _serve(self, method: str) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(raw) if raw else {}
        self.server.requests.append((method, self.path))
        if (refusal := self._refusal(method)) is not None:
            return self._answer(*refusal)
        if (fault := self.server.fault(method, BEFORE)) is not None:
            return self._strike(fault)
        code, answer = self.server.carry_out(method, self.path, body)
        if (fault := self.server.fault(method, AFTER)) is not None:
            return self._strike(fault)
        return self._answer(code, answer)

    def _refusal(self, method: str) -> tuple[int, dict[str, Any]] | None:
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return 401, status("Unauthorized")
        return (403, status("forbidden")) if method in self.server.denied else None

    def _strike(self, fault: Fault) -> None:
        time.sleep(fault.hold_s)
        if fault.status is None:
            self.close_connection = True
            return
        self._answer(fault.status, status("struck"), fault.headers)

    def _answer(self, code: int, body: dict[str, Any], headers: dict[str, str] | None = None):
        raw = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(raw)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)


def status(message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "message": message}


def authority(folder: Path, names: str = "IP:127.0.0.1") -> tuple[Path, ssl.SSLContext]:
    """Make a certificate that signs itself; return its file and a server's context."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder.mkdir(parents=True, exist_ok=True)
    cert, key = folder / "ca.crt", folder / "server.key"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=test", "-addext", f"subjectAltName={names}"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
        timeout=60,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context


@contextmanager
def serving(context: ssl.SSLContext | None, address: str = "127.0.0.1") -> Iterator[Server]:
    """Run a server at `address` while it is entered."""
    server = Server(context, address)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
