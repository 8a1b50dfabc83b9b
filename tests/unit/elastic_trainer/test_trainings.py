"""Several trainings of one script, on one board."""

from __future__ import annotations

import dataclasses
import json

import pytest

from elastic_trainer.board.state import BoardState, Commit, Origin, Training
from elastic_trainer.state.errors import FencedError
from elastic_trainer.state.manager import training_of
from elastic_trainer.state.manifest import (
    directory_name,
    superseded,
    with_commit,
    with_final,
    with_origin,
)
from elastic_trainer.worker.progress import ApiError


def commit(step, epoch=1):
    return Commit(epoch=epoch, step=step, dir=directory_name(step, epoch), manifest_sha256="0")


SFT = Training(name="sft", final=commit(10))
DPO = Training(name="dpo", begins=11)


def test_a_known_name_is_that_training_wherever_the_script_begins_it():
    assert training_of((SFT, DPO), "sft", 1) is SFT
    assert training_of((SFT, DPO), "dpo", 2) is DPO
    assert training_of((SFT, DPO), "dpo", 1) is DPO, "the script has left out the first"


@pytest.mark.parametrize("name", ["1", "sft"])
def test_the_first_one_begins_a_run(name):
    assert training_of((), name, 1) == Training(name=name)
    assert training_of((), name, 1).base == 0


def test_the_next_one_counts_on_from_the_last_state():
    begun = training_of((SFT,), "dpo", 2)
    assert (begun, begun.base) == (DPO, 10)
    nothing = Training(name="empty", final=commit(0))
    assert training_of((nothing,), "next", 2) == Training(name="next", begins=1)


@pytest.mark.parametrize(
    ("trainings", "name", "number"),
    [
        ((SFT,), "ppo", 1),
        ((SFT, DPO), "ppo", 2),
        ((SFT, DPO), "ppo", 3),
        ((DPO,), "2", 1),
    ],
)
def test_a_name_that_cannot_be_told_apart_is_refused(trainings, name, number):
    with pytest.raises(ApiError, match="HF538"):
        training_of(trainings, name, number)


def test_the_last_state_of_a_training_outlives_those_of_the_next():
    board = with_origin(BoardState(epoch=1), Origin(1, 0, 0), Training(name="sft"))
    assert board is not None
    for step in (5, 10):
        board = with_commit(board, commit(step), keep=2)
    board = with_final(board, 1, board.trainings[0], 10)
    board = with_origin(board, Origin(1, 1, 10), DPO)
    assert board is not None
    assert board.trainings == (SFT, DPO)
    for step in (11, 12, 13):
        board = with_commit(board, commit(step), keep=2)
    assert [each.step for each in board.commits] == [12, 13]
    assert [each.step for each in board.kept] == [10, 12, 13]
    names = [commit(step).dir for step in (5, 10, 11, 12, 13)]
    remove, _ = superseded(names, board.kept, epoch=1, keep_every_steps=None)
    assert remove == [commit(step).dir for step in (5, 11)]
    assert BoardState.decode(board.encode()) == board


def test_an_end_without_its_state_or_of_an_older_epoch_does_not_count():
    board = BoardState(epoch=2, commits=(commit(10),))
    with pytest.raises(FencedError):
        with_final(board, 2, SFT, 11)
    with pytest.raises(FencedError):
        with_final(board, 1, SFT, 10)
    marked = with_final(board, 2, SFT, 10)
    assert with_final(marked, 2, SFT, 10) == marked, "idempotent"


def test_a_board_of_an_older_version_has_none():
    raw = json.loads(BoardState(epoch=3, commits=(commit(5),)).encode())
    del raw["trainings"]
    assert BoardState.decode(json.dumps(raw).encode()).trainings == ()
    assert training_of((), "1", 1).begins == 0, "its states are those of the first"
    state = dataclasses.replace(BoardState(), trainings=(SFT, DPO))
    assert BoardState.decode(state.encode()).trainings == (SFT, DPO)
