"""ModelShape: the dimensions of a Llama-family model, and the presets."""

from __future__ import annotations

from dataclasses import dataclass, field


def says(text: str) -> dict[str, str]:
    """Return the metadata of a field that job files have: `text` says there what it means."""
    return {"description": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a Llama-family decoder (arXiv 2407.21783, table 3)."""

    num_layers: int = field(metadata=says("Decoder layers."))
    dim: int = field(metadata=says("Model width."))
    num_heads: int = field(metadata=says("Query heads."))
    num_kv_heads: int
    ffn_dim: int = field(metadata=says("Width of the SwiGLU hidden layer."))
    vocab_size: int = field(metadata=says("Rows of the embedding."))
    head_dim: int = 0
    """0: dim // num_heads."""
    norm_eps: float = field(default=1e-5, metadata=says("Epsilon of RMSNorm."))
    rope_theta: float = field(default=500000.0, metadata=says("Base of the rotary frequencies."))
    rope_scaling_factor: float = field(
        default=1.0, metadata=says("Llama 3.1 long-context scaling; 1 turns it off.")
    )
    rope_low_freq_factor: float = field(default=1.0, metadata=says("Llama 3.1 RoPE scaling."))
    rope_high_freq_factor: float = field(default=4.0, metadata=says("Llama 3.1 RoPE scaling."))
    rope_original_context: int = field(
        default=8192, metadata=says("Context before scaling, in tokens.")
    )
    tie_embeddings: bool = field(
        default=False, metadata=says("Embedding and head share their weights.")
    )

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.dim // self.num_heads

    def num_params(self) -> int:
        """Return the number of parameters, embeddings included.

        Per layer: Q and O of h x (heads * head size), K and V of h x (KV heads *
        head size), three SwiGLU matrices of h x ffn, two norms of h. Around
        them the embedding, the final norm and the head (absent when tied).
        """
        h, size = self.dim, self.head_size
        attention = 2 * h * self.num_heads * size + 2 * h * self.num_kv_heads * size
        layer = attention + 3 * h * self.ffn_dim + 2 * h
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + tables + h


def _llama(num_layers: int, dim: int, num_heads: int, ffn_dim: int, factor: float) -> ModelShape:
    """Return a published Llama 3 shape; all have 8 KV heads and one vocabulary."""
    return ModelShape(
        num_layers=num_layers,
        dim=dim,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_dim=ffn_dim,
        vocab_size=128256,
        rope_scaling_factor=factor,
    )


PRESETS: dict[str, ModelShape] = {
    "llama3-8b": _llama(32, 4096, 32, 14336, 1.0),
    "llama3-70b": _llama(80, 8192, 64, 28672, 1.0),
    "llama3-405b": _llama(126, 16384, 128, 53248, 8.0),
    "tiny": ModelShape(
        num_layers=4, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=192, vocab_size=512
    ),
    "tiny-wide": ModelShape(
        num_layers=4, dim=256, num_heads=8, num_kv_heads=4, ffn_dim=768, vocab_size=512
    ),
}
"""Models known by name. llama3-8b and -70b are Llama 3 (8 K of context); llama3-405b
exists as Llama 3.1 only, with its long-context RoPE scaling (factor 8 over 8,192)."""

PUBLISHED_CONTEXT: dict[str, int] = {
    "llama3-8b": 8192,
    "llama3-70b": 8192,
    "llama3-405b": 131072,
}
"""Tokens of context the published weights were trained for."""
