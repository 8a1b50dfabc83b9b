"""For a decoder of the job's own: docs/models.md."""

from elastic_trainer.model.decoder import Block, Decoder

__all__ = ["Block", "Decoder"]
