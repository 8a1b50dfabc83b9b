"""A run has one board: where it is, who may open it, and what readers outside the cluster see."""

from __future__ import annotations

import pytest
from at_once import at_once
from board_bench import env_of
from config_map_server import FIRST_TOKEN, authority, serving

from elastic_trainer.board.address import BOARD_VARIABLE, BoardPlaceError, parse_address
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.kubernetes_board import KubernetesBoard
from elastic_trainer.board.open_board import elsewhere, keep_copy, open_board, read_board
from elastic_trainer.board.state import BoardState, Commit

ADDRESS = "kubernetes://train/llama-board"
STATE = BoardState(epoch=4, commits=(Commit(epoch=4, step=7, dir="d", manifest_sha256="0" * 64),))


@pytest.fixture
def env(tmp_path):
    cert, context = authority(tmp_path / "account")
    (cert.parent / "token").write_text(FIRST_TOKEN)
    with serving(context) as server:
        yield env_of(server, cert.parent)


def test_files_unless_somebody_says_otherwise(tmp_path):
    for address in (None, "", "file"):
        assert isinstance(open_board(tmp_path / "board", address, env={}), FileBoard)
    assert elsewhere(tmp_path / "board") is None
    assert elsewhere(tmp_path / "none") is None


def test_who_comes_later_is_led_to_the_board_of_the_run(tmp_path, env):
    folder = tmp_path / "run" / "board"
    assert open_board(folder, ADDRESS, env=env).set_state(STATE.encode())[2]
    assert elsewhere(folder) == ADDRESS
    later = open_board(folder, env=env)
    assert isinstance(later, KubernetesBoard)
    assert BoardState.decode(later.get_state()[0]) == STATE
    assert read_board(folder, env=env) == STATE
    for other in ("file", "kubernetes://train/other"):
        with pytest.raises(BoardPlaceError, match=f"HF521 .*{ADDRESS}"):
            open_board(folder, other, env=env)
        with pytest.raises(BoardPlaceError, match="HF521"):
            read_board(folder, env={**env, BOARD_VARIABLE: other})


def test_a_run_with_a_board_of_files_keeps_it(tmp_path, env):
    folder = tmp_path / "board"
    open_board(folder, env={}).set_state(STATE.encode())
    with pytest.raises(BoardPlaceError, match=r"HF521 .*--from"):
        open_board(folder, ADDRESS, env=env)
    assert elsewhere(folder) is None


def test_outside_the_cluster_the_copy_that_was_fetched_is_read(tmp_path, env):
    folder = tmp_path / "board"
    keep_copy(folder, STATE.encode(), ADDRESS)
    assert read_board(folder, env={}) == STATE
    assert read_board(folder, env=env) is None, "inside the board itself counts"
    with pytest.raises(OSError, match="KUBERNETES_SERVICE_HOST"):
        open_board(folder, env={})
    (folder / "copy.json").unlink()
    with pytest.raises(OSError, match="KUBERNETES_SERVICE_HOST"):
        read_board(folder, env={})
    with pytest.raises(ValueError, match="version"):
        keep_copy(folder, b"{}", ADDRESS)


def test_many_leave_the_same_word_at_once(tmp_path, env):
    folder = tmp_path / "board"

    def come() -> None:
        open_board(folder, ADDRESS, env=env)

    at_once(16, come)
    assert [path.name for path in folder.iterdir()] == ["elsewhere"]


@pytest.mark.parametrize(
    "bad",
    [
        "kubernetes://train",
        "kubernetes:///x",
        "kubernetes://Train/x",
        "kubernetes://train/x/y",
        "kubernetes://train/../x",
        "kubernetes://train/x?y",
        "https://x/y",
        "kubernetes://train/x\n",
        f"kubernetes://{'n' * 64}/x",
    ],
)
def test_what_is_no_address_is_refused(bad, tmp_path):
    with pytest.raises(BoardPlaceError, match=r"HF521 .*kubernetes://NAMESPACE/NAME"):
        parse_address(bad)
    (tmp_path / "elsewhere").write_text(bad + "x y")
    with pytest.raises(BoardPlaceError):
        open_board(tmp_path, env={})
