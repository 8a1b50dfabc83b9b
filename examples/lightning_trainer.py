"""Lightning's Trainer, with the two lines that keep its state: see `Trainer(...)`.

holdfast agent --standalone --nproc-per-node 2 examples/lightning_trainer.py --max_steps 40
"""

from __future__ import annotations

import argparse
import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastCallback


class Sines(LightningModule):
    """Learns the sum of sines of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return the loss of a batch."""
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Log the loss of a batch."""
        self.log("val_loss", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return Adam with a rate that falls each step."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


def main() -> None:
    """Train; `trainer.fit()` ends with exit code 91 where the job is asked to stop."""
    parser = argparse.ArgumentParser(description="a Trainer")
    parser.add_argument("--max_steps", type=int, default=40)
    parser.add_argument("--accumulate", type=int, default=1)
    given = parser.parse_args()
    torch.manual_seed(0)
    x = torch.randn(120, 8)
    data = TensorDataset(x, x.sin().sum(dim=1, keepdim=True))
    trainer = Trainer(
        max_steps=given.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=given.accumulate,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        callbacks=[HoldfastCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Sines(), DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, 20))
    print(f"val_loss {trainer.callback_metrics['val_loss']:.6f}", flush=True)


if __name__ == "__main__":
    main()
