"""torchtitan's Trainer."""

from elastic_trainer.integrations.torchtitan import keep

__all__ = ["keep"]
