"""Blocks for a job's own decoder: docs/models.md."""

from elastic_trainer.model.decoder import Block, Decoder

__all__ = ["Block", "Decoder"]
