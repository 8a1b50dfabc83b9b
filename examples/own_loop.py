"""A training loop of one's own that uses the API: no step is lost when a node dies.

The same script runs under an agent, under torchrun, and under plain python:

    holdfast run examples/own_loop.yaml --fault kill-node:1@40
    holdfast agent --standalone --nproc-per-node 2 examples/own_loop.py --steps 200
    torchrun --standalone --nproc-per-node 2 examples/own_loop.py --steps 200
    python examples/own_loop.py --steps 200
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

GLOBAL_BATCH = 48
"""Samples of a step, over all ranks: the same whatever the number of ranks."""


def batch_of(step: int, run: holdfast.WorkerRun) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the samples of `step`: a function, so nothing repeats."""
    generator = torch.Generator().manual_seed(step)
    source = torch.randn(GLOBAL_BATCH, 16, generator=generator)
    mine = slice(run.coordinate["dp"], None, run.layout.dp)
    return source[mine], source.sin().sum(dim=1, keepdim=True)[mine]


def train_step(
    ddp: nn.Module, optimizer: torch.optim.Optimizer, step: int, run: holdfast.WorkerRun
) -> float:
    """Run one step; return the loss over all ranks."""
    x, y = batch_of(step, run)
    # DistributedDataParallel takes the mean over ranks: so weigh by samples, not by ranks.
    loss = nn.functional.mse_loss(ddp(x), y, reduction="sum") * run.layout.dp / GLOBAL_BATCH
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total = loss.detach() / run.layout.dp
    dist.all_reduce(total)
    return total.item()


def main() -> None:
    """Train; leave when asked to, and take up where the state was kept."""
    parser = argparse.ArgumentParser(description="a loop that uses the API")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--print_every", type=int, default=20)
    args = parser.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo")
    run = holdfast.start(every_steps=50)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = torch.zeros((), dtype=torch.int64)
    step = run.restore(model, optimizer, {"samples": samples})
    ddp = DistributedDataParallel(model)

    while step < args.steps:
        loss = train_step(ddp, optimizer, step, run)
        step += 1
        samples += GLOBAL_BATCH
        if run.rank == 0 and (step % args.print_every == 0 or step == args.steps):
            print(f"step {step} loss {loss:.6f} samples {samples.item()}", flush=True)
        if run.completed(step, loss=loss):
            run.leave()
    dist.monitored_barrier()  # gloo's threads let go of the last tensors: docs/scripts.md
    run.finish(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
