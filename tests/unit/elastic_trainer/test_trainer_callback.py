"""Hugging Face's Trainer on fewer ranks: what the callback adapts, and what it refuses."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("accelerate", reason="not installed: pip install -e '.[dev]'")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from elastic_trainer.integrations.transformers import HoldfastCallback
from elastic_trainer.progress import ApiError

SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 32,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _half_of_the_ranks(monkeypatch):
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "2")  # of one that is here


def trainer_of(folder, *, callbacks=None, **options):
    sizes = torch.randint(4, 30, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [{"input_ids": torch.ones(size, dtype=torch.int64)} for size in sizes]
    options = {"per_device_train_batch_size": 2, **options}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], **options)
    return Trainer(
        model=LlamaForCausalLM(LlamaConfig(**SMALL)), args=arguments, train_dataset=rows,
        callbacks=[HoldfastCallback()] if callbacks is None else callbacks,
    )  # fmt: skip


def test_lengths_are_grouped_over_the_batch_of_all_ranks(tmp_path):
    options = {"train_sampling_strategy": "group_by_length", "gradient_accumulation_steps": 3}
    trainer = trainer_of(tmp_path, **options)
    assert trainer.args.gradient_accumulation_steps == 6
    sampler = trainer._get_train_sampler()
    assert sampler.batch_size == 2 * 3
    assert sampler.generator is not None, "also of one rank, or a restart would draw anew"
    assert trainer.args.gradient_accumulation_steps == 6


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
    ],
)
def test_what_trains_otherwise_on_fewer_ranks_is_refused(options, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    with pytest.raises(ApiError, match="HF535"):
        trainer_of(tmp_path, **options)
    monkeypatch.setenv("HOLDFAST_FULL_WORLD_SIZE", "1")
    trainer_of(tmp_path, **options)


def test_an_epoch_that_drops_as_much_on_fewer_ranks_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_RECORD_DIR", str(tmp_path))
    trainer = trainer_of(tmp_path, dataloader_drop_last=True)
    assert trainer.args.gradient_accumulation_steps == 2
