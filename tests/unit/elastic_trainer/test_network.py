"""Endpoints over real sockets: frames come whole, and no bytes stop the thread."""

from __future__ import annotations

import ast
import contextlib
import queue
import select
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from insider import Insider

from elastic_trainer.agent.membership.messages import Ping, decode, encode
from elastic_trainer.agent.wire import network as wire
from elastic_trainer.agent.wire.network import Endpoint, NetworkThread
from elastic_trainer.worker.secret import (
    KEY_BYTES,
    MAGIC,
    NONCE_BYTES,
    TAG_BYTES,
    AuthError,
    Badge,
    Handshake,
    Secret,
)

ROOT = Path(__file__).parents[3]
BADGE = Badge(Secret(bytes(KEY_BYTES)), "agents", "run1")
DEADLINE_S = 10.0


class Owner:
    """Decodes what comes, as an agent does, and notes everything."""

    def __init__(self, badge: Badge = BADGE) -> None:
        self.crashes: list[BaseException] = []
        self.seen: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        self.network = NetworkThread(crashed=self.crashes.append)
        self.endpoint = Endpoint(self.network, "127.0.0.1", badge=badge)
        self.network.start()
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
        self.network.call(lambda: (what(), done.set()))
        assert done.wait(DEADLINE_S), self.crashes

    def next(self):
        return self.seen.get(timeout=DEADLINE_S)

    def dial(self, conn, port, address="127.0.0.1", timeout_s=5.0):
        self.do(lambda: self.endpoint.dial(conn, address, port, timeout_s))

    def insider(self) -> Insider:
        return Insider(self.endpoint.port, BADGE, DEADLINE_S)

    def known_insider(self) -> Insider:
        """Return an insider that the endpoint's owner has heard of."""
        insider = self.insider()
        insider.say(encode(Ping()))
        assert self.next()[0] == "received"
        return insider

    def serves(self) -> None:
        """See that one of the run is heard, whatever else comes."""
        with self.insider() as insider:
            insider.say(encode(Ping()))
            while self.next()[0] != "received":
                pass

    def close(self):
        self.network.call(self.endpoint.shut)
        self.network.stop()
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
    one.do(lambda: [one.endpoint.send((2,), payload) for payload in many])
    for payload in many:
        assert two.next() == ("received", 1, payload)
    two.do(lambda: (two.endpoint.send((1,), many[0]), two.endpoint.close(1)))
    assert one.next() == ("received", 2, many[0])
    assert one.next() == ("closed", 2, False)


def test_a_large_frame_comes_whole_to_a_slow_reader(owners):
    one = owners()
    insider = one.known_insider()
    big = b'{"t":"Reject","code":1,"reason":"' + b"x" * (8 << 20) + b'"}'
    with insider:
        one.do(lambda: one.endpoint.send((1,), big))
        assert insider.hear() == big
        insider.say(big)
        assert one.next() == ("received", 1, big)


def test_a_peer_that_does_not_read_is_given_up(owners, monkeypatch):
    monkeypatch.setattr(wire, "MAX_WAITING_BYTES", 8 << 20)
    one = owners()
    with one.known_insider():
        for _ in range(4):
            one.do(lambda: one.endpoint.send((1,), bytes(4 << 20)))
        assert one.next() == ("closed", 1, False)


class Relay:
    """Stands between a dialer and a listener, passes on all they say, and knows no secret."""

    def __init__(self, port: int) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(port,))
        self._thread.start()

    def _run(self, port):
        near, _ = self._server.accept()
        with near, socket.create_connection(("127.0.0.1", port), DEADLINE_S) as far:
            other = {near: far, far: near}
            with contextlib.suppress(OSError):
                while True:
                    for sock in select.select([near, far], [], [], DEADLINE_S)[0]:
                        data = sock.recv(65536)
                        if not data:
                            return
                        other[sock].sendall(data)

    def close(self):
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._server.close()


def test_a_relay_that_passes_the_handshake_on_is_refused_by_both_ends(owners):
    """Neither takes it for the other, and none of what it says after that for a message."""
    one, two = owners(), owners()
    with contextlib.closing(Relay(two.endpoint.port)) as relay:
        one.dial(2, relay.port)
        refused = one.next()
        assert refused[:2] == ("stranger", "127.0.0.1")
        assert f"dials 127.0.0.1 {relay.port}" in refused[2]
        assert one.next() == ("closed", 2, False)
    with contextlib.closing(Relay(two.endpoint.port)) as relay:
        insider = None
        with pytest.raises(AuthError):
            insider = Insider(relay.port, BADGE, DEADLINE_S)
        assert insider is None
    assert not any(two.seen.get_nowait()[0] == "received" for _ in range(two.seen.qsize()))


def test_a_listener_refuses_a_dialer_that_a_relay_has_deceived(owners):
    """The dialer proves the ends that it sees; the listener sees others."""
    two = owners()
    with socket.create_connection(("127.0.0.1", two.endpoint.port), DEADLINE_S) as sock:
        ends = (sock.getsockname(), ("127.0.0.1", 9))  # what it believes to have dialed
        shake = Handshake(BADGE, dials=True, ends=ends)
        sock.sendall(shake.first())
        challenge = sock.recv(4096)
        shake._theirs = challenge[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
        sock.sendall(shake._proof(dialer=True))
        assert two.next()[0] == "stranger"
        assert sock.recv(1) == b""


@pytest.mark.parametrize("what", ["changed", "repeated", "injected", "out of order"])
def test_a_frame_that_the_peer_did_not_send_ends_the_connection(owners, what):
    one = owners()
    ping = encode(Ping())
    with one.known_insider() as insider:
        first, second = insider.frame(ping), insider.frame(ping)
        sent = {
            "changed": first[:-1] + b"]",
            "repeated": first + first,
            "injected": struct.pack(">I", len(ping)) + bytes(TAG_BYTES) + ping,
            "out of order": second + first,
        }[what]
        insider.sock.sendall(sent)
        if what == "repeated":
            assert one.next() == ("received", 1, ping)
        assert one.next()[0] == "stranger"
        assert one.next() == ("closed", 1, False)
        with pytest.raises(EOFError):
            insider.hear()
    assert one.seen.empty()


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
        patch.setattr(wire.socket, "socket", no_socket)
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


@pytest.mark.process
def test_who_is_slow_is_cut_off_and_the_others_are_served(owners, monkeypatch):
    one = owners()
    one.endpoint.limiter._most = 20
    monkeypatch.setattr(wire, "PATIENCE_S", 0.6)
    strangers = [
        socket.create_connection(("127.0.0.1", one.endpoint.port), DEADLINE_S) for _ in range(60)
    ]
    begun = time.monotonic()
    with one.insider() as insider:  # behind all of them
        insider.say(encode(Ping()))
        while (seen := one.next())[0] == "stranger":
            pass
        assert seen[0] == "received"
    assert time.monotonic() - begun < 5.0
    for stranger in strangers:
        assert stranger.recv(1) == b""
        stranger.close()


def test_out_of_descriptors_nobody_is_lost_and_nothing_spins(owners, monkeypatch):
    accept, calls = socket.socket.accept, []

    def poor(listener):
        calls.append(time.monotonic())
        if len(calls) <= 3:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", poor)
    one = owners()
    with one.known_insider():
        pass
    assert calls[3] - calls[0] > 0.25, "it waited between tries"


@pytest.mark.parametrize("turns", range(4))
def test_a_stop_closes_who_was_just_accepted(owners, monkeypatch, turns):
    """The loop stops as many turns after a connection came."""
    one, accepted, accept = owners(), [], socket.socket.accept

    def noted(listener):
        accepted.append(accept(listener))
        return accepted[-1]

    monkeypatch.setattr(socket.socket, "accept", noted)
    with socket.socket() as sock:

        def come(turns):
            if turns == 0:
                one.network.loop.stop()
            else:
                one.network.loop.call_soon(come, turns - 1)

        def connect():
            sock.connect(("127.0.0.1", one.endpoint.port))
            come(turns)

        one.network.call(connect)
        one.network._thread.join(DEADLINE_S)
        assert not one.network._thread.is_alive()
    assert [taken.fileno() for taken, _ in accepted] == [-1] * len(accepted)
    assert turns == 0 or accepted


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
            insider = one.insider()
            sock, chunks = insider.sock, [*map(insider.frame, chunks), *chunks]
        else:
            sock = socket.create_connection(("127.0.0.1", one.endpoint.port), DEADLINE_S)
        with sock, contextlib.suppress(OSError):
            for chunk in chunks:
                sock.sendall(chunk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        one.serves()


@pytest.mark.process
def test_nothing_is_unpickled_from_a_socket_or_a_board():
    """Pickle is imported by the restricted reader of checkpoints alone; only scripts are run."""
    runs_scripts = "elastic_trainer/worker/fresh_process.py"
    allowed = {f"elastic_trainer/state/{name}.py" for name in ("index",)}
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
                assert name == runs_scripts or node.func.id not in {"eval", "exec"}, name
    assert found <= allowed
