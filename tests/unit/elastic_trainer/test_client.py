"""MembershipClient over real sockets and a real FileBoard."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from insider import Insider

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.messages import Join, Welcome, Won, decode, encode
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    EpochFormed,
    JobStopped,
    Member,
    Notice,
    StopAsked,
    WorkersEnded,
    WorkersRunning,
)
from elastic_trainer.agent.wire.client import MembershipClient
from elastic_trainer.agent.wire.network import Endpoint, NetworkThread
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import Event
from elastic_trainer.worker.secret import MAGIC, Badge, make_secret

DEADLINE_S = 10.0


class Node:
    """One client with a network of its own, as in an agent process."""

    def __init__(
        self,
        run: Path,
        name: str,
        *,
        nodes: int,
        job: str = "job1",
        start: int = 0,
        badge: Badge | None = None,
        log: Callable[[str, int | None, dict], None] | None = None,
        takeover_refused_s: float = 0.5,
    ) -> None:
        self.network = NetworkThread()
        self.network.start()
        badge = badge or Badge(make_secret(run), "agents", "run1")
        self.endpoint = Endpoint(self.network, "127.0.0.1", badge=badge)
        self.me = Member(
            agent_id=f"{name}-{start}",
            node=name,
            host=name,
            address="127.0.0.1",
            port=self.endpoint.port,
            workers=1,
        )
        self.events: list[tuple[str, dict]] = []
        self.client = MembershipClient(
            me=self.me,
            job=job,
            settings=Settings(
                ladder=Ladder.data_parallel(max_nodes=nodes, min_nodes=1, workers=1),
                heartbeat_s=0.2,
                dead_after_s=1.0,
                reconnect_s=0.5,
                dial_timeout_s=0.5,
                takeover_s=1.5,
                takeover_refused_s=takeover_refused_s,
                lease_renew_s=0.4,
            ),
            board=FileBoard(run / "board"),
            endpoint=self.endpoint,
            network=self.network,
            open_store=lambda epoch, _beside: ("127.0.0.1", 1000 + epoch),
            log=log or (lambda event, epoch, fields: self.events.append((event, fields))),
        )
        self.client.start()

    def wait_for(self, kind: type[Notice], **fields: object) -> Notice:
        """Return the next notice of `kind` with these fields."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            notice = self.client.notice(0.1)
            if isinstance(notice, kind) and all(
                getattr(notice, name) == value for name, value in fields.items()
            ):
                return notice
        pytest.fail(f"{self.me.node} never got {kind.__name__} {fields}")

    def die(self) -> None:
        """Vanish: every socket closes at once, nothing is said."""
        self.client.close()
        self.network.stop()


@pytest.fixture
def nodes(tmp_path):
    alive: list[Node] = []

    def make(name: str, **kwargs) -> Node:
        alive.append(Node(tmp_path, name, **kwargs))
        return alive[-1]

    yield make
    for node in alive:
        if node.network._thread.is_alive():
            node.die()


def form(make, count: int) -> tuple[list[Node], EpochFormed]:
    group = [make(f"node{i}", nodes=count) for i in range(count)]
    formed = [node.wait_for(EpochFormed) for node in group]
    assert all(f == formed[0] for f in formed)
    for node in group:
        node.client.report(WorkersRunning(epoch=formed[0].epoch, step=1))
    return group, formed[0]


def coordinator_of(group: list[Node], formed: EpochFormed) -> Node:
    return next(node for node in group if node.me.node == formed.coordinator)


def follower_of(group: list[Node], formed: EpochFormed) -> Node:
    return next(node for node in group if node.me.node != formed.coordinator)


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_nodes_form_one_epoch(nodes):
    _, formed = form(nodes, 4)
    assert [m.node for m in formed.members] == ["node0", "node1", "node2", "node3"]
    assert formed.rung.num_nodes == 4
    assert formed.store_port == 1000 + formed.epoch


def test_a_dead_member_ends_the_epoch_and_the_rest_form_another(nodes):
    group, formed = form(nodes, 4)
    victim = follower_of(group, formed)
    begun = time.monotonic()
    victim.die()
    rest = [node for node in group if node is not victim]
    for node in rest:
        assert node.wait_for(EpochAborted).victims == (victim.me.node,)
        assert len(node.wait_for(EpochFormed).members) == 3
    assert time.monotonic() - begun < 2.0


def test_a_dead_coordinator_is_succeeded(nodes):
    group, formed = form(nodes, 4)
    victim = coordinator_of(group, formed)
    victim.die()
    rest = [node for node in group if node is not victim]
    formed2 = [node.wait_for(EpochFormed) for node in rest]
    assert {f.epoch for f in formed2} == {formed2[0].epoch}
    assert formed2[0].epoch > formed.epoch
    assert {m.node for m in formed2[0].members} == {node.me.node for node in rest}


def test_growth_waits_for_a_boundary(nodes):
    group, _ = form(nodes, 3)
    group[2].die()
    rest = group[:2]
    smaller, _ = [node.wait_for(EpochFormed) for node in rest]
    for node in rest:
        node.client.report(WorkersRunning(epoch=smaller.epoch, step=4))
    back = nodes("node2", nodes=3, start=1)
    for node in rest:
        node.wait_for(AskWorkers, epoch=smaller.epoch)
        node.client.report(WorkersEnded(epoch=smaller.epoch, finished=False, step=5))
    for node in [*rest, back]:
        assert len(node.wait_for(EpochFormed).members) == 3


def test_a_second_job_is_refused_and_the_live_one_named(nodes):
    form(nodes, 2)
    intruder = nodes("node9", nodes=2, job="job2")
    stopped = intruder.wait_for(JobStopped)
    assert stopped.code == 93
    assert "job1" in stopped.reason


def test_a_dead_jobs_run_is_taken_over(nodes):
    group, formed = form(nodes, 2)
    for node in group:
        node.die()
    again = [nodes(f"node{i}", nodes=2, job="job2", start=1) for i in range(2)]
    for node in again:
        assert node.wait_for(EpochFormed).epoch > formed.epoch


@pytest.mark.process
def test_who_waits_for_a_dead_jobs_lease_leaves_the_board_alone(nodes, monkeypatch):
    """At most one read in two seconds, after the first few."""
    first = nodes("node0", nodes=2)
    until(lambda: first.client.is_coordinator)
    first.die()
    reads, get_state = [], FileBoard.get_state

    def noted(board):
        reads.append(time.monotonic())
        return get_state(board)

    monkeypatch.setattr(FileBoard, "get_state", noted)
    waits = nodes("node1", nodes=2, job="job2", takeover_refused_s=60.0)
    begun, looked_s = time.monotonic() + 3.0, 8.0
    with pytest.raises(queue.Empty):
        waits.client._notices.get(timeout=3.0 + looked_s)
    assert reads
    assert len([when for when in reads if when >= begun]) <= looked_s / 2


def test_everybody_stops_on_request_after_saving(nodes):
    group, formed = form(nodes, 3)
    group[1].client.report(StopAsked(reason="SIGTERM"))
    for node in group:
        node.wait_for(AskWorkers, epoch=formed.epoch)
        node.client.report(WorkersEnded(epoch=formed.epoch, finished=False, step=7))
    assert {node.wait_for(JobStopped).code for node in group} == {91}


def test_the_last_step_ends_the_run(nodes):
    group, formed = form(nodes, 2)
    for node in group:
        node.client.report(WorkersEnded(epoch=formed.epoch, finished=True, step=9))
    assert {node.wait_for(JobStopped).code for node in group} == {0}
    late = nodes("node5", nodes=2, job="job3")
    assert late.wait_for(JobStopped).code == 0


@pytest.mark.process
def test_joins_are_answered_while_storage_is_slow(nodes, tmp_path, monkeypatch):
    """40 agents join beside writes of 150 ms each, on the record and on the board."""
    slow_s, joins = 0.15, 40
    write, swap = os.write, FileBoard.set_state

    def slow_write(fd, data):
        if threading.current_thread().name.startswith("append-"):
            time.sleep(slow_s)
        return write(fd, data)

    def slow_swap(*args):
        time.sleep(slow_s)
        return swap(*args)

    monkeypatch.setattr(os, "write", slow_write)
    monkeypatch.setattr(FileBoard, "set_state", slow_swap)
    log = EventLog(tmp_path, "agent-node0", node="node0")
    first = nodes("node0", nodes=joins + 2, log=log.emit_later)
    until(lambda: first.client.is_coordinator)
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        known = [stack.enter_context(insider(tmp_path, first.endpoint)) for _ in range(joins)]
        for i, agent in enumerate(known):
            member = Member(
                agent_id=f"a{i}", node=f"n{i}", host=f"n{i}", address="127.0.0.1", port=1, workers=1
            )
            agent.say(encode(Join(member=member, job="job1", last_epoch=0, ready=False)))
        for agent in known:
            assert isinstance(decode(agent.hear()), Welcome)
        assert time.monotonic() - begun < joins * slow_s / 2
        first.die()
    log.close(timeout_s=DEADLINE_S)
    lines = (tmp_path / "events" / "agent-node0.jsonl").read_text().splitlines()
    names = [event.event for line in lines if (event := Event.decode(line))]
    assert names.count("member.joined") == joins


def stranger(node: Node) -> socket.socket:
    return socket.create_connection(("127.0.0.1", node.endpoint.port), timeout=5)


def insider(run: Path, endpoint: Endpoint) -> Insider:
    return Insider(endpoint.port, Badge(make_secret(run), "agents", "run1"), 5)


def cut_off(sock: socket.socket) -> bool:
    try:
        while sock.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_crash_of_the_network_thread_closes_its_sockets_and_is_told(tmp_path):
    told: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    network = NetworkThread(crashed=told.put)
    badge = Badge(make_secret(tmp_path), "agents", "run1")
    endpoint = Endpoint(network, "127.0.0.1", badge=badge)

    class Broken:
        def received(self, conn, payload):
            raise ZeroDivisionError

    network.start()
    network.call(lambda: endpoint.serve(Broken()))
    with insider(tmp_path, endpoint) as known:
        known.say(b"x")
        assert isinstance(told.get(timeout=5), ZeroDivisionError)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", endpoint.port), timeout=5)
        assert cut_off(known.sock)
    network.stop()


def still_forms(group: list[Node], formed: EpochFormed) -> None:
    """A member dies, and the others form the next epoch as ever."""
    victim = follower_of(group, formed)
    victim.die()
    for node in group:
        if node is not victim:
            assert len(node.wait_for(EpochFormed).members) == len(group) - 1


FRAMES = [
    b"",
    b"{}",
    b'{"t":"Nope"}',
    b"\xff" * 30,
    b"[" * 200_000,
    (
        b'{"t":"Join","job":"job1","last_epoch":0,"member":{"agent_id":"x","node":"\xc2\xb2",'
        b'"address":"no.such.host","port":99999,"workers":1}}'
    ),
    b'{"t":"Told","kind":"WorkersFailed","report":{"failure":[]}}',
]


def test_garbage_of_an_insider_is_cut_off_and_does_no_harm(nodes, tmp_path):
    group, formed = form(nodes, 2)
    target = coordinator_of(group, formed).endpoint
    for payload in FRAMES:
        with insider(tmp_path, target) as known:
            known.say(payload)
            if b"Told" in payload:  # from one that has not joined: nobody listens
                known.sock.shutdown(socket.SHUT_WR)
            assert cut_off(known.sock), payload[:60]
    with insider(tmp_path, target) as known:
        known.sock.sendall(struct.pack(">I", 2**31) + bytes(16))  # the first bytes are enough
        assert cut_off(known.sock)
    still_forms(group, formed)


def test_a_winner_that_the_board_does_not_know_is_not_followed(nodes, tmp_path):
    """One of the run says to coordinate, under a term of the future and one that is near."""
    group, formed = form(nodes, 3)
    follower = follower_of(group, formed)
    for term in (2, 1 << 40):
        with insider(tmp_path, follower.endpoint) as known:
            known.say(encode(Won(term=term, coordinator="nobody-0")))
            with pytest.raises(EOFError):
                known.hear()  # a Join would come to a winner that is believed
    still_forms(group, formed)
    assert not any(event == "member.lost" for event, _ in follower.events)


def test_a_strangers_bytes_are_no_message(nodes):
    group, formed = form(nodes, 2)
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack(">I", 12) + b'{"t":"Ping"}',
        struct.pack(">I", 2**31),
        MAGIC + b"x" * 200,
    ):
        with stranger(group[0]) as sock:
            sock.sendall(garbage)
            assert cut_off(sock), garbage
    refused = [fields for event, fields in group[0].events if event == "peer.refused"]
    assert {fields["address"] for fields in refused} == {"127.0.0.1"}
    still_forms(group, formed)


@pytest.mark.parametrize("how", ["another run", "another secret"])
def test_an_agent_that_cannot_prove_itself_never_joins(nodes, tmp_path, how):
    group, formed = form(nodes, 2)
    other = tmp_path / "other"
    badge = Badge(
        make_secret(other if how == "another secret" else tmp_path),
        "agents",
        "run2" if how == "another run" else "run1",
    )
    outsider = nodes("node9", nodes=3, badge=badge)
    until(lambda: any(event == "peer.refused" for event, _ in outsider.events))
    assert not any(f.get("member") == "node9" for node in group for _, f in node.events)
    outsider.die()
    still_forms(group, formed)


@pytest.mark.process
def test_a_flood_of_half_open_connections_keeps_nobody_out(nodes, tmp_path):
    """Twice as many as the limiter lets in, and a member that comes in between."""
    group, formed = form(nodes, 3)
    victim = follower_of(group, formed)
    rest = [node for node in group if node is not victim]
    target = coordinator_of(group, formed)
    target.endpoint.limiter._most = 50
    socks = [stranger(target) for _ in range(100)]
    for slow in socks[::2]:
        slow.sendall(MAGIC[:3])
    victim.die()
    for node in rest:
        assert len(node.wait_for(EpochFormed).members) == 2
        node.client.report(WorkersRunning(epoch=formed.epoch + 1, step=2))
    back = nodes(victim.me.node, nodes=3, start=1)
    for node in rest:
        node.wait_for(AskWorkers)
        node.client.report(WorkersEnded(epoch=formed.epoch + 1, finished=False, step=5))
    for node in [*rest, back]:
        assert len(node.wait_for(EpochFormed).members) == 3
    assert len(target.endpoint.limiter) <= 50
    for sock in socks:
        assert cut_off(sock)  # in the end all of them
        sock.close()
    refused = [fields for event, fields in target.events if event == "peer.refused"]
    assert len(refused) == 1, "the log is not flooded"
