"""Granite's decoder: Llama's with constants at four places. Knows no layouts.

Source: transformers' modeling_granite.py. Shapes as in decoder.py.
"""

from __future__ import annotations

from torch import Tensor, nn

from elastic_trainer.model.decoder import Block, Decoder
from elastic_trainer.plan.models import Granite, ModelShape


class GraniteBlock(Block):
    """A decoder layer whose branches are scaled before they join the residual stream."""

    def __init__(self, shape: Granite) -> None:
        super().__init__(shape)
        self.input_scale = 1.0
        """Of embeddings, in the first layer: there they are plain tensors, under tp too."""
        self.branch_scale = shape.residual_multiplier

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        if self.input_scale != 1.0:
            x = x * self.input_scale
        branch = self.attention(self.attention_norm(x), rope, documents=documents)
        x = x + self.branch_scale * branch
        y: Tensor = x + self.branch_scale * self.ffn(self.ffn_norm(x))
        return y


class ScaledHead(nn.Linear):
    """A head whose logits are divided by `scale`."""

    def __init__(self, shape: Granite) -> None:
        super().__init__(shape.dim, shape.vocab_size, bias=False)
        self.scale = shape.logits_scaling

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, V)."""
        # The input is the smaller one.
        return super().forward(x / self.scale)


class GraniteDecoder(Decoder):
    """Tokens (B, T) to logits (B, T, V) with Granite's constants."""

    block = GraniteBlock

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        assert isinstance(shape, Granite)
        first = self.layers["0"]
        assert isinstance(first, GraniteBlock)
        first.input_scale = shape.embedding_multiplier
        self.head = ScaledHead(shape)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight
