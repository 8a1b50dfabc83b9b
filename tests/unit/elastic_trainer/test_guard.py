"""What a worker does about wrong numbers: the board, the baseline, the events, the saved state."""

from __future__ import annotations

import json
import math
from datetime import timedelta

import pytest
import torch
from torch import nn

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Commit, update
from elastic_trainer.plan.anomalies import FINE, AnomalyAction, AnomalyRecord, Skip, Void
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    NumbersSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.state.collective import StepFailedError
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.state import TrainingState
from elastic_trainer.train.guard import RECENT, Guard
from elastic_trainer.worker.rank_grid import RankGrid

pytestmark = pytest.mark.usefixtures("one_rank")
WAIT = timedelta(seconds=20)
SHAPE = ModelShape(num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8)


def config_of(root, **numbers):
    return TrainConfig(
        name="t",
        run_id="run-1",
        model_name="tiny",
        model=SHAPE,
        ladder=Ladder((Rung(num_nodes=1, layout=ParallelLayout(), micro_batches=1),)),
        gpus_per_node=1,
        device="cpu",
        train=TrainSection(seq_len=8, global_batch=1, steps=100),
        data=DataSection(path="nowhere"),
        checkpoint=CheckpointSection(dir=str(root / "checkpoints"), every_s=None),
        elastic=ElasticSection(),
        numbers=NumbersSection(**{"window": 8, **numbers}),
    )


def guard_of(root, *, board=None, epoch=1, steps=(), **numbers):
    """A guard of an epoch that has `steps` on storage."""
    commits = tuple(
        Commit(epoch=epoch, step=step, dir=f"{step}", manifest_sha256="") for step in steps
    )
    shared = FileBoard(root / "board")
    if shared.get_state() is None:
        update(shared, lambda _: BoardState(epoch=epoch, commits=commits))
    events = EventLog(root, "w")
    return Guard(
        config_of(root, **numbers), board or shared, events, ranks=RankGrid(WAIT), epoch=epoch
    )


def on_board(root):
    return BoardState.decode(FileBoard(root / "board").get_state()[0])


def events(root):
    return [json.loads(line) for line in (root / "events" / "w.jsonl").read_text().splitlines()]


class Gone:
    """A board whose storage does not answer."""

    name = "gone"

    def get_state(self):
        raise OSError(5, "Input/output error")


def test_a_usual_step_writes_nothing(tmp_path):
    guard = guard_of(tmp_path, board=Gone())
    for step in range(1, 20):
        assert guard.decide(step, 2.0, 1.0) == FINE
    assert not (tmp_path / "events").exists()


def test_a_skip_is_on_the_board_before_training_goes_on(tmp_path):
    guard = guard_of(tmp_path)
    assert guard.decide(5, math.nan, 1.0).action is AnomalyAction.SKIP
    assert on_board(tmp_path).numbers == AnomalyRecord((Skip(5, 5),))
    assert guard.passes_over(5)
    [event] = events(tmp_path)
    assert (event["step"], event["recorded"], event["loss"]) == (5, True, "nan")


@pytest.mark.parametrize("why", ["fenced", "gone"])
def test_a_skip_that_cannot_be_recorded_is_made_all_the_same_and_says_so(tmp_path, why):
    guard = guard_of(tmp_path, board=Gone() if why == "gone" else None)
    if why == "fenced":
        update(FileBoard(tmp_path / "board"), lambda _: BoardState(epoch=2))
    assert guard.decide(5, math.inf, 1.0).action is AnomalyAction.SKIP
    assert events(tmp_path)[0]["recorded"] is False
    assert not on_board(tmp_path).numbers.skips


def test_a_rollback_voids_and_drops_what_is_newer(tmp_path):
    guard = guard_of(tmp_path, steps=(4, 8, 12), non_finite="rollback", rollback_steps=3)
    assert guard.decide(13, math.nan, 1.0).action is AnomalyAction.ROLLBACK
    state = on_board(tmp_path)
    assert [commit.step for commit in state.commits] == [4, 8]
    assert state.numbers == AnomalyRecord((Skip(11, 13),), (Void(1, 10),))
    assert [event["event"] for event in events(tmp_path)] == ["numbers.rollback", "numbers.anomaly"]


def test_a_rollback_that_cannot_be_recorded_is_none(tmp_path):
    fenced = guard_of(tmp_path, steps=(4,), non_finite="rollback")
    update(FileBoard(tmp_path / "board"), lambda _: BoardState(epoch=2))
    with pytest.raises(StepFailedError):
        fenced.decide(30, math.nan, 1.0)
    with pytest.raises(StepFailedError, match="OSError"):
        guard_of(tmp_path, board=Gone(), non_finite="rollback").decide(30, math.nan, 1.0)


def test_the_baseline_is_saved_with_the_state_and_restored(tmp_path):
    guard = guard_of(tmp_path, loss_spike="stop")
    for step in range(1, 13):
        guard.decide(step, 2.0 + step / 100, 1.0)
    save(tmp_path, 12, keeps=guard.keeps)
    again = guard_of(tmp_path, loss_spike="stop")
    assert again.decide(13, 90.0, 1.0) == FINE  # it knows nothing yet
    again = restored(tmp_path, again)
    assert again.keeps[RECENT].equal(guard.keeps[RECENT]) is False  # NaN is not NaN
    assert again.keeps[RECENT].nan_to_num().equal(guard.keeps[RECENT].nan_to_num())
    spike = again.decide(13, 90.0, 1.0)
    assert (spike.action, spike) == (AnomalyAction.STOP, guard.decide(13, 90.0, 1.0))


def test_a_checkpoint_without_a_baseline_begins_a_new_one(tmp_path):
    save(tmp_path, 12, keeps={})
    guard = restored(tmp_path, guard_of(tmp_path))
    assert guard.keeps[RECENT].isnan().all()


def manager(root, keeps):
    model = nn.Linear(2, 2)
    return CheckpointManager(
        CheckpointPolicy.of(config_of(root), epoch=1, layout=ParallelLayout()),
        FileBoard(root / "board"),
        EventLog(root, "manager"),
        torch.device("cpu"),
        ranks=RankGrid(WAIT),
        state=TrainingState(model, (torch.optim.AdamW(model.parameters()),), keeps),
    )


def save(root, step, *, keeps):
    update(FileBoard(root / "board"), lambda _: BoardState(epoch=1))
    made = manager(root, keeps)
    assert made.save(step, wait=True)
    made.close()


def restored(root, guard):
    """Put the guard's tensors through a restore of the newest checkpoint."""
    made = manager(root, guard.keeps)
    assert made.restore() == 12
    guard.restored(made.record)
    made.close()
    return guard
