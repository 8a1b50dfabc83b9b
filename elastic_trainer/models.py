"""ModelShape: the dimensions of a Llama-family model, and the presets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a Llama-family decoder (arXiv 2407.21783, table 3)."""

    num_layers: int
    dim: int
    """Model width h."""
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    """Width of the SwiGLU hidden layer."""
    vocab_size: int
    head_dim: int = 0
    """0: dim // num_heads."""
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 1.0
    """Llama 3.1 long-context scaling; 1 turns it off."""
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_context: int = 8192
    tie_embeddings: bool = False

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.dim // self.num_heads
