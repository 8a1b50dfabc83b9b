"""Lightning's Trainer."""

from elastic_trainer.integrations.lightning import LightningCallback as HoldfastCallback

__all__ = ["HoldfastCallback"]
