"""A loop on Megatron-core."""

from elastic_trainer.integrations.megatron import Steps

__all__ = ["Steps"]
