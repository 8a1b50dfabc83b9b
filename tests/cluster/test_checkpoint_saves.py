"""What a save holds, whatever training does meanwhile."""

from __future__ import annotations

import threading

import torch.distributed as dist
from checkpoint_world import Trainer, commits, events, run_world
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from elastic_trainer.state.reader import read_index
from elastic_trainer.state.save import Writer
from elastic_trainer.state.state import Stager, TrainingState


def save_while_training(run):
    gate = threading.Event()

    def at(point):
        if point == "made":
            assert gate.wait(30)

    trainer = Trainer(run, at=at)
    trainer.step()
    saved = trainer.digests()
    assert trainer.save(1, wait=False)
    for _ in range(3):
        trainer.step()  # in-place updates of everything that was handed to the save
    assert trainer.manager.poll() is None
    skipped = trainer.save(4, wait=False)
    gate.set()
    assert trainer.save(4, wait=True)
    later = trainer.digests()
    trainer.step()
    trainer.close()
    return saved, later, skipped


def restore_step(run, expected):
    trainer = Trainer(run, seed=99, epoch=2)
    assert trainer.restore() == expected
    digests = trainer.digests()
    trainer.close()
    return digests


def test_staged_state_is_that_of_its_step_whatever_training_does_next(tmp_path):
    saved, later, skipped = run_world(2, tmp_path, save_while_training, tmp_path)[0]
    assert saved != later
    assert skipped is False
    assert "skipped" in events(tmp_path, "checkpoint.failed")[0].fields["reason"]
    assert commits(tmp_path) == [1, 4]
    assert [e.step for e in events(tmp_path, "step.committed")] == [1, 4]
    assert run_world(3, tmp_path, restore_step, tmp_path, 4)[0] == later
    (tmp_path / "checkpoints" / "step-000000004-e000001" / "manifest.json").unlink()
    assert run_world(1, tmp_path, restore_step, tmp_path, 1)[0] == saved


def two_threads_train(run):
    """Saves run beside the training's own collectives, every step."""
    trainer = Trainer(run, keep=2)
    started = 0
    for step in range(1, 25):
        trainer.step()
        started += trainer.save(step, wait=False)
        trainer.manager.poll()
    assert trainer.save(25)
    trainer.close()
    return started


def test_saving_beside_training_collectives(tmp_path):
    started = run_world(3, tmp_path, two_threads_train, tmp_path)
    assert started[0] == started[1] == started[2] >= 1
    assert commits(tmp_path)[-1] == 25
    skipped = events(tmp_path, "checkpoint.failed")
    assert len(skipped) == 24 - started[0]
    assert all("skipped" in e.fields["reason"] for e in skipped)


def save_by_dcp_too(run):
    trainer = Trainer(run, replicate=2)
    trainer.step()
    assert trainer.save(1)
    live = TrainingState(trainer.model, (trainer.optimizer,)).live(1, speaks=dist.get_rank() == 0)
    state = Stager().stage(live)
    dcp.save(state, storage_writer=Writer(run / "by-dcp"), planner=DefaultSavePlanner())
    trainer.close()


def test_the_index_is_the_one_that_dcp_writes_over_a_group_of_all_ranks(tmp_path):
    run_world(4, tmp_path, save_by_dcp_too, tmp_path)
    ours, its = (
        read_index((path / ".metadata").read_bytes())
        for path in (tmp_path / "checkpoints" / "step-000000001-e000001", tmp_path / "by-dcp")
    )
    assert ours.state_dict_metadata == its.state_dict_metadata
    assert ours.planner_data == its.planner_data
    assert ours.storage_data == its.storage_data
    assert len({info.relative_path for info in ours.storage_data.values()}) == 4
