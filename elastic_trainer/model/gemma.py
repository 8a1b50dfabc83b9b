"""Gemma 3's decoder of text. Knows no layouts.

Source: transformers' modeling_gemma3.py. Shapes as in decoder.py.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model.decoder import Block, Decoder, FeedForward
from elastic_trainer.plan.models import ModelShape


class GemmaNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight, all of it in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width) to the same."""
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).type_as(x)


class GemmaFeedForward(FeedForward):
    """GEGLU (arXiv 2002.05202), with the approximation of GELU by tanh."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y: Tensor = self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))
        return y


class GemmaBlock(Block):
    """A decoder layer with a norm before and after each branch."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        self.input_scale = 1.0
        """Of embeddings, in the first layer: there they are plain tensors, under tp too."""
        self.attention_norm, self.attention_out_norm, self.ffn_norm, self.ffn_out_norm = (
            GemmaNorm(shape.dim, eps=shape.norm_eps) for _ in range(4)
        )
        self.attention.q_norm, self.attention.k_norm = (
            GemmaNorm(shape.head_size, eps=shape.norm_eps) for _ in range(2)
        )
        self.ffn = GemmaFeedForward(shape)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        if self.input_scale != 1.0:
            x = x * x.new_full((), self.input_scale)  # rounded to the type of x
        branch = self.attention(self.attention_norm(x), rope, documents=documents)
        x = x + self.attention_out_norm(branch)
        y: Tensor = x + self.ffn_out_norm(self.ffn(self.ffn_norm(x)))
        return y


class GemmaDecoder(Decoder):
    """Tokens (B, T) to logits (B, T, V) through Gemma's blocks."""

    block = GemmaBlock
    tensor_plan = MappingProxyType(
        {**Decoder.tensor_plan, "attention_out_norm": "sequence", "ffn_out_norm": "sequence"}
    )
    hf_names = MappingProxyType(
        {
            **Decoder.hf_names,
            "attention_out_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_out_norm": "post_feedforward_layernorm",
        }
    )

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        first = self.layers["0"]
        assert isinstance(first, GemmaBlock)
        first.input_scale = math.sqrt(shape.dim)
        self.norm = GemmaNorm(shape.dim, eps=shape.norm_eps)

    def initial(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of the initial values; weights of norms are zero."""
        return (0.0, 0.0) if "norm" in name else super().initial(name)
