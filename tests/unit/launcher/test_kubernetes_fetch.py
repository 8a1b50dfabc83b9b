"""What is fetched of a run whose board is a ConfigMap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_trainer.agent.boards.board import BoardState, Commit
from elastic_trainer.agent.boards.open_board import ELSEWHERE, read_board
from launcher.backends.kubernetes.documents import CONFIG_MAP
from launcher.backends.kubernetes.fetch import Fetcher
from launcher.backends.kubernetes.words import Seen
from launcher.errors import PermanentError

STATE = BoardState(epoch=4, commits=(Commit(epoch=4, step=7, dir="d", manifest_sha256="0" * 64),))


class Maps:
    """An API that has ConfigMaps alone."""

    def __init__(self, state):
        self.state = state

    def get(self, resource, namespace, name):
        assert (resource, namespace, name) == (CONFIG_MAP, "train", "llama-board")
        return None if self.state is None else {"data": {"state": self.state}}


def fetch(run_dir, state):
    """Fetch a run of which all files are here already."""
    bundle = SimpleNamespace(run_dir="/holdfast/llama")
    storage = SimpleNamespace(api=Maps(state), bundle=bundle, namespace="train")
    Fetcher(storage=storage, run_dir=run_dir).fetch(Seen(job=None), mark="")


@pytest.fixture
def board(tmp_path):
    folder = tmp_path / "board"
    folder.mkdir()
    return folder


def test_the_board_in_the_cluster_is_kept_beside_the_run(tmp_path, board):
    (board / ELSEWHERE).write_text("kubernetes://train/llama-board\n")
    fetch(tmp_path, None)
    with pytest.raises(OSError, match="no pod"):
        read_board(board, env={})
    fetch(tmp_path, STATE.encode().decode())
    assert read_board(board, env={}) == STATE


def test_a_board_of_files_has_come_with_the_files(tmp_path, board):
    fetch(tmp_path, "not asked for")
    assert list(board.iterdir()) == []


@pytest.mark.parametrize("state", ["{}", "no JSON"])
def test_what_is_no_board_is_told(tmp_path, board, state):
    (board / ELSEWHERE).write_text("kubernetes://train/llama-board\n")
    with pytest.raises(PermanentError, match="the board of the run cannot be read"):
        fetch(tmp_path, state)
