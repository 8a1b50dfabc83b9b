"""OLMo's decoder: norms after the branches, and over all heads. Knows no layouts.

Source: transformers' modeling_olmo2.py and modeling_olmo3.py. Shapes as in decoder.py.
"""

from __future__ import annotations

from types import MappingProxyType

from torch import Tensor, nn

from elastic_trainer.model.decoder import Attention, Block, Decoder
from elastic_trainer.plan.models import ModelShape


class OlmoAttention(Attention):
    """Attention whose queries are normalised over all heads, and so are its keys."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape, window=shape.sliding_window)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(heads * self.head_size, eps=shape.norm_eps)
            for heads in (shape.num_heads, shape.num_kv_heads)
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (B, T, D) to queries (B, H, T, E), and keys and values (B, K, T, E)."""
        q, k = self.q_norm(self.wq(x)), self.k_norm(self.wk(x))
        return self.heads(q), self.heads(k), self.heads(self.wv(x))


class OlmoBlock(Block):
    """A decoder layer, post-norm: what a branch adds to the residual stream is normalised."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.attention = OlmoAttention(shape)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.attention_norm(self.attention(x, rope, documents=documents))
        y: Tensor = x + self.ffn_norm(self.ffn(x))
        return y


class OlmoDecoder(Decoder):
    """Tokens (B, T) to logits (B, T, V) through OLMo's blocks."""

    block = OlmoBlock
    tensor_plan = MappingProxyType(
        {
            **Decoder.tensor_plan,
            "attention.q_norm": "columns_norm",
            "attention.k_norm": "columns_norm",
        }
    )
    hf_names = MappingProxyType(
        {
            **Decoder.hf_names,
            "attention_norm": "post_attention_layernorm",
            "ffn_norm": "post_feedforward_layernorm",
        }
    )
