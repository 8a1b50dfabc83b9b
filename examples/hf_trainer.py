"""Hugging Face's Trainer, with the one line that keeps its state: see `callbacks`.

holdfast agent --standalone --nproc-per-node 2 examples/hf_trainer.py --max_steps 40
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from holdfast.integrations.transformers import HoldfastCallback


class Counting(Dataset):
    """Rows of tokens that count up from a start of their own: something that can be learned."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (1 + index % 3) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    """Train; `trainer.train()` ends with exit code 91 where the job is asked to stop."""
    parser = argparse.ArgumentParser(description="a Trainer")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--output_dir", required=True)
    given = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            attention_dropout=given.dropout,
        )
    )
    args = TrainingArguments(
        output_dir=given.output_dir,
        max_steps=given.max_steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=given.accumulate,
        learning_rate=3e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    data = Counting()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=torch.utils.data.Subset(data, range(16)),
        callbacks=[HoldfastCallback()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
