"""The last state is saved again while storage refuses it, without processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_trainer.state.errors import CheckpointError
from elastic_trainer.train import trainer
from elastic_trainer.train.trainer import LAST_SAVE_WAITS_S, SaveRefusedError, Trainer
from elastic_trainer.worker.heartbeat import Request


@pytest.fixture
def waits(monkeypatch):
    waits = []
    monkeypatch.setattr(trainer, "time", SimpleNamespace(sleep=waits.append))
    return waits


def save(*outcomes, asked=Request.NONE, others=(0.0, 0.0)):
    """Save with these outcomes in turn; `others` is what another rank votes each time."""
    left = list(outcomes)
    Trainer._save_last(
        SimpleNamespace(
            step=7,
            _flush=lambda: None,
            heartbeat=SimpleNamespace(beat=lambda **_: None, asked=lambda: asked),
            checkpoints=SimpleNamespace(save=lambda _step, wait: wait and left.pop(0)),
            sum_over_ranks=lambda votes: votes.add_(votes.new_tensor(others)),
        )
    )
    return left


def test_it_is_tried_until_it_works(waits):
    assert save(False, False, True, None) == [None]
    assert waits == [2.0, 4.0]


@pytest.mark.parametrize(("outcome", "others"), [(False, (0.0, 0.0)), (True, (1.0, 0.0))])
def test_it_is_given_up_in_10_minutes_whichever_rank_fails(waits, outcome, others):
    with pytest.raises(CheckpointError, match="HF305"):
        save(*[outcome] * 24, others=others)
    assert sum(waits) == sum(LAST_SAVE_WAITS_S) == 600.0
    assert max(waits) == 30.0


@pytest.mark.parametrize(
    ("asked", "others"), [(Request.STOP, (0.0, 0.0)), (Request.NONE, (0.0, 1.0))]
)
def test_a_stop_ends_the_waiting(waits, asked, others):
    with pytest.raises(SaveRefusedError):
        save(False, asked=asked, others=others)
    assert waits == []
    assert save(True, asked=asked, others=others) == []
