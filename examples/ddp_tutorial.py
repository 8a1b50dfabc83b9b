"""A DDP script as in PyTorch's tutorials: it knows torchrun's environment and nothing else.

It saves a snapshot of its own and resumes from it, which is all that fault tolerance asks
of a script. Runs on CUDA or on CPUs:

    torchrun --standalone --nproc-per-node 2 examples/ddp_tutorial.py 10 2
    holdfast agent --standalone --nproc-per-node 2 examples/ddp_tutorial.py 10 2
    holdfast run examples/ddp_tutorial.yaml --fault kill-node:2@100
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    """Trains a model for some epochs over the data, from the last snapshot on."""

    def __init__(self, loader: DataLoader, save_every: int, snapshot: Path) -> None:
        self.local_rank, self.rank = int(os.environ["LOCAL_RANK"]), int(os.environ["RANK"])
        cuda = torch.cuda.is_available()
        self.device = torch.device(f"cuda:{self.local_rank}" if cuda else "cpu")
        self.loader, self.save_every, self.snapshot = loader, save_every, snapshot
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 1)).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.epochs_run = 0
        if snapshot.exists():
            self.load_snapshot()
        self.ddp = DistributedDataParallel(
            self.model, device_ids=[self.local_rank] if cuda else None
        )

    def load_snapshot(self) -> None:
        """Take up what an earlier start has saved."""
        found = torch.load(self.snapshot, map_location=self.device, weights_only=True)
        self.model.load_state_dict(found["model"])
        self.optimizer.load_state_dict(found["optimizer"])
        self.epochs_run = found["epochs_run"]
        print(f"rank {self.rank}: resuming at epoch {self.epochs_run}", flush=True)

    def save_snapshot(self) -> None:
        """Save, and let the new file take the old one's place only once it is whole."""
        self.snapshot.parent.mkdir(parents=True, exist_ok=True)
        new = self.snapshot.with_suffix(".new")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "epochs_run": self.epochs_run}, new)
        new.replace(self.snapshot)

    def run_batch(self, source: Tensor, targets: Tensor) -> float:
        """One step; returns the loss."""
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.ddp(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def train(self, total_epochs: int) -> None:
        """Run the epochs that are left."""
        while self.epochs_run < total_epochs:
            self.loader.sampler.set_epoch(self.epochs_run)
            losses = [self.run_batch(x.to(self.device), y.to(self.device)) for x, y in self.loader]
            self.epochs_run += 1
            if self.rank == 0:
                print(f"epoch {self.epochs_run} loss {sum(losses) / len(losses):.6f}", flush=True)
                if self.epochs_run % self.save_every == 0 or self.epochs_run == total_epochs:
                    self.save_snapshot()


def prepare_dataloader(batch_size: int) -> DataLoader:
    """Return this rank's part of 2,048 samples of a function to be learnt."""
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(2048, 20, generator=generator)
    targets = source.sin().sum(dim=1, keepdim=True)
    data = TensorDataset(source, targets)
    return DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data))


def main() -> None:
    """Read the command line, train, leave."""
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("total_epochs", type=int, help="total epochs to train the model")
    parser.add_argument("save_every", type=int, help="how often to save a snapshot, in epochs")
    parser.add_argument("--batch_size", default=32, type=int, help="on each device")
    mine = f"runs/ddp_tutorial-{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}.pt"
    parser.add_argument("--snapshot_path", default=mine, type=Path, help="default: of this job")
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    trainer = Trainer(prepare_dataloader(args.batch_size), args.save_every, args.snapshot_path)
    trainer.train(args.total_epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
