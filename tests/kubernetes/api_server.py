"""The API server stand-in: HTTPS, discovery, reading and writing objects, watches.

It keeps its objects in a Store; what a pod does is asked of a `Kubelet`. Errors have the codes,
reasons and words of a real server, as far as clients read them.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from socketserver import TCPServer
from typing import Protocol

from api_faults import Access, Fault, Faults
from api_objects import Objects
from api_request import Request, parse, parse_body
from api_resources import (
    DEFINITIONS,
    RESOURCES,
    ApiError,
    Object,
    Resource,
    group_entry,
    group_list,
    resource_list,
)
from api_store import Store
from api_watch import events, listing

_VERSION = {"major": "1", "minor": "33", "gitVersion": "v1.33.1", "platform": "linux/amd64"}
_NO_PAGE = b"404 page not found\n"


class Kubelet(Protocol):
    """What the server asks of the nodes."""

    def log(self, request: Request, out: Handler) -> None:
        """Answer a request for a container's log."""

    def exec(self, request: Request, out: Handler) -> None:
        """Answer a request to run a command in a container."""


class ApiServer(ThreadingHTTPServer):
    """A server on all addresses of this machine; a context is its certificate."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, store: Store, access: Access, context: ssl.SSLContext) -> None:
        super().__init__(("0.0.0.0", 0), Handler)  # noqa: S104  # pods reach it over their bridge
        self.store, self.access, self.context = store, access, context
        self.objects = Objects(store, access)
        self.faults = Faults()
        self.kubelet: Kubelet | None = None
        self.stopping = False
        self.errors: list[BaseException] = []
        """What went wrong inside the stand-in; a fixture fails when there is any."""
        self._open: set[socket] = set()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # the HTTP server's own asks the DNS for a name

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def known(self) -> tuple[Resource, ...]:
        """Return the kinds there are: a custom one as long as its definition is."""
        return tuple(r for r in RESOURCES if self.serves(r))

    def serves(self, resource: Resource) -> bool:
        name = resource.full_name
        return not resource.is_custom or self.store.find(DEFINITIONS, "", name) is not None

    def drop_connections(self) -> None:
        """Break all connections there are, watches among them; new ones are welcome."""
        with self._lock:
            for connection in list(self._open):
                _shut(connection)

    def stop(self) -> None:
        """End; no connection stays open."""
        self.stopping = True
        self.shutdown()
        self.drop_connections()
        self.server_close()
        self._thread.join(timeout=10)

    def opened(self, connection: socket, *, is_open: bool) -> None:
        with self._lock:
            (self._open.add if is_open else self._open.discard)(connection)

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exception()
        # Clients go whenever they like; anything else is a mistake of the stand-in.
        if error is not None and not isinstance(error, (OSError, ssl.SSLError)):
            self.errors.append(error)


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes
    server: ApiServer

    def setup(self) -> None:
        self.request.settimeout(30)
        self.request = self.server.context.wrap_socket(self.request, server_side=True)
        self.request.settimeout(None)
        self.server.opened(self.request, is_open=True)
        super().setup()

    def finish(self) -> None:
        self.server.opened(self.request, is_open=False)
        try:
            super().finish()
        finally:
            self.request.close()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base's name
        """Say nothing on stderr; Faults keeps what was asked."""

    def do_GET(self) -> None:
        try:
            self._answer()
        except ApiError as error:
            headers = {}
            if error.retry_after_s is not None:
                headers["Retry-After"] = str(error.retry_after_s)
            self.send(error.code, error.status(), headers)

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET  # noqa: N815  # the base wants these names

    # Answers, for the kubelet too

    def send(self, code: int, body: Object | bytes, headers: dict[str, str] | None = None) -> None:
        """Send a whole answer."""
        is_json = not isinstance(body, bytes)
        data = json.dumps(body).encode() if is_json else body
        self.send_response(code)
        self.send_header("Content-Type", "application/json" if is_json else "text/plain")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def start_chunks(self, content_type: str) -> None:
        """Begin an answer whose length nobody knows yet."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        """Send a part of it; the empty one is the last."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    # Inside

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0].rstrip("/")
        if path in {"/version", "/healthz", "/readyz", "/livez"}:
            self.send(200, _VERSION if path == "/version" else b"ok")
            return
        user = self.server.access.user(self.headers.get("Authorization"))
        request = parse(self.command, self.path)
        if request is None or not self.server.serves(request.resource):
            self._discover(path)
            return
        fault = self.server.faults.take(request)
        if fault is not None and fault.after_events is None:
            self._fail(fault)
            return
        self.server.access.check(user, request)
        if request.part in {"log", "exec"}:
            assert self.server.kubelet is not None
            getattr(self.server.kubelet, request.part)(request, self)
        elif request.verb == "watch":
            self._watch(request, fault)
        elif request.verb == "list":
            self.send(200, listing(self.server.store, request))
        else:
            kind = self.headers.get("Content-Type", "").partition(";")[0]
            if kind == "application/vnd.kubernetes.protobuf":
                raise ApiError(415, "the stand-in reads JSON and YAML only")
            content = parse_body(body)
            code, answer, warnings = self.server.objects.handle(request, content, kind, user)
            # A warning is a quoted string: it holds neither quotes nor line ends.
            clean = [w.replace('"', "'").replace("\n", " ") for w in warnings]
            self.send(code, answer, {"Warning": f'299 - "{"; ".join(clean)}"'} if clean else None)

    def _fail(self, fault: Fault) -> None:
        if fault.status == 0:
            self.close_connection = True
            _shut(self.request)
            return
        raise ApiError(fault.status, fault.message, retry_after_s=fault.retry_after_s)

    def _watch(self, request: Request, fault: Fault | None) -> None:
        if request.query.get("sendInitialEvents"):
            # Clients fall back to a list and a watch, as with a server without this gate.
            text = 'ListOptions.meta.k8s.io "" is invalid: sendInitialEvents: Forbidden: '
            text += "sendInitialEvents is forbidden for watch unless the WatchList feature gate is "
            raise ApiError(422, f"{text}enabled")
        self.start_chunks("application/json;stream=watch")
        left = None if fault is None else fault.after_events
        for event in events(self.server.store, request, lambda: self.server.stopping):
            if event is None:
                continue
            if left == 0:
                self.close_connection = True
                _shut(self.request)
                return
            left = None if left is None else left - 1
            self.chunk(json.dumps(event).encode() + b"\n")
        self.chunk(b"")

    def _discover(self, path: str) -> None:
        known = self.server.known()
        words = path.strip("/").split("/")
        if words == ["api"]:
            self.send(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif words == ["api", "v1"]:
            self.send(200, resource_list("", "v1", known))
        elif words == ["apis"]:
            self.send(200, group_list(known))
        else:
            groups = {r.group: r.version for r in known if r.group}
            version = groups.get(words[1]) if words[0] == "apis" and len(words) in {2, 3} else None
            if version is None or words[2:] not in ([], [version]):
                self.send(404, _NO_PAGE)
            elif len(words) == 2:
                self.send(200, group_entry(words[1], version))
            else:
                self.send(200, resource_list(words[1], version, known))


def _shut(connection: socket) -> None:
    try:
        socket.shutdown(connection, SHUT_RDWR)  # a TLS socket of another thread forbids its own
    except OSError:
        return


def certificate(folder: Path, addresses: list[str]) -> tuple[Path, ssl.SSLContext]:
    """Make a certificate for these addresses; return its file and the server's context."""
    cert, key = folder / "ca.crt", folder / "server.key"
    names = ",".join(["DNS:localhost", *(f"IP:{address}" for address in addresses)])
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=stand-in", "-addext"]
    command += [f"subjectAltName={names}", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return cert, context
