"""TCP between agents: framed messages over connections that have proved themselves.

Each connection begins with the handshake of `secret.py`; not a byte of it is taken for a
message before the other end has proved that it knows the run's secret. Then a frame is a 4-byte
big-endian length and that many bytes. Sockets never block; a peer that does not read is closed
once too much waits for it, and no call here touches storage, so nothing slow can keep peers
waiting. Knows no membership.
"""

from __future__ import annotations

import errno
import itertools
import selectors
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import Final, Protocol

from elastic_trainer.agent.membership.notices import is_numeric
from elastic_trainer.agent.wire.door import MOST, Door
from elastic_trainer.agent.wire.reactor import Reactor
from elastic_trainer.agent.wire.secret import AuthError, Badge, Handshake
from elastic_trainer.agent.wire.sockets import listen, open_files

MAX_FRAME_BYTES: Final = 16 << 20
MAX_WAITING_BYTES: Final = 64 << 20
"""Unsent bytes after which a peer that does not read is given up."""
LINGER_S: Final = 5.0
"""How long a peer may take to read the last words before a close."""
_LENGTH: Final = struct.Struct(">I")
_CHUNK: Final = 1 << 18
_UNPROVED_CHUNK: Final = 1 << 12
"""Read at once from who has not proved itself: a handshake, and a message right behind it."""
_ACCEPTS: Final = 64
"""In a row, before the others are served again."""
_BREATH_S: Final = 0.1
"""No more are accepted for so long once descriptors or memory ran out."""
_GATHER: Final = 64
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_IP_BIND_ADDRESS_NO_PORT: Final = 24  # linux/in.h; Python has the name from 3.12 on


class Handler(Protocol):
    """Who owns an endpoint. Called on the reactor's thread only."""

    def opened(self, conn: int) -> None:
        """A dial succeeded, and the other end has proved itself."""

    def closed(self, conn: int, *, refused: bool) -> None:
        """A connection ended or a dial failed; never called after the owner's own `close`."""

    def received(self, conn: int, payload: bytes) -> None:
        """A whole frame came from an end that has proved itself."""

    def stranger(self, address: str, reason: str) -> None:
        """A connection was cut off that did not prove itself. May come very often."""


@dataclass(slots=True, eq=False)
class _Link:
    """One socket of an endpoint."""

    conn: int
    sock: socket.socket
    host: str
    """The other end's address."""
    dialed: bool
    shake: Handshake | None
    """None: the other end has proved itself."""
    connecting: bool = False
    received: bytearray = field(default_factory=bytearray)
    waiting: deque[memoryview] = field(default_factory=deque)
    waiting_bytes: int = 0
    events: int = 0
    """What the reactor watches it for."""
    closing: bool = False
    """Close once everything waiting is out."""
    dead: bool = False


class Endpoint:
    """One agent's listening socket and connections.

    Args:
        reactor: serves it.
        address: numeric address to listen on and dial from.
        ports: tried in turn; `range(1)` lets the system pick.
        badge: what both ends of every connection prove to each other.

    Raises:
        OSError: no port is free, or the address is not this machine's.
    """

    def __init__(
        self, reactor: Reactor, address: str, ports: range = range(1), *, badge: Badge
    ) -> None:
        self._reactor, self._address, self._badge = reactor, address, badge
        self._family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = listen(address, ports)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._links: dict[int, _Link] = {}
        self._stillborn: set[int] = set()
        """Dials that got no socket, and whose owner has yet to be told."""
        self._accepted = itertools.count(1, 2)
        self._door = Door(min(MOST, max(16, open_files() // 4)))
        self._accepting = self._looking = False
        self._handler: Handler | None = None

    def serve(self, handler: Handler) -> None:
        """Begin to accept. On the reactor's thread."""
        self._handler = handler
        self._accept_on()

    def dial(self, conn: int, address: str, port: int, timeout_s: float) -> None:
        """Connect; answered by `opened` or `closed`. On the reactor's thread."""
        try:
            sock = socket.socket(self._family, socket.SOCK_STREAM)
        except OSError:  # no descriptor is left: as if nobody had answered
            self._stillborn.add(conn)
            self._reactor.call(lambda: self._give_up(conn))
            return
        sock.setblocking(False)
        shake = self._badge.handshake(dials=True)
        link = _Link(conn, sock, address, dialed=True, shake=shake, connecting=True)
        self._links[conn] = link
        try:
            if not is_numeric(address) or not 0 < port < 1 << 16:  # never ask a name server
                raise OSError(errno.EINVAL, f"{address}:{port} is no address")  # noqa: TRY301  as any that fails
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
        self._watch(link)
        self._reactor.call_at(
            self._reactor.now() + timeout_s,
            lambda: self._drop(link, refused=False) if link.shake is not None else None,
        )

    def _give_up(self, conn: int) -> None:
        if conn in self._stillborn and self._handler is not None:
            self._stillborn.discard(conn)
            self._handler.closed(conn, refused=False)

    def send(self, conn: int, payload: bytes) -> None:
        """Queue a frame; lost when the connection is gone. On the reactor's thread."""
        link = self._links.get(conn)
        if link is None or link.closing:
            return
        for part in (_LENGTH.pack(len(payload)), payload):
            link.waiting.append(memoryview(part))
            link.waiting_bytes += len(part)
        if link.shake is None:
            self._flush(link)

    def close(self, conn: int) -> None:
        """Close once what is queued is out; `closed` is not called. On the reactor's thread."""
        self._stillborn.discard(conn)
        link = self._links.get(conn)
        if link is None:
            return
        link.closing = True
        if link.shake is not None or not link.waiting:
            self._end(link)
        else:
            # A peer that never reads must not keep the socket for ever.
            self._reactor.call_at(self._reactor.now() + LINGER_S, lambda: self._end(link))

    def shut(self) -> None:
        """Stop listening and close everything. On the reactor's thread."""
        self._accept_off()
        self._listener.close()
        for link in list(self._links.values()):
            if link.shake is None:
                self._flush(link)
            self._end(link)

    # --- who comes ------------------------------------------------------------------------

    def _accept_on(self) -> None:
        if not self._accepting and self._listener.fileno() >= 0 and not self._door.full:
            self._accepting = True
            self._reactor.watch(self._listener, selectors.EVENT_READ, self._accept)

    def _accept_off(self) -> None:
        self._accepting = False
        self._reactor.unwatch(self._listener)

    def _accept(self, _mask: int) -> None:
        for _ in range(_ACCEPTS):
            if not self._accepting:
                return
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF:
                    raise
                # The kernel's queue keeps them until there is room again.
                self._accept_off()
                self._reactor.call_at(self._reactor.now() + _BREATH_S, self._accept_on)
                return
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            shake = self._badge.handshake(dials=False)
            link = _Link(next(self._accepted), sock, peer[0], dialed=False, shake=shake)
            self._links[link.conn] = link
            self._door.enter(link.conn, link.host, self._reactor.now())
            self._watch(link)
            if self._door.full:
                self._accept_off()
            self._look_later()

    def _look_later(self) -> None:
        """See to it that the slow are put out, also once the door is full."""
        due = self._door.due()
        if due is not None and not self._looking:
            self._looking = True
            # Often enough for a door that fills up meanwhile.
            self._reactor.call_at(min(due, self._reactor.now() + _BREATH_S), self._put_out)

    def _put_out(self) -> None:
        self._looking = False
        for conn in self._door.overdue(self._reactor.now()):
            self._cut(self._links[conn], "it was too slow to prove itself")
        self._look_later()

    def _leave_door(self, link: _Link) -> None:
        if not link.dialed:
            self._door.leave(link.conn)
            if not self._accepting:
                self._accept_on()

    # --- one connection ---------------------------------------------------------------------

    def _watch(self, link: _Link) -> None:
        write = link.connecting or (link.waiting and link.shake is None)
        events = (0 if link.connecting else selectors.EVENT_READ) | (
            selectors.EVENT_WRITE if write else 0
        )
        if events != link.events:
            link.events = events
            self._reactor.watch(link.sock, events, lambda mask: self._ready(link, mask))

    def _ready(self, link: _Link, mask: int) -> None:
        if link.dead:  # closed by another event of the same round
            return
        if link.connecting:
            self._connected(link)
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(link)
        if mask & selectors.EVENT_READ and not link.dead:
            self._read(link)

    def _connected(self, link: _Link) -> None:
        """A dial reached somebody, or nobody: begin the handshake."""
        error = link.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            # On loopback a dial to a free ephemeral port may connect to itself.
            itself = not error and link.sock.getsockname() == link.sock.getpeername()
        except OSError:  # reset at once
            error = errno.ECONNRESET
        if error or itself:
            self._drop(link, refused=error in (errno.ECONNREFUSED, 0))
            return
        link.connecting = False
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert link.shake is not None
        self._say(link, link.shake.first())
        if not link.dead:
            self._watch(link)

    def _say(self, link: _Link, flight: bytes) -> None:
        """Send a flight of the handshake: it fits into the empty buffer of any socket."""
        try:
            if flight and link.sock.send(flight) == len(flight):
                return
        except OSError:
            pass
        if flight:
            self._drop(link, refused=False)

    def _prove(self, link: _Link, data: bytes) -> None:
        """Go on with the handshake."""
        shake, handler = link.shake, self._handler
        assert shake is not None
        assert handler is not None
        try:
            answer = shake.feed(data)
        except AuthError as error:
            self._cut(link, str(error))
            return
        if not shake.done:
            self._say(link, answer)
            return
        link.shake = None
        link.received += shake.rest
        self._leave_door(link)
        if link.dialed:
            # Out with the owner's first frame, which `opened` sends.
            link.waiting.appendleft(memoryview(answer))
            link.waiting_bytes += len(answer)
            handler.opened(link.conn)
            self._flush(link)
        self._frames(link)

    def _cut(self, link: _Link, reason: str) -> None:
        assert self._handler is not None
        self._handler.stranger(link.host, reason)
        self._drop(link, refused=False)

    def _flush(self, link: _Link) -> None:
        if link.dead:
            return
        try:
            while link.waiting:
                sent = link.sock.sendmsg(list(itertools.islice(link.waiting, _GATHER)))
                link.waiting_bytes -= sent
                while sent:
                    part = link.waiting.popleft()
                    if sent < len(part):
                        link.waiting.appendleft(part[sent:])
                    sent -= min(sent, len(part))
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
        else:
            self._watch(link)

    def _read(self, link: _Link) -> None:
        try:
            data = link.sock.recv(_CHUNK if link.shake is None else _UNPROVED_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(link, refused=False)
        elif link.shake is not None:
            self._prove(link, data)
        else:
            link.received += data
            self._frames(link)

    def _frames(self, link: _Link) -> None:
        """Hand on the whole frames that have come."""
        assert self._handler is not None
        while len(link.received) >= _LENGTH.size and not link.dead and not link.closing:
            (size,) = _LENGTH.unpack_from(link.received)
            if size > MAX_FRAME_BYTES:
                self._drop(link, refused=False)
                return
            end = _LENGTH.size + size
            if len(link.received) < end:
                return
            payload = bytes(memoryview(link.received)[_LENGTH.size : end])
            del link.received[:end]
            self._handler.received(link.conn, payload)

    def _drop(self, link: _Link, *, refused: bool) -> None:
        """End a link from outside the owner's will, and tell the owner of one it knows."""
        if not link.dead:
            known = link.dialed or link.shake is None
            told = known and not link.closing
            self._end(link)
            if told and self._handler is not None:
                self._handler.closed(link.conn, refused=refused)

    def _end(self, link: _Link) -> None:
        if not link.dead:
            link.dead = True
            self._links.pop(link.conn, None)
            self._reactor.unwatch(link.sock)
            link.sock.close()
            self._leave_door(link)
