"""Who can connect to a port of ours costs little; docs/security.md says how little."""

from __future__ import annotations

import ast
import contextlib
import http.client
import re
import select
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from test_network import BADGE as OF_AGENTS
from test_network import Owner
from torch.distributed import TCPStore

from elastic_trainer import metrics_server
from elastic_trainer.agent import keeper as keepers
from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.agent.metrics import NodeMetrics
from elastic_trainer.agent.node import AUTHENTICATE_S
from elastic_trainer.agent.rendezvous import EpochStore
from elastic_trainer.agent.settings import NodeStatus
from elastic_trainer.agent.wire import network
from elastic_trainer.metrics_server import MetricsServer
from elastic_trainer.state.snapshots.peer import KEEPER_LABEL, KeeperAddress, PeerLink
from elastic_trainer.worker.secret import (
    KEY_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Badge,
    Secret,
    authenticate,
)

ROOT = Path(__file__).parents[3]
HOME = "127.0.0.1"
OF_SNAPSHOTS = Badge(Secret(bytes(KEY_BYTES)), KEEPER_LABEL, "run1")
PATIENCE_S = 0.4
SERVED_WITHIN_S = 5.0
GET = b"GET /metrics HTTP/1.1\r\n"
HANDSHAKE_BYTES = len(MAGIC) + NONCE_BYTES + PROOF_BYTES
Collect = Callable[[], Iterable[Metric]]


class Listener(NamedTuple):
    port: int
    served: Callable[[], None]
    """One of ours asks, and is answered."""
    close: Callable[[], None]
    begin: bytes
    """What a stranger says to be taken for one that is slow."""


def metrics(_folder: Path) -> Listener:
    node = NodeMetrics("r", "n1", path=None, port=0)
    node.show(NodeStatus())
    node.start(HOME)

    def served() -> None:
        url = f"http://{HOME}:{node.port}/metrics"
        with urllib.request.urlopen(url, timeout=SERVED_WITHIN_S) as answer:
            assert b"holdfast_node_epoch" in answer.read()

    return Listener(node.port, served, node.close, GET)


def membership(_folder: Path) -> Listener:
    owner = Owner(OF_AGENTS)
    owner.endpoint.limiter._most = 50
    return Listener(owner.endpoint.port, owner.serves, owner.close, MAGIC)


def snapshots(folder: Path) -> Listener:
    prove = partial(authenticate, badge=OF_SNAPSHOTS, timeout_s=PATIENCE_S)
    keeper = Keeper(folder, HOME, authenticate=partial(prove, server=True), key=bytes(KEY_BYTES))
    keeper.start()

    def served() -> None:
        address = KeeperAddress(node="b", address=HOME, port=keeper.port)
        with PeerLink(address, partial(prove, server=False)) as link:
            assert link.held() == []

    return Listener(keeper.port, served, keeper.close, MAGIC)


def epoch_store(_folder: Path) -> Listener:
    store = EpochStore(HOME)
    _, port = store.open(1)

    def served() -> None:
        wait = timedelta(seconds=SERVED_WITHIN_S)
        client = TCPStore(HOME, port, is_master=False, timeout=wait)
        client.set("key", "value")
        assert client.get("key") == b"value"

    return Listener(port, served, store.close, b"\0")


OURS = [metrics, membership, snapshots]


@pytest.fixture
def open_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Callable[[Path], Listener]], Listener]]:
    """Open one whose patience ends soon."""
    for module in (metrics_server, network):
        monkeypatch.setattr(module, "PATIENCE_S", PATIENCE_S)
    with contextlib.ExitStack() as stack:

        def opened(kind: Callable[[Path], Listener]) -> Listener:
            listener = kind(tmp_path)
            stack.callback(listener.close)
            return listener

        yield opened


def dial(port: int) -> socket.socket:
    return socket.create_connection((HOME, port), timeout=SERVED_WITHIN_S)


def until_hung_up(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while sock.recv(1 << 16):
            pass


def drip(port: int, begin: bytes, ended: threading.Event) -> None:
    """Be one byte further every 20 ms, until hung up on."""
    with contextlib.suppress(OSError), dial(port) as sock:
        sock.sendall(begin)
        while not ended.wait(0.02):
            sock.sendall(b"x")


def stall(port: int, begin: bytes, ended: threading.Event) -> None:
    """Say a beginning on many connections and nothing more."""
    with contextlib.ExitStack() as stack:
        for _ in range(60):
            with contextlib.suppress(OSError):
                sock = stack.enter_context(dial(port))
                sock.sendall(begin[:3])
        ended.wait()


def flood(port: int, begin: bytes, ended: threading.Event) -> None:
    """Come and go."""
    while not ended.wait(0.001):
        with contextlib.suppress(OSError), dial(port) as sock:
            sock.sendall(begin)


def babble(port: int, begin: bytes, ended: threading.Event) -> None:
    """Say what nobody understands."""
    words = [b"\0\xff\r\n\r\n", b"\x16\x03\x01\x02\0\1", begin + b"x" * 70_000, b"\xff" * 64,
             GET + b"Accept: text/plain;version=1.x\r\n\r\n", b"GET http://[ HTTP/1.1\r\n\r\n",
             GET + b"X-A: b\r\n" * 200 + b"\r\n", b"POST / HTTP/1.1\r\n\r\n"]  # fmt: skip
    for word in words * 5:
        with contextlib.suppress(OSError), dial(port) as sock:
            sock.sendall(word)
        if ended.is_set():
            return


@pytest.mark.parametrize("offence", [drip, stall, flood, babble])
@pytest.mark.parametrize("kind", [*OURS, epoch_store])
def test_who_is_of_the_run_is_served_and_the_end_comes_whatever_others_do(
    open_listener, capfd, kind, offence
):
    listener, ended, before = open_listener(kind), threading.Event(), threading.active_count()
    others = [
        threading.Thread(target=offence, args=(listener.port, listener.begin, ended))
        for _ in range(2)
    ]
    try:
        for each in others:
            each.start()
        listener.served()
        assert threading.active_count() <= before + len(others) + keepers.MAX_UNPROVED + 5
        begun = time.monotonic()
        listener.close()
        assert time.monotonic() - begun < 1.0
    finally:
        ended.set()
        for each in others:
            each.join()
    if kind is not epoch_store:  # torch's own says what it does not understand
        assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", OURS)
def test_a_drip_ends_though_it_never_stops(open_listener, kind):
    listener = open_listener(kind)
    with dial(listener.port) as sock:
        begun = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in listener.begin + b"x" * 1000:
                sock.sendall(bytes([byte]))
                time.sleep(0.02)
        assert PATIENCE_S / 2 < time.monotonic() - begun < 5 * PATIENCE_S
    listener.served()


def test_too_many_of_one_host_make_way_for_another(open_listener, monkeypatch):
    monkeypatch.setattr(keepers, "MAX_UNPROVED", 3)
    monkeypatch.setitem(globals(), "PATIENCE_S", 10 * SERVED_WITHIN_S)
    listener = open_listener(snapshots)
    with contextlib.ExitStack() as stack:
        honest = stack.enter_context(
            socket.create_connection((HOME, listener.port), SERVED_WITHIN_S, ("127.0.0.2", 0))
        )
        flood = [stack.enter_context(dial(listener.port)) for _ in range(6)]
        for sock in flood[:4]:
            until_hung_up(sock)
        assert not select.select([honest], [], [], 0)[0]


def test_without_a_thread_a_keeper_loses_a_connection_and_no_more(open_listener, monkeypatch):
    listener, start, failed = open_listener(snapshots), threading.Thread.start, []

    def poor(thread: threading.Thread) -> None:
        if thread.name == "holdfast-keeper-peer" and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", poor)
    with dial(listener.port) as sock:
        until_hung_up(sock)
    assert failed
    listener.served()


def read_metrics(server: MetricsServer) -> bytes:
    with urllib.request.urlopen(f"http://{HOME}:{server.port}/", timeout=SERVED_WITHIN_S) as answer:
        return answer.read()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Collect], MetricsServer]]:
    monkeypatch.setattr(metrics_server, "PATIENCE_S", PATIENCE_S)
    with contextlib.ExitStack() as stack:

        def start(collect: Collect) -> MetricsServer:
            server = MetricsServer(HOME, 0, collect)
            server.start()
            stack.callback(server.close)
            return server

        yield start


def gauge(text: str) -> list[Metric]:
    return [GaugeMetricFamily("holdfast_x", text, 1.0)]


def test_who_does_not_read_the_answer_is_given_up(serve, capfd):
    server = serve(lambda: gauge("x" * (20 << 20)))
    with dial(server.port) as deaf:
        deaf.sendall(GET + b"\r\n")
        deadline = time.monotonic() + SERVED_WITHIN_S
        while not server._shown or server._readers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert len(read_metrics(server)) > 20 << 20
    assert capfd.readouterr().err == ""


def test_readers_are_bounded_in_number_and_the_next_one_is_served(serve, monkeypatch):
    monkeypatch.setattr(metrics_server, "MOST_READERS", 5)
    server, most = serve(lambda: gauge(f"{len(server._readers)}")), 5
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(dial(server.port)) for _ in range(3 * most)]
        assert int(re.search(rb"HELP holdfast_x (\d+)", read_metrics(server))[1]) <= most + 1
        for sock in stalled[:most]:
            until_hung_up(sock)


def test_metrics_that_fail_cost_the_answer_and_are_said_once(serve, capfd):
    broken = [True]

    def collect() -> list[Metric]:
        if broken:
            raise ZeroDivisionError("of ours")
        return gauge("all is well")

    server = serve(collect)
    for _ in range(3):
        with pytest.raises(http.client.RemoteDisconnected):
            read_metrics(server)
    broken.clear()
    assert b"all is well" in read_metrics(server)
    assert capfd.readouterr().err.count("Traceback") == 1


def test_a_close_before_the_first_reader_leaves_nothing():
    before = threading.active_count()
    server = MetricsServer(HOME, 0, lambda: gauge("x"))
    server.start()
    server.close()
    server.close()
    assert threading.active_count() == before


# -- the table ---------------------------------------------------------------------------------


LISTENS = {"create_server", "start_server", "start_unix_server", "start_http_server",
           "start_wsgi_server", "make_server", "HTTPServer", "ThreadingHTTPServer", "WSGIServer",
           "TCPServer", "ThreadingTCPServer", "UnixStreamServer", "UDPServer"}  # fmt: skip
NO_PORTS = {"injected.listen", "self._counter.heartbeat.listen", "heartbeat.listen"}
"""They listen to signals and to an agent's requests in memory."""
CLOSED_AT_ONCE = "elastic_trainer/agent/node.py"
"""Asks whether a port is free."""


def listens(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name.rpartition(".")[2] == "TCPStore":
        return any(
            each.arg == "is_master" and ast.unparse(each.value) != "False" for each in call.keywords
        )
    last = name.rpartition(".")[2]
    return last in LISTENS or (last == "listen" and name not in NO_PORTS)


def rows() -> dict[str, str]:
    """Return the rows of the table by the code they are about."""
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    section = text.partition("\n## What listens\n")[2].partition("\n## ")[0]
    found = [line for line in section.splitlines() if line.startswith("| ") and ".py`" in line]
    return {re.search(r"`(\S+\.py)`", line)[1]: line for line in found}


@pytest.mark.process
def test_the_table_has_all_that_listens():
    found = set()
    for package in ("elastic_trainer", "holdfast", "launcher"):
        for path in (ROOT / package).rglob("*.py"):
            calls = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if any(isinstance(each, ast.Call) and listens(each) for each in calls):
                found.add(str(path.relative_to(ROOT)))
    assert found == {*rows(), CLOSED_AT_ONCE}


@pytest.mark.parametrize(
    ("code", "limits"),
    [
        (
            "elastic_trainer/agent/wire/network.py",
            [f"{network.MOST_UNPROVED:,}", f"{HANDSHAKE_BYTES}", f"{network.PATIENCE_S:g} s",
             f"{network.PRESSED_S:g} s", f"queues {network.BACKLOG:,}"],
        ),
        (
            "elastic_trainer/agent/keeper.py",
            [f"{keepers.MAX_UNPROVED}", f"{keepers.MAX_CONNECTIONS}", f"{HANDSHAKE_BYTES}",
             f"{AUTHENTICATE_S:g} s", f"queues {keepers.QUEUE:,}"],
        ),
        (
            "elastic_trainer/metrics_server.py",
            [f"{metrics_server.MOST_READERS}", f"{1000 * metrics_server.EVERY_S:g} ms",
             f"{metrics_server.MAX_REQUEST_BYTES >> 10} KiB", f"{metrics_server.PATIENCE_S:g} s",
             f"{metrics_server.PATIENCE_S:g} s for the answer", f"queues {metrics_server.QUEUE}"],
        ),
    ],
)  # fmt: skip
def test_the_table_has_the_limits_of_the_code(code, limits):
    words = rows()[code].replace(f"`{code}`", "")
    for limit in limits:
        assert re.search(rf"(?<![\d.,]){re.escape(limit)}(?![\d.,]*\d)", words), limit
