"""The keeper over real sockets: copies are kept, damaged ones are not, garbage does no harm."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import hostile_items as hostile
import pytest
import torch
from insider import Insider
from keeper_place import place_of
from test_snapshot_image import KEY, write_image

from elastic_trainer.agent.keeper import MAX_UNPROVED, Keeper
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state.snapshot_tier import SnapshotTier
from elastic_trainer.state.snapshots.image import MAC_BYTES, PAGE, Header, Image, PeerError
from elastic_trainer.state.snapshots.peer import (
    KEEPER_LABEL,
    Authenticate,
    Channel,
    KeeperAddress,
    PeerLink,
    read_peers,
    write_peers,
)
from elastic_trainer.worker.secret import (
    KEY_BYTES,
    AuthError,
    AuthSession,
    Badge,
    Secret,
    authenticate,
)

HOME = "127.0.0.1"


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    folder = tmp_path / "kept"
    folder.mkdir()
    keeper = Keeper(folder, HOME, authenticate=prove(b"k", server=True), key=KEY)
    keeper.start()
    yield keeper
    keeper.close()


def prove(key: bytes, *, server: bool) -> Authenticate:
    badge = Badge(Secret(key * KEY_BYTES), KEEPER_LABEL, "run")
    return partial(authenticate, badge=badge, server=server, timeout_s=2)


def dial(keeper: Keeper, key: bytes = b"k") -> PeerLink:
    peer = KeeperAddress(node="b", address=HOME, port=keeper.port)
    return PeerLink(peer, prove(key, server=False))


def put(
    link: PeerLink, path: Path, *, slot: int = 0, damage: bool = False, committed: bool = False
) -> Header:
    image = Image(path)
    header = image.verify(KEY)
    with memoryview(image.map) as whole, whole[PAGE : header.total_bytes] as body:
        raw = bytearray(body)
    image.close()
    if damage:
        raw[len(raw) // 2] ^= 1
    link.put(header, slot, memoryview(raw), committed=committed)
    return header


def test_a_copy_is_kept_listed_verified_and_read(tmp_path: Path, keeper: Keeper) -> None:
    payload = random.Random(1).randbytes(128 + 3000)
    written = write_image(tmp_path / "image", payload=payload)
    with dial(keeper) as link:
        put(link, tmp_path / "image", slot=1)
        (held,) = link.held()
        assert (held.header, held.file, held.node) == (written, "copy-e2-r1-s1", "b")
        assert [part.name for part in link.verified_index(held.file)] == ["model.a", "model.b"]
        first, second = link.read(held.file, [(0, 10), (128, 3000)], KEY)
        assert bytes(first) == payload[:10]
        assert bytes(second) == payload[128:]


def test_a_slot_is_written_again(tmp_path: Path, keeper: Keeper) -> None:
    with dial(keeper) as link:
        for step in (7, 8, 9):
            write_image(tmp_path / "image", step=step)
            put(link, tmp_path / "image", slot=step % 2)
        assert sorted(held.header.step for held in link.held()) == [8, 9]


def test_a_copy_is_known_to_be_committed_as_far_as_was_said(tmp_path: Path, keeper: Keeper) -> None:
    with dial(keeper) as link:
        for committed in (False, True, False):  # a later copy takes the place of one before
            write_image(tmp_path / "image")
            put(link, tmp_path / "image", committed=committed)
            (held,) = link.held()
            assert held.committed is committed
        link.commit(held.file)
        (held,) = link.held()
        assert held.committed
        with pytest.raises(PeerError, match="copy-e9"):
            link.commit("copy-e9-r1-s0")


def test_a_copy_that_came_damaged_is_refused_and_not_listed(tmp_path: Path, keeper: Keeper) -> None:
    write_image(tmp_path / "image")
    with dial(keeper) as link:
        with pytest.raises(PeerError):
            put(link, tmp_path / "image", damage=True)
        assert link.held() == []
        put(link, tmp_path / "image")  # the link is still good
        assert len(link.held()) == 1


def test_a_writer_that_dies_midway_leaves_nothing_that_counts(
    tmp_path: Path, keeper: Keeper
) -> None:
    header = write_image(tmp_path / "image")
    with dial(keeper) as link:
        put(link, tmp_path / "image")
        assert len(link.held()) == 1
        link._channel.send({"op": "put", "header": asdict(header), "slot": 0, "times": 1})
        link._sock.sendall(b"x" * 100)
    deadline = time.monotonic() + 10
    with dial(keeper) as link:
        while link.held():
            assert time.monotonic() < deadline, "a torn copy is still listed"


def test_older_epochs_are_let_go_and_take_no_more_copies(tmp_path: Path, keeper: Keeper) -> None:
    write_image(tmp_path / "image")  # of epoch 2
    with dial(keeper) as link:
        put(link, tmp_path / "image")
        link.free(2)
        assert len(link.held()) == 1
        for rank, make in enumerate(hostile.KINDS.values(), start=10):
            make(tmp_path / "kept" / f"own-e0-r{rank}-s0")
        assert len(link.held()) == 1
        link.free(3)
        assert link.held() == []
        assert [path.is_dir() for path in (tmp_path / "kept").iterdir()] == [True]
        with pytest.raises(PeerError, match=r"epoch 2\b"):
            put(link, tmp_path / "image")


def test_what_is_rotten_in_memory_is_said(tmp_path: Path, keeper: Keeper) -> None:
    write_image(tmp_path / "image")
    with dial(keeper) as link:
        put(link, tmp_path / "image")
        path = tmp_path / "kept" / "copy-e2-r1-s0"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        with pytest.raises(PeerError, match=r"\bMAC\b"):
            link.verified_index(path.name)


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "image"])
def test_only_images_are_given_out(keeper: Keeper, file: str) -> None:
    for ask in (
        lambda link: link.verified_index(file),
        lambda link: link.commit(file),
        lambda link: link.read(file, [(0, 1)], KEY),
    ):
        with dial(keeper) as link, pytest.raises(PeerError):
            ask(link)


def test_a_span_outside_the_image_is_refused(tmp_path: Path, keeper: Keeper) -> None:
    write_image(tmp_path / "image")
    for span in ((0, 1 << 30), (-1, 4), (4, -1)):
        with dial(keeper) as link:
            put(link, tmp_path / "image")
            with pytest.raises(PeerError):
                link.read("copy-e2-r1-s0", [span], KEY)


def test_many_pieces_arrive_as_they_are_whatever_the_buffers_take(
    tmp_path: Path, keeper: Keeper
) -> None:
    draw = random.Random(3)
    payload = draw.randbytes(128 + 3000)
    write_image(tmp_path / "image", payload=payload)
    begins = [draw.randrange(3000) for _ in range(3000)]
    spans = [(at, draw.choice([0, 1, 100, 3000 - at])) for at in begins]
    with dial(keeper) as link:
        put(link, tmp_path / "image")
        found = link.read("copy-e2-r1-s0", spans, KEY)
    assert [bytes(one) for one in found] == [payload[at : at + n] for at, n in spans]


def test_a_reader_that_leaves_midway_leaves_no_image_mapped(
    tmp_path: Path, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashed: list[object] = []  # what is still looked at cannot be unmapped
    monkeypatch.setattr(threading, "excepthook", crashed.append)
    write_image(tmp_path / "image")
    with dial(keeper) as link:
        put(link, tmp_path / "image")
        spans = [[0, 3000]] * 10_000  # more than any buffer takes
        link._channel.send({"op": "get", "file": "copy-e2-r1-s0", "spans": spans})
        link._channel.receive()
    for thread in threading.enumerate():
        if thread.name == "holdfast-keeper-peer":
            thread.join(10)
            assert not thread.is_alive()
    assert crashed == []


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\x00\x00\x00\x02[]", b'\x00\x00\x00\x07{"op":1'],
)
def test_garbage_ends_its_connection_only(tmp_path: Path, keeper: Keeper, garbage: bytes) -> None:
    write_image(tmp_path / "image")
    with dial(keeper) as link:
        with socket.create_connection((HOME, keeper.port), timeout=5) as sock:
            sock.sendall(garbage)
            with contextlib.suppress(OSError):  # closed with our garbage unread
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b""
        put(link, tmp_path / "image")


def test_who_does_not_know_the_secret_is_cut_off(keeper: Keeper) -> None:
    with pytest.raises(PeerError) as caught:
        dial(keeper, b"x")
    assert isinstance(caught.value.__cause__, AuthError)
    with dial(keeper) as link:
        assert link.held() == []


@pytest.mark.process
def test_who_says_nothing_is_cut_off_in_time(keeper: Keeper) -> None:
    with socket.create_connection((HOME, keeper.port), timeout=10) as sock:
        assert sock.recv(1) == b""


def test_strangers_make_way_for_who_proves_itself(keeper: Keeper) -> None:
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(socket.create_connection((HOME, keeper.port), timeout=10))
            for _ in range(2 * MAX_UNPROVED)
        ]
        begun = time.monotonic()
        assert strangers[0].recv(1) == b""
        assert time.monotonic() - begun < 1.5, "the first of them, before its time was over"
        with dial(keeper) as link:
            assert link.held() == []
            assert len(keeper._unproved) <= MAX_UNPROVED


def test_closing_ends_every_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    prover = prove(b"k", server=True)
    keeper = Keeper(tmp_path, HOME, authenticate=prover, key=KEY, links=["127.0.0.2"])
    keeper.start()
    with dial(keeper) as link:
        link.held()
        keeper.close()
        mine = [thread for thread in threading.enumerate() if thread not in before]
        for thread in mine:
            thread.join(5)
        assert not any(thread.is_alive() for thread in mine)


def test_a_keeper_that_is_not_there_is_said() -> None:
    with socket.create_server((HOME, 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerError, match=r"^node7 ") as caught:
        PeerLink(KeeperAddress(node="node7", address=HOME, port=port), prove(b"k", server=False))
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


@pytest.mark.parametrize(
    ("machines", "keeps", "told"),
    [("aab", 2, []), ("aba", 1, []), ("aaa", 1, [("snapshot.exposed", {"machine": "a"})])],
)
def test_a_worker_leaves_its_copy_on_another_machine_as_the_agents_say(
    tmp_path: Path, keeper: Keeper, machines: str, keeps: int, told: list[object]
) -> None:
    """Only the node that should be asked has a keeper."""
    peers = [
        KeeperAddress(
            node=f"n{i}", address=HOME, port=keeper.port if i == keeps else 0, machine=machine
        )
        for i, machine in enumerate(machines)
    ]
    write_peers(tmp_path / "peers", peers[:3], peers[3:], (), ())
    own = tmp_path / "own"
    own.mkdir()
    place = place_of(
        own,
        node="n0",
        **read_peers(tmp_path / "peers"),
        authenticate=prove(b"k", server=False),
        image_key=KEY,
    )
    said: list[object] = []
    tier = SnapshotTier(
        place,
        ParallelLayout(dp=3),
        rank=0,
        epoch=1,
        every_steps=1,
        emit=lambda event, step, **fields: said.append((event, {"machine": fields["machine"]})),
    )
    assert tier.take({"model": {"w": torch.ones(4)}}, 7)
    tier.wait(60)
    assert tier.votes() == (1.0, 0.0, 0.0)
    with dial(keeper) as link:
        assert [holding.header.step for holding in link.held()] == [7]
    assert said == told
    tier.close()


@pytest.mark.parametrize(("local_rank", "by"), [(0, 0), (1, 1), (2, 2), (3, 0), (4, 1)])
def test_copies_go_by_a_nodes_links_in_turn_and_by_its_own_address_where_one_is_cut(
    tmp_path: Path,
    local_rank: int,
    by: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    came: list[str] = []
    prove_here = prove(b"k", server=True)

    def noted(sock: socket.socket) -> AuthSession:
        came.append(sock.getsockname()[0])
        return prove_here(sock)

    with socket.create_server((HOME, 0)) as listener:
        nobody = listener.getsockname()[:2]
    links, told = ["127.0.3.1", "127.0.3.2"], PeerLink.links
    monkeypatch.setattr(PeerLink, "links", lambda link: [*told(link), nobody])
    (tmp_path / "kept").mkdir()
    keeper = Keeper(tmp_path / "kept", HOME, authenticate=noted, key=KEY, links=links)
    keeper.start()
    (tmp_path / "own").mkdir()
    here = KeeperAddress(node="a", address=HOME, port=0)
    there = KeeperAddress(node="b", address=HOME, port=keeper.port)
    place = place_of(
        tmp_path / "own",
        node="a",
        local_rank=local_rank,
        members=(here, there),
        authenticate=prove(b"k", server=False),
        image_key=KEY,
    )
    tier = SnapshotTier(
        place, ParallelLayout(dp=2), rank=0, epoch=1, every_steps=1, emit=lambda *_, **__: None
    )
    for step in (7, 8):
        assert tier.take({"model": {"w": torch.ones(4)}}, step)
        tier.wait(60)
        assert tier.votes() == (1.0, 0.0, 0.0)
        tier.agreed(2.0, 0.0)
    assert came == [HOME, *links[by : by + 1]], "connected once, not for each snapshot"
    assert (HOME in capfd.readouterr().err) == (by == 2)
    tier.close()
    keeper.close()


def test_peers_are_written_and_read(tmp_path: Path) -> None:
    peers = tuple(
        KeeperAddress(node=f"n{i}", address=HOME, port=i, machine=f"m{i}") for i in range(5)
    )
    write_peers(tmp_path / "peers", peers[:2], peers[2:3], peers[3:4], peers[4:])
    assert read_peers(tmp_path / "peers") == {
        "members": peers[:2],
        "spares": peers[2:3],
        "left": peers[3:4],
        "lost": peers[4:],
    }


HEADER = {
    "epoch": 2,
    "step": 7,
    "rank": 1,
    "shard": 1,
    "num_shards": 4,
    "num_ranks": 8,
    "index_bytes": 10,
    "payload_bytes": 100,
    "mac": "01" * MAC_BYTES,
}
INFINITE, NO_NUMBER = float("inf"), float("nan")


@pytest.mark.parametrize(
    "request_",
    [
        *({"op": "put", "header": HEADER, "slot": s} for s in (7, -1, INFINITE, True, "0", None)),
        *(
            {"op": "put", "header": {**HEADER, name: value}, "slot": 0}
            for name in ("epoch", "rank", "payload_bytes", "index_bytes")
            for value in (-1, 1 << 62, 1 << 70, 1.0, NO_NUMBER, INFINITE, None, [])
        ),
        *({"op": "put", "header": {**HEADER, "mac": m}, "slot": 0} for m in ("", "01", "zz", 1)),
        {"op": "put", "header": {**HEADER, "more": 1}, "slot": 0},
        *({"op": "put", "header": h, "slot": 0} for h in ({}, [], None, "x")),
        *({"op": "commit", "file": file} for file in ("../secret", 7, None, [])),
        *({"op": "free", "before_epoch": e} for e in (INFINITE, NO_NUMBER, -1, "1", None, [])),
        *({"op": "verify", "file": f} for f in (None, 7, [], "x" * 99)),
        *(
            {"op": "get", "file": "copy-e2-r1-s0", "spans": spans}
            for spans in (None, 1, [1], [[0]], [[0, INFINITE]], [[NO_NUMBER, 1]], [["0", 1]])
        ),
        {"op": None},
        {"op": [INFINITE]},
        {},
    ],
)
def test_a_malformed_request_ends_its_connection_and_nothing_else(
    tmp_path: Path, keeper: Keeper, request_: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that nobody catches on a thread ends the agent."""
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    write_image(tmp_path / "image")
    with dial(keeper) as link:
        put(link, tmp_path / "image")
        link._channel.send(request_)
        with pytest.raises((EOFError, ConnectionError)):
            link._channel.receive()
    with dial(keeper) as link:
        assert [held.file for held in link.held()] == ["copy-e2-r1-s0"]
    assert not uncaught


@pytest.mark.parametrize("raw", [b"[" * 100_000, b"7", b'{"op":NaN', b"\xff"])
def test_what_is_no_message_ends_its_connection_and_nothing_else(
    keeper: Keeper, raw: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    uncaught: list[object] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)
    with Insider(keeper.port, Badge(Secret(b"k" * KEY_BYTES), KEEPER_LABEL, "run"), 5) as insider:
        insider.say(raw)
        with pytest.raises((EOFError, ConnectionError)):
            insider.hear()
    with Insider(keeper.port, Badge(Secret(b"k" * KEY_BYTES), KEEPER_LABEL, "run"), 5) as insider:
        insider.sock.sendall(b"\xff" * 20)  # a length of 4 GiB
        with pytest.raises((EOFError, ConnectionError)):
            insider.hear()
    assert not uncaught


@pytest.mark.parametrize(
    "answer",
    [{"images": 1}, {"images": [{}]}, {"images": [{"header": {}, "file": 1}]}, {"macs": None}, {}],
)
def test_a_malformed_answer_of_a_keeper_is_an_error_of_that_peer(answer: dict[str, object]) -> None:
    with socket.create_server((HOME, 0)) as listener:
        port = listener.getsockname()[1]

        def answer_once() -> None:
            sock, _ = listener.accept()
            with sock:
                channel = Channel(sock, prove(b"k", server=True))
                for _ in range(3):
                    channel.receive()
                    channel.send(answer)

        thread = threading.Thread(target=answer_once)
        thread.start()
        with PeerLink(
            KeeperAddress(node="b", address=HOME, port=port), prove(b"k", server=False)
        ) as link:
            for ask in (
                link.held,
                lambda: link.verified_index("copy-e2-r1-s0"),
                lambda: link.read("copy-e2-r1-s0", [(0, 1)], KEY),
            ):
                with pytest.raises(PeerError):
                    ask()
        thread.join(10)
        assert not thread.is_alive()
