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
from elastic_trainer.plan.models import MixtureShape, ModelShape


class Expert(FeedForward):
    """A feed-forward on its own part of the weights: under tp its output is a summand."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (R, D) to (R, D)."""
        # Not as DTensors: their dispatch would derive placements anew for every number of rows.
        w1, w2, w3 = (
            w.weight.to_local() if isinstance(w.weight, DTensor) else w.weight
            for w in (self.w1, self.w2, self.w3)
        )
        return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


class Experts(nn.ModuleDict):
    """Number -> expert."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            x: (B, T, D).
            chosen: numbers of the experts, int64 (B, T, k).
            weights: of their outputs, fp32 (B, T, k).
        """
        numbers = chosen.flatten()
        order = numbers.argsort(stable=True)
        # Expanded, so that the gradients of a token's rows are added up in the order of k.
        rows = x.unsqueeze(-2).expand(*chosen.shape, -1).flatten(0, -2)
        counts = numbers.bincount(minlength=self.num_experts)
        out = self.compute(rows[order], counts)
        each = out[order.argsort()].unflatten(0, chosen.shape)
        return (each * weights.unsqueeze(-1)).sum(-2).type_as(x)

    @property
    def num_experts(self) -> int:
        """Experts that tokens may go to."""
        return len(self)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (R, D), sorted by expert, to their experts' outputs (R, D).

        Every expert computes, on no rows if need be: each must have a gradient, or ranks that
        reduce it together would not all come.

        Args:
            rows: of all experts.
            counts: how many of each, int64 (N,).
        """
        parts = rows.split(counts.tolist())
        done = (expert(part) for expert, part in zip(self.values(), parts, strict=True))
        return torch.cat(list(done))


class Mixture(nn.Module):
    """Router and experts in place of a feed-forward."""

    def __init__(self, shape: MixtureShape) -> None:
        super().__init__()
        self.router = nn.Linear(shape.dim, shape.num_experts, bias=False)
        self.experts = Experts({str(i): Expert(shape) for i in range(shape.num_experts)})
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
