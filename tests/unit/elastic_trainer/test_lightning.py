"""What the integration with Lightning adapts and refuses; tests/cluster runs it."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning", reason="not installed: pip install -e '.[dev]'")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from elastic_trainer.integrations.lightning import LightningCallback
from elastic_trainer.worker.progress import ApiError

pytestmark = pytest.mark.filterwarnings("ignore:The `srun` command")


@pytest.fixture(autouse=True)
def _half_of_the_ranks(monkeypatch):
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "2")  # of one that is here


def set_up(folder, *callbacks, **options):
    """Return a Trainer as the callback has it when `fit` begins."""
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, default_root_dir=folder,
        callbacks=[LightningCallback(), *callbacks], **options,
    )  # fmt: skip
    trainer.callbacks[0].setup(trainer, LightningModule(), "fit")
    return trainer


def test_counts_of_batches_follow_the_ranks(tmp_path):
    counts = {"val_check_interval": 3, "limit_train_batches": 10}
    trainer = set_up(tmp_path, accumulate_grad_batches=2, **counts)
    now = (trainer.accumulate_grad_batches, *(getattr(trainer, name) for name in counts))
    assert now == (4, 6, 20)
    trainer.callbacks[0].setup(trainer, LightningModule(), "fit")
    assert trainer.accumulate_grad_batches == 4, "of what was given, however often"


def test_an_accumulation_that_a_schedule_sets_is_refused_on_fewer_ranks(tmp_path, monkeypatch):
    schedule = GradientAccumulationScheduler({0: 2, 1: 4})
    with pytest.raises(ApiError, match=r"HF535 1 of 2 .*GradientAccumulationScheduler"):
        set_up(tmp_path, schedule)
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "1")
    assert set_up(tmp_path, schedule).accumulate_grad_batches == 1
