"""Mistral (arXiv 2310.06825): attention in a sliding window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from elastic_trainer.plan.models.llama import ModelShape, says


@dataclass(frozen=True, kw_only=True)
class Mistral(ModelShape):
    """Dimensions of a Mistral decoder."""

    family: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"sliding_window": "sliding_window"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    sliding_window: int | None = field(
        default=None,
        metadata=says(
            "Of mistral and mixtral: tokens that a position sees, itself included; null: all."
        ),
    )


PRESETS: dict[str, ModelShape] = {
    "mistral-7b": Mistral(
        num_layers=32,
        dim=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=14336,
        vocab_size=32000,
        rope_theta=10000.0,
        sliding_window=4096,
    ),
    "tiny-mistral": Mistral(
        num_layers=4,
        dim=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=192,
        vocab_size=512,
        sliding_window=16,
    ),
}
"""mistral-7b is 0.1, the one with a window."""
