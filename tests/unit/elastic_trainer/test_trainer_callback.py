"""Hugging Face's Trainer on fewer ranks: what the callback adapts, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

pytest.importorskip("accelerate", reason="not installed: pip install -e '.[dev]'")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from elastic_trainer.integrations.steps import seed_step
from elastic_trainer.integrations.transformers import HoldfastCallback, _Progress
from elastic_trainer.worker.progress import ApiError

SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _half_of_the_ranks(monkeypatch):
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "2")  # of one that is here


class Shards(IterableDataset):
    """A stream in `count` shards, as one of `datasets`, which calls it by `name`."""

    def __init__(self, name, count):
        setattr(self, name, count)

    def __iter__(self):
        while True:
            yield {"input_ids": torch.ones(4, dtype=torch.int64)}


def trainer_of(folder, *, callbacks=None, rows=None, **options):
    sizes = torch.randint(4, 30, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = rows or [{"input_ids": torch.ones(size, dtype=torch.int64)} for size in sizes]
    options = {"per_device_train_batch_size": 2, **options}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **options)
    return Trainer(
        model=LlamaForCausalLM(LlamaConfig(**SMALL)), args=arguments, train_dataset=rows,
        callbacks=[HoldfastCallback()] if callbacks is None else callbacks,
    )  # fmt: skip


def finds(monkeypatch, change):
    """Have a Trainer find itself as after `change`, once it has looked around."""
    looks = Trainer.create_accelerator_and_postprocess

    def looks_and_finds(self):
        looks(self)
        change(self)

    monkeypatch.setattr(Trainer, "create_accelerator_and_postprocess", looks_and_finds)


def test_lengths_are_grouped_over_the_batch_of_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    options = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3}
    trainer = trainer_of(tmp_path, **options)
    assert trainer.args.gradient_accumulation_steps == 6
    sampler = trainer._get_train_sampler()
    assert sampler.whole.batch_size == 2 * 3
    assert trainer.args.gradient_accumulation_steps == 6


@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ],
)
def test_samples_come_in_the_order_that_they_have_without_an_agent(options, tmp_path, monkeypatch):
    """Whatever the steps have left torch's generator at, as after a restart."""
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "1")

    def epochs(*callbacks):
        trainer = trainer_of(tmp_path, callbacks=list(callbacks), **options)
        loader = DataLoader(range(40), sampler=trainer._get_train_sampler(), batch_size=2)
        for _ in range(2):
            yield torch.cat(list(loader)).tolist()
            if callbacks:
                seed_step(7)

    plain = list(epochs())
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    managed = list(epochs(HoldfastCallback()))
    assert managed == plain


def test_a_sampler_that_counts_ranks_itself_is_given_what_there_is(tmp_path):
    trainer = trainer_of(tmp_path, train_sampling_strategy="batch_rebalance")
    sampler = trainer._get_train_sampler()
    assert (sampler.effective_batch_size, sampler.grad_accum * sampler.dp_size) == (4, 2)


def test_a_batch_that_is_split_over_the_ranks_is_kept_as_it_is(tmp_path):
    trainer = trainer_of(tmp_path, accelerator_config={"split_batches": True})
    assert trainer.args.gradient_accumulation_steps == 1


def test_a_callback_that_comes_too_late_is_refused(tmp_path):
    """Without its accumulation the batch would halve."""
    trainer = trainer_of(tmp_path, callbacks=[], max_steps=1)
    trainer.add_callback(HoldfastCallback())
    with pytest.raises(ApiError, match="HF535"):
        trainer.train()


@pytest.mark.parametrize(
    "options",
    [
        {"average_tokens_across_devices": False},
        # 13 batches: of two ranks 6 steps, of one that accumulates two of them 7
        {"dataloader_drop_last": True, "per_device_train_batch_size": 3},
        *[
            {
                "accelerator_config": {"dispatch_batches": False},
                "rows": Shards(name, 2),
                "max_steps": 1,
            }
            for name in ("num_shards", "n_shards")
        ],
    ],
)
def test_what_trains_otherwise_on_fewer_ranks_is_refused(options, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    with pytest.raises(ApiError, match="HF535 1 of 2 "):
        trainer_of(tmp_path, **options)
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "1")
    trainer_of(tmp_path, **options)


def test_an_epoch_that_drops_as_much_on_fewer_ranks_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    trainer = trainer_of(tmp_path, dataloader_drop_last=True)
    assert trainer.args.gradient_accumulation_steps == 2


@pytest.mark.parametrize(("dispatched", "shards"), [(None, 2), (False, 1)])
def test_a_stream_that_ranks_do_not_read_in_shards_is_not_refused(
    dispatched, shards, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    options = {"accelerator_config": {"dispatch_batches": dispatched}, "max_steps": 1}
    trainer = trainer_of(tmp_path, rows=Shards("num_shards", shards), **options)
    assert trainer.args.gradient_accumulation_steps == 2


@pytest.mark.parametrize("batch", [4, 6])
def test_a_split_batch_that_the_ranks_cannot_share_is_refused(batch, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "6")
    finds(monkeypatch, lambda _: monkeypatch.setenv("WORLD_SIZE", "3"))
    options = {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": batch}
    if batch == 4:
        with pytest.raises(ApiError, match=r"HF535 3 of 6 .*\b4\b"):
            trainer_of(tmp_path, **options)
    else:
        assert trainer_of(tmp_path, **options).args.gradient_accumulation_steps == 1


@pytest.mark.parametrize("full", ["1", "2"])
def test_deepspeed_is_refused_on_any_number_of_ranks(full, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", full)
    finds(monkeypatch, lambda trainer: setattr(trainer, "is_deepspeed_enabled", True))
    with pytest.raises(ApiError, match="HF536 DeepSpeed"):
        trainer_of(tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"use_seedable_sampler": False}},
    ],
)
def test_without_an_agent_the_callback_does_nothing(options, tmp_path, monkeypatch):
    """Samples, weights, what is returned, and where torch's generator is afterwards."""
    monkeypatch.delenv("HOLDFAST_FULL_WORLD_SIZE")
    ids = torch.randint(32, (20, 6), generator=torch.Generator().manual_seed(1))
    given = {"rows": [{"input_ids": row, "labels": row} for row in ids], **options}
    given |= {"max_steps": 3, "logging_steps": 2, "save_strategy": "no", "disable_tqdm": True}

    def trained(callbacks):
        torch.manual_seed(0)
        trainer = trainer_of(tmp_path, callbacks=callbacks, **given)
        loss = trainer.train().training_loss
        weights = [param.detach() for param in trainer.model.parameters()]
        return loss, trainer._tr_loss, torch.get_rng_state(), *weights

    without, beside = trained([]), trained([HoldfastCallback()])
    assert without[0] == beside[0]
    assert all(map(torch.equal, without[1:], beside[1:]))


@pytest.mark.parametrize(
    ("ranks", "shares"), [(4, [1.0, 3.0, 3.0, 3.0]), (2, [1.0, 4.0]), (1, [2.5])]
)
def test_losses_since_the_last_log_are_shared_by_the_ranks_there_are(ranks, shares):
    """Their mean is what it was; of several ranks also rank 0's, which `train` returns."""
    runs = [SimpleNamespace(rank=rank, world_size=ranks) for rank in range(ranks)]
    found = [_Progress(None, run)._share(10.0, 1.0, ranks_then=4) for run in runs]
    assert found == shares
