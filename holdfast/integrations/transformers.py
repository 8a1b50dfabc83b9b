"""Hugging Face's Trainer."""

from elastic_trainer.integrations.transformers import HoldfastCallback

__all__ = ["HoldfastCallback"]
