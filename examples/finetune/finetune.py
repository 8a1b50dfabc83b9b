"""A torchrun script with arguments, as job files run it: fits y = 3x + 1 by DDP on CPUs.

examples/finetune.yaml calls it; by hand:
  holdfast agent --standalone --nproc-per-node 2 examples/finetune/finetune.py --out runs/fit
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 1500


def main() -> None:
    """Train, and leave the model in the folder --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--tp", type=int, default=1, help="as the job's layout says; unused here")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    for _ in range(STEPS):
        x = torch.rand(64, 1)
        loss = (model(x) - (3 * x + 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        torch.save(model.module.state_dict(), options.out / "model.pt")
        print(f"loss {loss.item():.4f} after {STEPS} steps with lr {options.lr:g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
