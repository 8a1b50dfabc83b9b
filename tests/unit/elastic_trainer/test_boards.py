"""What holds of both kinds of board: files, and a ConfigMap."""

from __future__ import annotations

import contextlib
import dataclasses
import json

import hostile_items as hostile
import pytest
from at_once import at_once
from board_bench import account, board_of, certificate, server
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.kubernetes_board import SWAP, KubernetesBoard, _answer_of
from elastic_trainer.board.state import (
    BoardBusyError,
    BoardState,
    Commit,
    Ended,
    Lease,
    Lineage,
    Origin,
    Sizes,
    Training,
    update,
)
from elastic_trainer.plan.anomalies import AnomalyRecord, Skip, Void

__all__ = ["account", "certificate", "server"]  # fixtures


@pytest.fixture(params=["file", "kubernetes"])
def boards(request, tmp_path):
    """Return a function that opens the same board once more."""
    if request.param == "file":
        return lambda: FileBoard(tmp_path / "board")
    server, account = (request.getfixturevalue(name) for name in ("server", "account"))
    return lambda: board_of(server, account)


def test_empty_then_swapped(boards):
    board = boards()
    assert board.get_state() is None
    content, first, won = board.set_state(b"one")
    assert (content, won) == (b"one", True)
    assert board.get_state() == (b"one", first)
    assert board.set_state(b"late") == (b"one", first, False)
    content, second, won = board.set_state(b"two", first)
    assert (content, won) == (b"two", True)
    assert second != first
    assert board.set_state(b"late", first) == (b"two", second, False)


def test_a_token_of_another_board_is_lost_on_an_empty_one(boards):
    assert boards().set_state(b"x", 7) is None
    assert boards().set_state(b"x", "7") is None


def test_a_token_of_another_kind_is_lost(boards):
    board = boards()
    _, token, _ = board.set_state(b"one")
    other = "1" if isinstance(token, int) else 1
    assert board.set_state(b"late", other) == (b"one", token, False)


def test_a_second_board_sees_what_the_first_wrote(boards):
    one, two = boards(), boards()
    _, token, _ = one.set_state(b"")
    assert two.get_state() == (b"", token)
    _, newer, won = two.set_state(b"next", token)
    assert won
    assert one.set_state(b"late", token) == (b"next", newer, False)


@pytest.mark.process
def test_torchelastics_own_rendezvous_meets_on_it(boards):
    """Boards are back ends of torchelastic: its DynamicRendezvousHandler knows nothing of ours."""
    store, found, handlers = HashStore(), [], []

    def join() -> None:
        handler = DynamicRendezvousHandler.from_backend(
            "run", store, boards(), min_nodes=3, max_nodes=3, local_addr="127.0.0.1"
        )
        info = handler.next_rendezvous()
        found.append((info.rank, info.world_size))
        handlers.append(handler)

    at_once(3, join)
    assert all(handler.shutdown() for handler in handlers)
    assert sorted(found) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.process
def test_eight_writers_lose_no_update(boards):
    def write() -> None:
        board = boards()
        for _ in range(8):
            update(board, lambda s: dataclasses.replace(s, epoch=s.epoch + 1), 10_000)

    at_once(8, write)
    assert BoardState.decode(boards().get_state()[0]).epoch == 64


def test_update_gives_up_when_told_and_writes_nothing_unchanged(boards):
    board = boards()
    assert update(board, lambda _: None) is None
    assert update(board, lambda state: state) == BoardState()
    assert board.get_state() is None


def test_update_applies_to_the_newest_state(boards):
    board, other = boards(), boards()
    lease = Lease(holder="a", node="n0", job="j", address="127.0.0.1", port=1, term=1)
    commit = Commit(epoch=1, step=5, dir="d", manifest_sha256="0" * 64)
    update(board, lambda state: dataclasses.replace(state, lease=lease))
    tried = []

    def change(state: BoardState) -> BoardState:
        if not tried:
            tried.append(1)
            update(other, lambda s: dataclasses.replace(s, epoch=9))
        return dataclasses.replace(state, commits=(commit,))

    assert update(board, change) == BoardState(epoch=9, lease=lease, commits=(commit,))


def test_update_ends_after_its_attempts(boards):
    board, other = boards(), boards()

    def change(state: BoardState) -> BoardState:
        update(other, lambda s: dataclasses.replace(s, epoch=s.epoch + 1))
        return dataclasses.replace(state, epoch=-1)

    with pytest.raises(BoardBusyError, match="3 swaps"):
        update(board, change, attempts=3)


@given(contents=st.lists(st.binary(max_size=64), min_size=1, max_size=6))
def test_any_bytes_come_back(boards, contents):
    board = boards()
    for content in contents:
        current = board.get_state()
        assert board.set_state(content, current[1] if current else None)[2]
        assert boards().get_state()[0] == content


COMMIT = Commit(epoch=2, step=5, dir="step-000000005-e000002", manifest_sha256="0", t_unix=1.7e9)
STATE = BoardState(
    epoch=3, commits=(COMMIT,), ended=Ended(job="1", code=1, reason="x"),
    lease=Lease(holder="a", node="n0", job="1", address="::1", port=1, term=1),
    numbers=AnomalyRecord((Skip(4, 4),), (Void(1, 4),)),
    lineage=Lineage((Origin(1, 0, 0), Origin(2, 1, 4))),
    trainings=(Training(name="1", final=COMMIT),), sizes=Sizes(trained=(2,), dropped=(3,)),
)  # fmt: skip


def test_a_state_that_is_spoilt_is_refused_or_says_what_can_be_used_and_written_again():
    assert BoardState.decode(STATE.encode()) == STATE
    for kind, text in hostile.spoilt_inside(json.loads(STATE.encode())):
        try:
            state = BoardState.decode(text.encode())
        except ValueError:
            continue
        assert BoardState.decode(state.encode()) == state, kind
        assert state.kept is not None
        for epoch in range(4):
            state.allows(epoch, 5)
            state.lineage.began(Origin(epoch, 0, 5))


@dataclasses.dataclass
class Odd:
    """An API server with an odd answer."""

    text: str

    status = 200

    def request(self, *_):
        return _answer_of(self)

    def read(self, _):
        return self.text.encode()

    def getheader(self, _, default):
        return default


def test_a_config_map_that_is_spoilt_is_an_error_of_storage_or_a_board():
    good = {
        "metadata": {"resourceVersion": "5", "annotations": {SWAP: "1"}, "labels": {"a": "b"}},
        "data": {"state": STATE.encode().decode()},
        "binaryData": {"a": "b"},
    }
    for _, text in hostile.spoilt_inside(good):
        board = KubernetesBoard(Odd(text), "train", "b", sleep=lambda _: None)
        for act in (board.get_state, lambda board=board: board.set_state(b"x", "5")):
            with contextlib.suppress(OSError):
                act()
