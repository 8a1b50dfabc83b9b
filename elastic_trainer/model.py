"""A Llama-family decoder. Knows nothing of parallelism, devices or checkpoints.

Shapes: B sequences, T tokens, D width, H heads, K KV heads, E head size, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.models import ModelShape


def rope_frequencies(shape: ModelShape) -> Tensor:
    """Return the E/2 angular frequencies, with Llama 3.1's long-context scaling.

    Source: RoFormer (arXiv 2104.09864) and the scaling published with Llama 3.1:
    wavelengths beyond the old context are stretched by the factor, short ones are
    left alone, those between are interpolated.
    """
    exponents = torch.arange(0, shape.head_size, 2, dtype=torch.float64) / shape.head_size
    frequencies = shape.rope_theta**-exponents
    if shape.rope_scaling_factor == 1.0:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    low, high = shape.rope_low_freq_factor, shape.rope_high_freq_factor
    smooth = (shape.rope_original_context / wavelengths - low) / (high - low)
    scaled = frequencies / shape.rope_scaling_factor
    return torch.lerp(scaled, frequencies, smooth.clamp(0.0, 1.0))


def rope_table(shape: ModelShape, positions: Tensor, device: torch.device | str) -> Tensor:
    """Return cosines and sines at `positions` (T,), shape (2, T, E/2), fp32."""
    angles = torch.outer(positions.to(torch.float64), rope_frequencies(shape))
    return torch.stack([angles.cos(), angles.sin()]).float().to(device)


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate x (B, H, T, E) by `rope` (2, T, E/2); halves, as Hugging Face Llama does."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = rope[0], rope[1]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.type_as(x)


def causal_mask(num_queries: int, num_keys: int, documents: Tensor) -> Tensor:
    """Return which of the first `num_keys` positions the last `num_queries` of them see.

    Each sees itself and those before it in its own document.

    Args:
        num_queries: T.
        num_keys: of all positions, of which the queries are the last.
        documents: where the document of each query begins, (B, T) int64.

    Returns:
        (B, 1, T, num_keys) bool.
    """
    keys = torch.arange(num_keys, device=documents.device)
    queries = keys[num_keys - num_queries :, None]
    return ((keys <= queries) & (keys >= documents[..., None])).unsqueeze(1)


class CausalAttention(nn.Module):
    """Softmax attention where a position sees itself and those before it in its document."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map q (B, H, T, E) and k, v (B, K, T, E) to (B, H, T, E); `documents` as of `Llama`."""
        length = q.shape[2]
        mask = None if documents is None else causal_mask(length, length, documents)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )


class Attention(nn.Module):
    """Causal self-attention with grouped KV heads (arXiv 2305.13245)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        q_dim, kv_dim = shape.num_heads * self.head_size, shape.num_kv_heads * self.head_size
        self.wq = nn.Linear(shape.dim, q_dim, bias=False)
        self.wk = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wv = nn.Linear(shape.dim, kv_dim, bias=False)
        self.wo = nn.Linear(q_dim, shape.dim, bias=False)
        self.core = CausalAttention()

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        # Head counts come from the tensors, so that a sharded projection works as it is.
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        q, k = apply_rope(q, rope), apply_rope(k, rope)
        y: Tensor = self.wo(self.core(q, k, v, documents).transpose(1, 2).flatten(2))
        return y


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)
        self.w2 = nn.Linear(shape.ffn_dim, shape.dim, bias=False)
        self.w3 = nn.Linear(shape.dim, shape.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Block(nn.Module):
    """One decoder layer, pre-norm."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = x + self.attention(self.attention_norm(x), rope, documents=documents)
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Llama(nn.Module):
    """Tokens (B, T) to logits (B, T, V)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleDict({str(i): Block(shape) for i in range(shape.num_layers)})
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.head = nn.Linear(shape.dim, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, rope: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map tokens (B, T) to logits (B, T, V).

        Args:
            tokens: int64.
            rope: from `rope_table`.
            documents: where in its sequence the document of each position begins, (B, T) int64;
                none attends to another. None: each sequence is one document.
        """
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, rope, documents)
        y: Tensor = self.head(self.norm(x))
        return y


INITIAL_ROWS = 64
"""Rows of a tensor that share one random generator; any layout can make any of them."""


def initial_rows(name: str, size: torch.Size, rows: range, shape: ModelShape, seed: int) -> Tensor:
    """Return rows (of the first dim) of the initial value of parameter `name`, fp32, CPU.

    A function of (seed, name, row) alone, so every layout starts from the same values,
    and each rank makes little more than it keeps. Normal with deviation 0.02, divided
    by sqrt(2 L) where a branch joins the residual stream (GPT-2's scheme); norms are one.

    Args:
        name: as in `Llama.named_parameters()`.
        size: of the whole tensor.
        rows: which rows, step 1.
        shape: the model.
        seed: of the run.
    """
    if "norm" in name:
        return torch.ones(len(rows), *size[1:])
    deviation = 0.02
    if name.endswith(("attention.wo.weight", "ffn.w2.weight")):
        deviation /= math.sqrt(2 * shape.num_layers)
    blocks = []
    for block in range(rows.start // INITIAL_ROWS, -(-rows.stop // INITIAL_ROWS)):
        digest = hashlib.sha256(f"{seed}:{name}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        begin = block * INITIAL_ROWS
        height = min(INITIAL_ROWS, size[0] - begin)
        values = torch.empty(height, *size[1:]).normal_(0.0, deviation, generator=generator)
        blocks.append(values[max(0, rows.start - begin) : rows.stop - begin])
    return torch.cat(blocks) if blocks else torch.empty(0, *size[1:])
