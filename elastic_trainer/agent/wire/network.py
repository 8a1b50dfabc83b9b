"""TCP between agents: framed messages over connections that have proved themselves.

Each connection begins with the handshake of `secret.py`; not a byte of it is taken for a message
before the other end has proved that it knows the run's secret. Then a frame is a 4-byte big-endian
length, a MAC, and so many bytes. All of it is served by asyncio on a thread of its own, on which
nothing touches storage, so that nothing slow can keep peers waiting. Knows no membership.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import itertools
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, Protocol

from elastic_trainer.plan.running_clock import RunningClock
from elastic_trainer.worker.process import open_files
from elastic_trainer.worker.secret import (
    TAG_BYTES,
    AuthError,
    AuthSession,
    Badge,
    Handshake,
    fingerprint,
)

BACKLOG: Final = 4096
"""Connections that may wait: all agents of a large job come at once."""
MAX_FRAME_BYTES: Final = 16 << 20
MAX_WAITING_BYTES: Final = 64 << 20
"""Unsent bytes after which a peer that does not read is given up."""
LINGER_S: Final = 5.0
"""How long a peer may take to read the last words before a close."""
MOST_UNPROVED: Final = 4096
"""Unproved connections at a time, where the limit of open files allows as many."""
PATIENCE_S: Final = 5.0
"""How long one may take to prove itself."""
PRESSED_S: Final = 0.5
"""The same while the most are there. A handshake on a busy node takes a tenth of it."""
_LENGTH: Final = struct.Struct(">I")
_HEAD_BYTES: Final = _LENGTH.size + TAG_BYTES
_BREATH_S: Final = 0.1
"""No more are accepted for so long once descriptors or memory ran out."""
_CLOCK_S: Final = 1.0
"""The clock is read at least so often, to tell a stop."""
_OUT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_IP_BIND_ADDRESS_NO_PORT: Final = 24  # linux/in.h; Python has the name from 3.12 on


def listen(address: str, ports: range, *, first: int = 0, backlog: int = BACKLOG) -> socket.socket:
    """Return a socket that listens on the first free port of `ports`.

    They are tried once, from index `first` on; `range(1)` lets the system pick. `address` is
    numeric, IPv4 or IPv6; `::` is all of both. `backlog` connections wait for an accept.

    Raises:
        OSError: no port is free, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for attempt in range(len(ports)):
        port = ports[(first + attempt) % len(ports)]
        try:
            return socket.create_server(
                (address, port), family=family, backlog=backlog, dualstack_ipv6=address == "::"
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(
        errno.EADDRINUSE,
        f"no free port in {ports.start}-{ports.stop - 1} on {address}: widen network.ports",
    )


class _Loop(asyncio.SelectorEventLoop):
    """Timers do not run on while the process is stopped: what peers sent is read first."""

    def __init__(self, clock: RunningClock) -> None:
        self._running_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._running_clock()


class NetworkThread:
    """The thread whose asyncio loop serves every endpoint made with it, and their timers.

    When an error of ours ends it, it closes every socket and calls `crashed`: an agent that can
    neither hear nor speak must not continue with its workers.
    """

    def __init__(self, crashed: Callable[[BaseException], None] | None = None) -> None:
        self._crashed = crashed
        self.now = RunningClock()
        """Seconds, for timers and peers; without those in which this process was stopped. On this
        thread only."""
        self.loop = _Loop(self.now)
        self.loop.set_exception_handler(self._on_error)
        self.endpoints: list[Endpoint] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="holdfast-peers", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the thread soon; nothing once stopped. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(function)

    def call_at(self, when: float, function: Callable[[], None]) -> None:
        """Run `function` at time `when` of `now`. On this thread only."""
        self.loop.call_at(when, function)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine, whose error is a crash; keep the task. On this thread only."""
        task = self.loop.create_task(work)
        task.add_done_callback(self._done)
        return task

    @contextlib.contextmanager
    def crashing(self) -> Iterator[None]:
        """Take any error in the body for a crash: asyncio would take some for a connection's."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  handed on to whoever made the thread
            self._crash(error)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread and close what is still open."""
        if self._thread.is_alive():
            self.call(self.loop.stop)
            self._thread.join(timeout_s)
        elif not self.loop.is_closed():  # it never ran
            self._finish()

    def _done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._crash(error)

    def _on_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, BaseException):
            self._crash(error)

    def _crash(self, error: BaseException) -> None:
        self._error = self._error or error
        self.loop.stop()

    def _serve(self) -> None:
        with self.crashing():
            self._look_at_clock()
            self.loop.run_forever()
        self._finish()
        if self._error is not None:
            if self._crashed is None:
                raise self._error
            self._crashed(self._error)

    def _look_at_clock(self) -> None:
        self.loop.call_later(_CLOCK_S, self._look_at_clock)

    def _finish(self) -> None:
        for endpoint in self.endpoints:
            endpoint.shut()
            endpoint.abort()
        with contextlib.suppress(RuntimeError):  # another crash has stopped the loop
            for _ in range(3):  # transports close their sockets in a call of their own
                self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


class Handler(Protocol):
    """Owns an endpoint. Called on the network's thread only."""

    def opened(self, conn: int) -> None:
        """A dial succeeded, and the other end has proved itself."""

    def closed(self, conn: int, *, refused: bool) -> None:
        """A connection ended or a dial failed; never called after the owner's own `close`."""

    def received(self, conn: int, payload: bytes) -> None:
        """A whole frame came from an end that has proved itself."""

    def stranger(self, address: str, reason: str) -> None:
        """A connection was cut off that did not prove itself, or whose bytes somebody changed.

        May come very often.
        """


class _Link(asyncio.Protocol):
    """One connection of an endpoint: the handshake, then frames."""

    def __init__(self, endpoint: Endpoint, conn: int, host: str, *, dialed: bool) -> None:
        self._endpoint, self.conn, self.host, self.dialed = endpoint, conn, host, dialed
        self.transport: asyncio.Transport | None = None
        self.handshake: Handshake | None = None
        self.session: AuthSession | None = None
        """None: the other end has not proved itself."""
        self.connecting: asyncio.Task[None] | None = None
        self.closing = False
        """The owner has closed it, and hears no more of it."""
        self._early: list[tuple[bytes, bytes]] = []
        """What to send once the other end has proved itself."""
        self._received = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        ends = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        if self.closing or ends[1] is None:  # the other end has hung up already
            transport.abort()
            return
        self.handshake = Handshake(self._endpoint.badge, dials=self.dialed, ends=ends)
        transport.write(self.handshake.first())

    def data_received(self, data: bytes) -> None:
        with self._endpoint.network.crashing():
            if self.session is not None:
                self._received += data
            elif not self._prove(data):
                return
            self._take_frames()

    def eof_received(self) -> None:
        with self._endpoint.network.crashing():
            self.abort()
            self._endpoint.ended(self, refused=False)  # now, not in the loop's next turn

    def connection_lost(self, _error: Exception | None) -> None:
        with self._endpoint.network.crashing():
            self._endpoint.ended(self, refused=False)

    def send(self, payload: bytes, digest: bytes) -> None:
        """Send a frame; it waits until the other end has proved itself."""
        if self.session is None:
            self._early.append((payload, digest))
        elif self.transport is not None and not self.transport.is_closing():
            head = _LENGTH.pack(len(payload)) + self.session.tag(digest)
            self.transport.write(head + payload)
            if self.transport.get_write_buffer_size() > MAX_WAITING_BYTES:
                self.transport.abort()

    def abort(self) -> None:
        """End it at once; whatever waits is lost."""
        if self.transport is not None:
            self.transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()
            self._endpoint.network.call(lambda: self._endpoint.ended(self, refused=False))
        else:
            self.closing = True  # accepted, but not connected yet: `connection_made` ends it

    def close(self) -> None:
        """End it once all is sent, which a peer that does not read must not hold up for ever."""
        self.closing = True
        if self.session is None or self.transport is None:
            self.abort()
        else:
            self.transport.close()
            self._endpoint.network.loop.call_later(LINGER_S, self.transport.abort)

    def _prove(self, data: bytes) -> bool:
        """Continue the handshake; return whether the other end has proved itself."""
        assert self.transport is not None
        assert self.handshake is not None
        try:
            answer = self.handshake.feed(data)
        except AuthError as error:
            self._endpoint.cut(self, str(error))
            return False
        self.transport.write(answer)
        if not self.handshake.done:
            return False
        self.session, self._received = self.handshake.session(), bytearray(self.handshake.rest)
        for payload, digest in self._early:
            self.send(payload, digest)
        self._early.clear()
        self._endpoint.proved(self)
        return True

    def _take_frames(self) -> None:
        assert self.transport is not None
        assert self.session is not None
        at = 0
        while len(self._received) >= at + _HEAD_BYTES and not self.transport.is_closing():
            (size,) = _LENGTH.unpack_from(self._received, at)
            if size > MAX_FRAME_BYTES:
                self.transport.abort()
                break
            begin, end = at + _HEAD_BYTES, at + _HEAD_BYTES + size
            if len(self._received) < end:
                break
            with memoryview(self._received) as view:
                tag, payload = bytes(view[begin - TAG_BYTES : begin]), bytes(view[begin:end])
            at = end
            try:
                self.session.check(payload, tag)
            except AuthError as error:
                self._endpoint.cut(self, str(error))
                break
            self._endpoint.handler.received(self.conn, payload)
        del self._received[:at]


class AcceptLimiter:
    """Counts the unproved connections of one port, by number. Pure.

    Beyond `most` at a time nobody is accepted, the kernel's queue holds whoever comes, and the slow
    ones of the busiest host are cut off early: whoever floods the port makes way for the others.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._inside: dict[int, tuple[float, str]] = {}
        """Connection -> when it came, and from which host; oldest first."""
        self._hosts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._inside)

    @property
    def full(self) -> bool:
        """Whether no more may come now."""
        return len(self._inside) >= self._most

    def enter(self, conn: int, host: str, now: float) -> None:
        """Count a connection that has come."""
        assert not self.full
        self._inside[conn] = (now, host)
        self._hosts[host] += 1

    def leave(self, conn: int) -> None:
        """Count it no longer: it has proved itself, or is gone."""
        if (entry := self._inside.pop(conn, None)) is not None:
            self._hosts[entry[1]] -= 1
            if not self._hosts[entry[1]]:
                del self._hosts[entry[1]]

    def due(self) -> float | None:
        """Return when `overdue` is to be asked next; None: nobody is inside."""
        for since, _ in self._inside.values():
            return since + (PRESSED_S if self.full else PATIENCE_S)
        return None

    def overdue(self, now: float) -> list[int]:
        """Return those that have to go by `now`, oldest first. They stay until they `leave`."""
        late = [c for c, (since, _) in self._inside.items() if now - since >= PATIENCE_S]
        if late or not self.full:
            return late
        slow = [(c, h) for c, (since, h) in self._inside.items() if now - since >= PRESSED_S]
        if not slow:
            return []
        # Of all hosts with slow ones: who has most connections here.
        busiest = max((host for _, host in slow), key=lambda host: self._hosts[host])
        return [conn for conn, host in slow if host == busiest]


class Endpoint:
    """One agent's listening socket and connections. All but the constructor on the thread.

    It listens on `address` (numeric), on a port of `ports` as `listen` picks it, and dials from it.

    Raises:
        OSError: no port is free, or the address is not this machine's.
    """

    handler: Handler
    """Who owns it; set by `serve`."""

    def __init__(
        self, network: NetworkThread, address: str, ports: range = range(1), *, badge: Badge
    ) -> None:
        self.network, self.badge = network, badge
        self._address = ipaddress.ip_address(address)
        self._listener = listen(address, ports)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._links: dict[int, _Link] = {}
        self._accepted = itertools.count(1, 2)
        self.limiter = AcceptLimiter(min(MOST_UNPROVED, max(16, open_files() // 4)))
        self._looking = False
        network.endpoints.append(self)

    def serve(self, handler: Handler) -> None:
        """Begin to accept."""
        self.handler = handler
        self._accept_soon()

    def dial(self, conn: int, address: str, port: int, timeout_s: float) -> None:
        """Connect, and prove each other within `timeout_s`; answered by `opened` or `closed`."""
        link = self._links[conn] = _Link(self, conn, address, dialed=True)
        link.connecting = self.network.spawn(self._connect(link, address, port))
        self.network.loop.call_later(timeout_s, self._give_up_dial, link)

    def send(self, conns: tuple[int, ...], payload: bytes) -> None:
        """Send a frame to each; it is lost where the connection is gone."""
        digest = fingerprint(payload)
        for conn in conns:
            if (link := self._links.get(conn)) is not None and not link.closing:
                link.send(payload, digest)

    def close(self, conn: int) -> None:
        """Close once what is queued is out; `closed` is not called."""
        if (link := self._links.get(conn)) is not None:
            link.close()

    def shut(self) -> None:
        """Stop listening and close everything."""
        if self._listener.fileno() >= 0:
            self.network.loop.remove_reader(self._listener)
            self._listener.close()
        for link in list(self._links.values()):
            link.close()

    def abort(self) -> None:
        """End every connection at once."""
        for link in list(self._links.values()):
            link.abort()

    # --- dialing -------------------------------------------------------------------------

    async def _connect(self, link: _Link, address: str, port: int) -> None:
        refused, loop = False, self.network.loop
        try:
            with contextlib.ExitStack() as stack:
                sock = stack.enter_context(self._dialing_socket(address, port))
                await loop.sock_connect(sock, (address, port))
                # On loopback a dial to a free ephemeral port may connect to itself.
                refused = sock.getsockname() == sock.getpeername()
                if not refused:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    await loop.create_connection(lambda: link, sock=sock)
                    stack.pop_all()  # the transport owns it now
                    return
        except OSError as error:
            refused = isinstance(error, ConnectionRefusedError)
        self.ended(link, refused=refused)

    def _dialing_socket(self, address: str, port: int) -> socket.socket:
        """Return a socket to dial from, without asking a name server.

        Raises:
            OSError: no descriptor is left, or that is not an address.
        """
        try:
            is_address = ipaddress.ip_address(address).version == self._address.version
        except ValueError:
            is_address = False
        if not is_address or not 0 < port < 1 << 16:
            raise OSError(errno.EINVAL, f"{address}:{port} is not an address")
        ipv6 = self._address.version == 6
        sock = socket.socket(socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        if not ipv6:
            # Choose the port at connect, when ports of other peers may be used again.
            sock.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        sock.bind((str(self._address), 0))
        return sock

    def _give_up_dial(self, link: _Link) -> None:
        if link.session is None:
            link.abort()

    # --- who comes -----------------------------------------------------------------------

    def _accept_soon(self) -> None:
        """Accept whoever comes, unless the limiter is full; the kernel's queue keeps the rest."""
        if self._listener.fileno() >= 0 and not self.limiter.full:
            self.network.loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        # Not sock_accept: what it has accepted is lost, and left open, when it is cancelled.
        with self.network.crashing():
            try:
                sock, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _OUT_OF:
                    raise
                self.network.loop.remove_reader(self._listener)
                self.network.loop.call_later(_BREATH_S, self._accept_soon)
                return
            self._take_in(sock, peer[0])

    def _take_in(self, sock: socket.socket, host: str) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link = _Link(self, next(self._accepted), host, dialed=False)
        self._links[link.conn] = link
        self.limiter.enter(link.conn, link.host, self.network.now())
        if self.limiter.full:
            self.network.loop.remove_reader(self._listener)
        self._look_later()
        self.network.spawn(self.network.loop.connect_accepted_socket(lambda: link, sock))

    def _look_later(self) -> None:
        """See to it that the slow are cut off, also once there are too many."""
        due = self.limiter.due()
        if due is not None and not self._looking:
            self._looking = True
            # Often enough for a limiter that fills up meanwhile.
            self.network.call_at(min(due, self.network.now() + _BREATH_S), self._cut_off_the_slow)

    def _cut_off_the_slow(self) -> None:
        self._looking = False
        for conn in self.limiter.overdue(self.network.now()):
            self.cut(self._links[conn], "it was too slow to prove itself")
        self._look_later()

    # --- for links -----------------------------------------------------------------------

    def cut(self, link: _Link, reason: str) -> None:
        """End a connection of somebody who has not proved to be of this run."""
        self._leave_limiter(link)
        self.handler.stranger(link.host, reason)
        link.abort()

    def proved(self, link: _Link) -> None:
        """Take a connection for one of this run from now on."""
        self._leave_limiter(link)
        if link.dialed:
            self.handler.opened(link.conn)

    def ended(self, link: _Link, *, refused: bool) -> None:
        """Forget a connection, and tell the owner of one it knows."""
        if self._links.pop(link.conn, None) is None:
            return
        self._leave_limiter(link)
        if (link.dialed or link.session is not None) and not link.closing:
            self.handler.closed(link.conn, refused=refused)

    def _leave_limiter(self, link: _Link) -> None:
        if not link.dialed:
            self.limiter.leave(link.conn)
            self._accept_soon()
