"""ModelShape: Llama's dimensions, and what other families start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


def says(text: str) -> dict[str, str]:
    """Return the metadata of a field that job files have: `text` says there what it means."""
    return {"description": text}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Dimensions of a Llama decoder (arXiv 2407.21783, table 3), and all else of it without torch.

    Another family is a subclass with fields of its own, which overrides what differs;
    docs/models.md has the protocol.
    """

    family: ClassVar[str] = "llama"
    """In job files, and as `model_type` in config.json."""
    architecture: ClassVar[str] = "LlamaForCausalLM"
    """Hugging Face's class."""
    hf_fields: ClassVar[Mapping[str, str]] = {}
    """The family's own field -> its key in config.json; whole numbers, null, or true and false."""
    hf_defaults: ClassVar[Mapping[str, Any]] = {}
    """Key of config.json -> what transformers takes where it is absent, if that is not Llama's."""
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias", "sliding_window")
    """Keys of config.json for what is not trained here: false, null or absent."""

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

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised before they are rotated."""
        return False

    @property
    def attention_bias(self) -> bool:
        """Whether the four projections of attention have biases."""
        return False

    @property
    def sliding_window(self) -> int | None:
        """Position i sees j with i - window < j <= i; None: all up to i."""
        return None

    @property
    def num_experts(self) -> int:
        """Experts of a layer, of which a token goes to some; 1: one feed-forward for all."""
        return 1

    @property
    def experts_per_token(self) -> int:
        """Experts that a token goes to."""
        return 1

    @property
    def decoder(self) -> str:
        """The subclass of `Decoder` that workers build, as `module:Class`."""
        return "elastic_trainer.model.decoder:Decoder"

    def num_params(self) -> int:
        """Return the number of parameters, embeddings included.

        Per layer: Q and O of h x (heads * head size), K and V of h x (KV heads *
        head size), three SwiGLU matrices of h x ffn, two norms of h, and what else
        attention has. Around them the embedding, the final norm and the head
        (absent when tied).
        """
        h, size = self.dim, self.head_size
        q_dim, kv_dim = self.num_heads * size, self.num_kv_heads * size
        attention = 2 * h * q_dim + 2 * h * kv_dim
        attention += (
            q_dim + 2 * kv_dim + h if self.attention_bias else 0
        ) + 2 * size * self.qk_norm
        layer = attention + 3 * h * self.ffn_dim + 2 * h
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + tables + h

    def active_params(self) -> int:
        """Return the number of parameters that one token meets: all, unless there are experts."""
        return self.num_params()

    def flops_per_token(self, seq_len: int) -> float:
        """Return training FLOPs per token: 6 N + 12 L H E k, where a query sees k keys on average.

        Source: PaLM, arXiv 2204.02311, appendix B. k is half the sequence, or what a window leaves
        of that; N is what a token meets, without the embedding look-up, which multiplies nothing (a
        tied table is the head too).
        """
        look_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        window = min(self.sliding_window or seq_len, seq_len)
        keys = window - window**2 / (2 * seq_len)
        attention = self.num_layers * self.num_heads * self.head_size * keys
        return 6.0 * (self.active_params() - look_up) + 12.0 * attention


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
"""llama3-8b and -70b are Llama 3 (8 K of context); llama3-405b exists as Llama 3.1 only, with its
long-context RoPE scaling (factor 8 over 8,192)."""
