"""Qwen3 (arXiv 2505.09388): each head's queries and keys are normalised, heads have any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from elastic_trainer.plan.models.llama import ModelShape, says


@dataclass(frozen=True, kw_only=True)
class Qwen3(ModelShape):
    """Dimensions of a Qwen3 decoder whose layers all see the whole sequence."""

    family: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"attention_bias": "attention_bias"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128}
    hf_refused: ClassVar[tuple[str, ...]] = ("mlp_bias", "use_sliding_window")

    attention_bias: bool = field(
        default=False, metadata=says("Of qwen3: the projections of attention have biases.")
    )

    @property
    def qk_norm(self) -> bool:
        """Qwen3's mark."""
        return True


PRESETS: dict[str, ModelShape] = {
    "qwen3-8b": Qwen3(
        num_layers=36,
        dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=12288,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    # Heads of another size than dim / num_heads, and biases: all that the family has.
    "tiny-qwen3": Qwen3(
        num_layers=4,
        dim=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        ffn_dim=192,
        vocab_size=512,
        norm_eps=1e-6,
        attention_bias=True,
    ),
}
