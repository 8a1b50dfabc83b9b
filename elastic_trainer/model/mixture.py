"""Mixture of experts: a router, and the experts that each token goes to. Knows no layouts.

Routing is as transformers has it: softmax over all experts in fp32, the k largest, rescaled to a
sum of one where the shape says so. Every token is computed by all of its experts (dropless).

Shapes: as in model.py; N experts, k of them a token, R rows (a token once for each of its experts).
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model.decoder import Block, Decoder, FeedForward
from elastic_trainer.model.grouped import ends_for, grouped_linear
from elastic_trainer.plan.models import MixtureShape, ModelShape


class Experts(nn.ModuleDict):
    """Number -> expert, a feed-forward. Under tp each has its part, and the output is a summand."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: (B, T, D).
            chosen: numbers of the experts, int64 (B, T, k).
            weights: of their outputs, fp32 (B, T, k).
        """
        numbers, order = chosen.flatten().sort(stable=True)
        every = torch.arange(self.num_experts, device=numbers.device)
        ends = torch.searchsorted(numbers, every, right=True)
        # Expanded, so that the gradients of a token's rows are added up in the order of k.
        rows = x.unsqueeze(-2).expand(*chosen.shape, -1).flatten(0, -2)
        out = self.compute(rows[order], ends)
        each = out[order.argsort()].unflatten(0, chosen.shape)
        return (each * weights.unsqueeze(-1)).sum(-2).type_as(x)

    @property
    def num_experts(self) -> int:
        """Experts that tokens may go to."""
        return len(self)

    def compute(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Map rows (R, D), sorted by expert, to their experts' outputs (R, D).

        Args:
            rows: of all experts.
            ends: where each expert's rows end, int64 (N,).
        """
        # Not as DTensors: their dispatch would derive placements anew for every number of rows.
        w1, w2, w3 = (
            [w.to_local() if isinstance(w, DTensor) else w for w in matrices]
            for matrices in zip(
                *((e.w1.weight, e.w2.weight, e.w3.weight) for e in self.values()), strict=True
            )
        )
        ends = ends_for(rows, w1, ends)
        halves = F.silu(grouped_linear(rows, w1, ends)) * grouped_linear(rows, w3, ends)
        return grouped_linear(halves, w2, ends)


class Mixture(nn.Module):
    """Router and experts in place of a feed-forward."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.dim, shape.num_experts, bias=False)
        self.experts = Experts({str(i): FeedForward(shape) for i in range(shape.num_experts)})
        self._per_token, self._rescaled = shape.experts_per_token, shape.norm_topk_prob

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        shares = self.router(x).float().softmax(-1)
        weights, chosen = shares.topk(self._per_token)
        if self._rescaled:
            weights = weights / weights.sum(-1, keepdim=True)
        y: Tensor = self.experts(x, chosen, weights)
        return y


class MixtureBlock(Block):
    """A decoder layer whose feed-forward is a mixture."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__(shape)
        self.ffn = Mixture(shape)


_FFN = ("ffn", "ffn.w1", "ffn.w2", "ffn.w3")


class MixtureDecoder(Decoder):
    """Tokens (B, T) to logits (B, T, V) through mixtures of experts."""

    block = MixtureBlock
    tensor_plan = MappingProxyType(
        {
            **{name: how for name, how in Decoder.tensor_plan.items() if name not in _FFN},
            "ffn.router": "sequence",
            "ffn.experts": "experts",
        }
    )
    residual = ("attention.wo.weight", ".w2.weight")

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape)
        assert isinstance(shape, MixtureShape)
        self.hf_names = {
            **{name: theirs for name, theirs in Decoder.hf_names.items() if name not in _FFN},
            "ffn.router": f"{shape.hf_mixture}.gate",
            **{
                f"ffn.experts.{i}.{ours}": f"{shape.hf_mixture}.experts.{i}.{theirs}"
                for i in range(shape.num_experts)
                for ours, theirs in shape.hf_expert.items()
            },
        }
