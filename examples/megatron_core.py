"""A loop on Megatron-core, with the two lines that keep its state: see `steps`. On CPU.

holdfast agent --standalone --nproc-per-node 2 examples/megatron_core.py --tp 2 --steps 40
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer import TransformerConfig

from holdfast.integrations.megatron import Steps

# What Megatron-core 0.16 needs to run without a GPU.
torch.cuda.current_device = lambda: "cpu"
CudaRNGStatesTracker.fork = lambda *_: nullcontext()

BATCH, LENGTH, VOCABULARY = 8, 16, 64


def build(tp: int) -> GPTModel:
    """Return this rank's part of a small GPT, the same whole one for any `tp`."""
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.1,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
    )


def loss_of(model: GPTModel, step: int) -> torch.Tensor:
    """Return the mean loss of the batch of `step`, the gradient being that of all ranks."""
    group = parallel_state.get_data_parallel_group()
    replicas, replica = group.size(), group.rank()
    first = torch.arange(step * BATCH + replica, (step + 1) * BATCH, replicas)[:, None]
    tokens = (torch.arange(LENGTH + 1) * (1 + first % 3) + first) % VOCABULARY
    positions = torch.arange(LENGTH).expand(len(first), -1)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    loss = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).mean() / replicas
    loss.backward()
    for param in model.parameters():
        dist.all_reduce(param.grad, group=group)
    whole = loss.detach()
    dist.all_reduce(whole, group=group)
    return whole


def main() -> None:
    """Train; the loop ends with exit code 91 where the job is asked to stop."""
    parser = argparse.ArgumentParser(description="a GPT on Megatron-core")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tp", type=int, default=1)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=given.tp)
    model = build(given.tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for step in (steps := Steps(given.steps, model, optimizer, scheduler)):
        optimizer.zero_grad()
        steps.loss = loss_of(model, step)
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
