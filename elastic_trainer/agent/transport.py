"""TCP between agents: one thread, one selector, framed messages. Knows no membership.

A frame is a 4-byte big-endian length and that many bytes. Sockets never block; a
peer that does not read is closed once too much waits for it, and no call here
touches storage, so nothing slow can keep peers waiting.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MAX_FRAME_BYTES = 16 << 20
MAX_WAITING_BYTES = 64 << 20
"""Unsent bytes after which a peer that does not read is given up."""
_LENGTH = struct.Struct(">I")
_CHUNK = 1 << 18
_IP_BIND_ADDRESS_NO_PORT = 24  # linux/in.h; Python has the name from 3.12 on


class Handler(Protocol):
    """Who owns an endpoint. Called on the reactor's thread only."""

    def opened(self, conn: int) -> None:
        """A dial succeeded."""

    def closed(self, conn: int, *, refused: bool) -> None:
        """A connection ended or a dial failed; never called after the owner's own `close`."""

    def received(self, conn: int, payload: bytes) -> None:
        """A whole frame came."""


@dataclass(slots=True)
class _Link:
    """One socket of an endpoint."""

    conn: int
    sock: socket.socket
    endpoint: Endpoint
    dialing: bool
    received: bytearray = field(default_factory=bytearray)
    waiting: deque[memoryview] = field(default_factory=deque)
    waiting_bytes: int = 0
    closing: bool = False
    """Close once everything waiting is out."""
    dead: bool = False


class Reactor:
    """The thread that serves every endpoint registered with it, and their timers.

    Args:
        crashed: called on the thread when an error of ours ends it, after every socket is
            closed. An agent that can neither hear nor speak must not go on with its workers.
    """

    def __init__(self, crashed: Callable[[BaseException], None] | None = None) -> None:
        self._crashed = crashed
        self._selector = selectors.DefaultSelector()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._halting = False
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="holdfast-peers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread soon; nothing once stopped. From any thread."""
        with self._lock:
            if self._stopped:
                return
            self._calls.append(function)
            with contextlib.suppress(BlockingIOError):  # a full pipe wakes it just as well
                os.write(self._wake_write, b"x")

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Run `function` at monotonic time `when`. On the reactor's thread only."""
        heapq.heappush(self._timers, (when, next(self._serial), function))

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close what is still open."""
        self.call(self._halt)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._lock:
            if not self._stopped:
                self._stopped = True
                os.close(self._wake_write)
                os.close(self._wake_read)

    def _halt(self) -> None:
        self._halting = True

    def _serve(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._close_all()
            if self._crashed is None:
                raise
            self._crashed(error)
        else:
            self._close_all()

    def _loop(self) -> None:
        while not self._halting:
            timeout = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            # Sockets before timers: after a pause, what peers sent meanwhile counts first.
            for key, mask in self._selector.select(0.0 if self._calls else timeout):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    key.data(mask)
            while self._calls:
                self._calls.popleft()()
            while self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2]()

    def _close_all(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    # For endpoints:
    def watch(self, sock: socket.socket, events: int, callback: Callable[[int], None]) -> None:
        """Call `callback(mask)` when `sock` is ready for `events`."""
        if sock in self._selector.get_map():
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)

    def unwatch(self, sock: socket.socket) -> None:
        """Forget `sock`."""
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)


class Endpoint:
    """One agent's listening socket and connections.

    Args:
        reactor: serves it.
        address: numeric address to listen on and dial from.
        ports: tried in turn; `range(1)` lets the system pick.

    Raises:
        OSError: no port is free, or the address is not this machine's.
    """

    def __init__(self, reactor: Reactor, address: str, ports: range = range(1)) -> None:
        self._reactor, self._address = reactor, address
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = self._listen(ports)
        self.port: int = self._listener.getsockname()[1]
        self._links: dict[int, _Link] = {}
        self._accepted = itertools.count(1, 2)
        self._handler: Handler | None = None

    def _listen(self, ports: range) -> socket.socket:
        for port in ports:
            listener = socket.socket(self._family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self._address, port))
                listener.listen(4096)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            listener.setblocking(False)
            return listener
        raise OSError(
            errno.EADDRINUSE,
            f"no free port in {ports.start}-{ports.stop - 1} on {self._address}: "
            "widen network.ports",
        )

    def serve(self, handler: Handler) -> None:
        """Begin to accept. On the reactor's thread."""
        self._handler = handler
        self._reactor.watch(self._listener, selectors.EVENT_READ, self._accept)

    def dial(self, conn: int, address: str, port: int, timeout_s: float) -> None:
        """Connect; answered by `opened` or `closed`. On the reactor's thread."""
        sock = socket.socket(self._family, socket.SOCK_STREAM)
        sock.setblocking(False)
        link = _Link(conn, sock, self, dialing=True)
        self._links[conn] = link
        try:
            if self._family == socket.AF_INET:
                # Choose the port at connect, when ports of other peers may be used again.
                sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((self._address, 0))
            sock.connect((address, port))
        except BlockingIOError:
            pass
        except OSError as error:
            # Answered later, never from inside the owner's own call.
            refused = error.errno == errno.ECONNREFUSED
            self._reactor.call(lambda: self._drop(link, refused=refused))
            return
        self._reactor.watch(sock, selectors.EVENT_WRITE, lambda _mask: self._dialed(link))
        self._reactor.call_at(
            time.monotonic() + timeout_s,
            lambda: self._drop(link, refused=False) if link.dialing else None,
        )

    def send(self, conn: int, payload: bytes) -> None:
        """Queue a frame; lost when the connection is gone. On the reactor's thread."""
        link = self._links.get(conn)
        if link is None or link.closing:
            return
        for part in (_LENGTH.pack(len(payload)), payload):
            link.waiting.append(memoryview(part))
            link.waiting_bytes += len(part)
        if not link.dialing:
            self._flush(link)

    def close(self, conn: int) -> None:
        """Close once what is queued is out; `closed` is not called. On the reactor's thread."""
        link = self._links.get(conn)
        if link is None:
            return
        link.closing = True
        if link.dialing or not link.waiting:
            self._end(link)
        else:
            # A peer that never reads must not keep the socket for ever.
            self._reactor.call_at(time.monotonic() + 5.0, lambda: self._end(link))

    def shut(self) -> None:
        """Stop listening and close everything. On the reactor's thread."""
        self._reactor.unwatch(self._listener)
        self._listener.close()
        for link in list(self._links.values()):
            self._flush(link)
            self._end(link)

    def _accept(self, _mask: int) -> None:
        for _ in range(64):
            try:
                sock, _peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    return  # the backlog keeps them until descriptors are free again
                raise
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(next(self._accepted), sock, self, dialing=False)
            self._links[link.conn] = link
            self._watch(link)

    def _dialed(self, link: _Link) -> None:
        error = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        # On loopback a dial to a free ephemeral port may connect to itself.
        if error or link.sock.getsockname() == link.sock.getpeername():
            self._drop(link, refused=error in (errno.ECONNREFUSED, 0))
            return
        link.dialing = False
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._watch(link)
        assert self._handler is not None
        self._handler.opened(link.conn)

    def _watch(self, link: _Link) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.waiting else 0)
        self._reactor.watch(link.sock, events, lambda mask: self._ready(link, mask))

    def _ready(self, link: _Link, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(link)
        if mask & selectors.EVENT_READ and not link.dead:
            self._read(link)

    def _flush(self, link: _Link) -> None:
        if link.dead:
            return
        try:
            while link.waiting:
                sent = link.sock.send(link.waiting[0])
                link.waiting_bytes -= sent
                if sent < len(link.waiting[0]):
                    link.waiting[0] = link.waiting[0][sent:]
                else:
                    link.waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:
            # Told later, never from inside the owner's own send.
            self._reactor.call(lambda: self._drop(link, refused=False))
            return
        if link.waiting_bytes > MAX_WAITING_BYTES:
            self._reactor.call(lambda: self._drop(link, refused=False))
        elif link.closing and not link.waiting:
            self._end(link)
        elif not link.dialing:
            self._watch(link)

    def _read(self, link: _Link) -> None:
        try:
            data = link.sock.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link, refused=False)
            return
        link.received += data
        assert self._handler is not None
        while len(link.received) >= _LENGTH.size and not link.dead and not link.closing:
            (size,) = _LENGTH.unpack_from(link.received)
            if size > MAX_FRAME_BYTES:
                self._drop(link, refused=False)
                return
            end = _LENGTH.size + size
            if len(link.received) < end:
                return
            payload = bytes(link.received[_LENGTH.size : end])
            del link.received[:end]
            self._handler.received(link.conn, payload)

    def _drop(self, link: _Link, *, refused: bool) -> None:
        """End a link from outside the owner's will, and tell the owner unless it closed it."""
        if not link.dead:
            told = not link.closing
            self._end(link)
            if told and self._handler is not None:
                self._handler.closed(link.conn, refused=refused)

    def _end(self, link: _Link) -> None:
        if not link.dead:
            link.dead, link.dialing = True, False
            self._links.pop(link.conn, None)
            self._reactor.unwatch(link.sock)
            link.sock.close()
