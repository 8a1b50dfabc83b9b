"""Endpoints over real sockets: frames come whole, and no bytes stop the thread."""

from __future__ import annotations

import ast
import contextlib
import queue
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.agent.membership.messages import Ping, decode, encode
from elastic_trainer.agent.wire import transport
from elastic_trainer.agent.wire.reactor import Reactor
from elastic_trainer.agent.wire.secret import KEY_BYTES, MAGIC, Badge, Secret, authenticate
from elastic_trainer.agent.wire.transport import Endpoint

ROOT = Path(__file__).parents[3]
BADGE = Badge(Secret(bytes(KEY_BYTES)), "agents", "run1")
DEADLINE_S = 10.0


class Owner:
    """Decodes what comes, as an agent does, and notes everything."""

    def __init__(self, badge: Badge = BADGE) -> None:
        self.crashes: list[BaseException] = []
        self.seen: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.reactor = Reactor(crashed=self.crashes.append)
        self.endpoint = Endpoint(self.reactor, "127.0.0.1", badge=badge)
        self.reactor.start()
        self.do(lambda: self.endpoint.serve(self))

    def opened(self, conn):
        self.seen.put(("opened", conn))

    def closed(self, conn, *, refused):
        self.seen.put(("closed", conn, refused))

    def stranger(self, address, reason):
        self.seen.put(("stranger", address, reason))

    def received(self, conn, payload):
        try:
            decode(payload)
        except ValueError:
            self.endpoint.close(conn)
            return
        self.seen.put(("received", conn, payload))

    def do(self, what):
        done = threading.Event()
        self.reactor.call(lambda: (what(), done.set()))
        assert done.wait(DEADLINE_S), self.crashes

    def next(self):
        return self.seen.get(timeout=DEADLINE_S)

    def dial(self, conn, port, address="127.0.0.1", timeout_s=5.0):
        self.do(lambda: self.endpoint.dial(conn, address, port, timeout_s))

    def insider(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.endpoint.port), DEADLINE_S)
        where = {"label": BADGE.label, "context": BADGE.context}
        authenticate(sock, BADGE.secret, server=False, timeout_s=DEADLINE_S, **where)
        return sock

    def known_insider(self) -> socket.socket:
        """Return an insider's socket that the endpoint's owner has heard of."""
        sock = self.insider()
        sock.sendall(frame(encode(Ping())))
        assert self.next()[0] == "received"
        return sock

    def close(self):
        self.reactor.call(self.endpoint.shut)
        self.reactor.stop()
        assert not self.crashes


@pytest.fixture
def owners():
    made = []

    def make(**kwargs):
        made.append(Owner(**kwargs))
        return made[-1]

    yield make
    for owner in made:
        owner.close()


def frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def test_both_ends_talk_after_the_handshake(owners):
    one, two = owners(), owners()
    one.dial(2, two.endpoint.port)
    assert one.next() == ("opened", 2)
    many = [encode(Ping())] * 200
    one.do(lambda: [one.endpoint.send(2, payload) for payload in many])
    for payload in many:
        assert two.next() == ("received", 1, payload)
    two.do(lambda: (two.endpoint.send(1, many[0]), two.endpoint.close(1)))
    assert one.next() == ("received", 2, many[0])
    assert one.next() == ("closed", 2, False)


def test_a_large_frame_comes_whole_to_a_slow_reader(owners):
    one = owners()
    sock = one.known_insider()
    big = b'{"t":"Reject","code":1,"reason":"' + b"x" * (8 << 20) + b'"}'
    with sock:
        one.do(lambda: one.endpoint.send(1, big))
        got = bytearray()
        while len(got) < len(big) + 4:
            got += sock.recv(1 << 16)
        assert bytes(got) == frame(big)
        sock.sendall(frame(big))
        assert one.next() == ("received", 1, big)


def test_a_peer_that_does_not_read_is_given_up(owners, monkeypatch):
    monkeypatch.setattr(transport, "MAX_WAITING_BYTES", 8 << 20)
    one = owners()
    with one.known_insider():
        for _ in range(4):
            one.do(lambda: one.endpoint.send(1, bytes(4 << 20)))
        assert one.next() == ("closed", 1, False)


@pytest.mark.parametrize("address", ["no.such.host", "", "127.0.0.1\0", "::1"])
def test_what_is_no_address_is_never_looked_up(owners, address):
    one = owners()
    one.dial(2, 9, address)
    assert one.next() == ("closed", 2, False)


def test_a_dial_without_a_descriptor_fails_and_no_more(owners, monkeypatch):
    one = owners()

    def no_socket(*_):
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(transport.socket, "socket", no_socket)
        one.dial(2, 9)
        one.do(lambda: (one.endpoint.dial(4, "127.0.0.1", 9, 1.0), one.endpoint.close(4)))
    assert one.next() == ("closed", 2, False)
    one.dial(6, one.endpoint.port)  # it goes on
    assert {one.next()[:2] for _ in range(1)} <= {("opened", 6), ("closed", 6)}


@pytest.mark.parametrize("port", [0, -1, 1 << 16, 1 << 40])
def test_what_is_no_port_is_not_dialed(owners, port):
    one = owners()
    one.dial(2, port)
    assert one.next() == ("closed", 2, False)


def test_a_dead_port_refuses(owners):
    one = owners()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    one.dial(2, port)
    assert one.next() == ("closed", 2, True)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400\r\n\r\n", MAGIC + bytes(64), b""])
def test_a_dialed_end_that_does_not_prove_itself_never_opens(owners, answer):
    one = owners()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one.dial(2, server.getsockname()[1], timeout_s=0.5)
        sock, _ = server.accept()
        with sock:
            sock.sendall(answer)
            if answer:
                assert one.next()[0] == "stranger"
            assert one.next() == ("closed", 2, False)


def test_who_is_slow_is_cut_off_and_the_others_are_served(owners):
    one = owners()
    one.endpoint._door._most, one.endpoint._door._patience_s = 20, 0.6
    strangers = [
        socket.create_connection(("127.0.0.1", one.endpoint.port), DEADLINE_S) for _ in range(60)
    ]
    begun = time.monotonic()
    with one.insider() as sock:  # behind all of them
        sock.sendall(frame(encode(Ping())))
        while (seen := one.next())[0] == "stranger":
            pass
        assert seen[0] == "received"
    assert time.monotonic() - begun < 5.0
    for stranger in strangers:
        assert stranger.recv(1) == b""
        stranger.close()


def test_out_of_descriptors_nobody_is_lost_and_nothing_spins(owners, monkeypatch):
    one = owners()
    accept, calls = one.endpoint._listener.accept, []

    class Poor:
        def __getattr__(self, name):
            return getattr(listener, name)

        def accept(self):
            calls.append(time.monotonic())
            if len(calls) <= 3:
                raise OSError(24, "Too many open files")
            return accept()

    listener = one.endpoint._listener
    monkeypatch.setattr(one.endpoint, "_listener", Poor())
    monkeypatch.setattr(one.reactor, "watch", _unwrapped(one.reactor.watch, listener))
    monkeypatch.setattr(one.reactor, "unwatch", _unwrapped(one.reactor.unwatch, listener))
    with one.insider() as sock:
        sock.sendall(frame(encode(Ping())))
        assert one.next()[0] == "received"
    assert calls[3] - calls[0] > 0.25, "it waited between tries"


def _unwrapped(function, listener):
    def call(sock, *args):
        return function(sock if isinstance(sock, socket.socket) else listener, *args)

    return call


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.binary(max_size=300)
        | st.binary(max_size=60).map(frame)
        | st.sampled_from([b"\xff" * 8, MAGIC * 9, frame(encode(Ping())), frame(b"[" * 99999)]),
        max_size=4,
    ),
)
def test_no_stream_of_bytes_stops_the_thread(proved, chunks):
    """Whoever sends it, insider or stranger."""
    with contextlib.closing(Owner()) as one:
        if proved:
            sock = one.insider()
        else:
            sock = socket.create_connection(("127.0.0.1", one.endpoint.port), DEADLINE_S)
        with sock, contextlib.suppress(OSError):
            for chunk in chunks:
                sock.sendall(chunk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        with one.insider() as other:  # it still serves
            other.sendall(frame(encode(Ping())))
            while one.next()[0] != "received":
                pass


def test_nothing_is_unpickled_from_a_socket_or_a_board():
    """Pickle is imported by the restricted readers of checkpoints alone; nothing is evaluated."""
    allowed = {f"elastic_trainer/checkpoint/{name}.py" for name in ("index", "restricted")}
    found = set()
    for path in [*ROOT.glob("elastic_trainer/**/*.py"), *ROOT.glob("launcher/**/*.py")]:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if {"pickle", "marshal", "shelve", "dill", "cloudpickle"} & {
                module.split(".")[0] for module in modules
            }:
                found.add(name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, name
    assert found <= allowed
