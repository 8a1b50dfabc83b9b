from __future__ import annotations

import threading

from checkpoint_world import Trainer, commits, events, run_world

LAYOUTS = {"dp1": (1, 1), "dp2": (2, 1), "dp3": (3, 1), "dp4": (4, 1), "hsdp2x2": (4, 2)}


def train_and_save(run, replicate):
    trainer = Trainer(run, replicate=replicate)
    for _ in range(3):
        trainer.step()
    assert trainer.save(3)
    digests = trainer.digests()
    trainer.close()
    return digests


def restore_each(runs, replicate):
    out = []
    for run in runs:
        trainer = Trainer(run, seed=99, epoch=2, replicate=replicate)
        assert trainer.restore() == 3
        out.append(trainer.digests())
        trainer.close()
    trainer.step()  # the restored optimizer works
    return out


def test_any_layout_reads_what_any_layout_wrote_bitwise(tmp_path):
    runs, written = [], []
    for name, (world, replicate) in LAYOUTS.items():
        run = tmp_path / name
        run.mkdir()
        by_rank = run_world(world, tmp_path, train_and_save, run, replicate)
        assert all(digests == by_rank[0] for digests in by_rank)
        assert len(by_rank[0]) == 5 + 5 * 3
        runs.append(run)
        written.append(by_rank[0])
    for world, replicate in LAYOUTS.values():
        for read in run_world(world, tmp_path, restore_each, runs, replicate):
            assert read == written
    assert events(runs[0], "checkpoint.restored")[0].step == 3


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
