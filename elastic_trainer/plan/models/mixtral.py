"""Mixtral (arXiv 2401.04088): each token goes to a few of a layer's experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from elastic_trainer.plan.models.llama import says
from elastic_trainer.plan.models.mistral import Mistral


@dataclass(frozen=True, kw_only=True)
class Mixtral(Mistral):
    """Dimensions of a Mixtral decoder; `ffn_dim` is the width of one expert."""

    family: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {
        **Mistral.hf_fields,
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }
    hf_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }
    hf_refused: ClassVar[tuple[str, ...]] = (
        *Mistral.hf_refused,
        "output_router_logits",
        "router_jitter_noise",
    )
    """With output_router_logits transformers adds the load-balancing loss to what it trains on."""

    num_experts: int = field(default=1, metadata=says("Of mixtral: experts of a layer."))
    experts_per_token: int = field(default=1, metadata=says("Of mixtral: experts a token goes to."))

    @property
    def decoder(self) -> str:
        """One with a router and experts for the feed-forward."""
        return "elastic_trainer.model.mixture:MixtureDecoder"

    def num_params(self) -> int:
        """Return the number of parameters, all experts' and the routers' included."""
        return self._with_experts(self.num_experts)

    def active_params(self) -> int:
        """Return the number of parameters that one token meets."""
        return self._with_experts(self.experts_per_token)

    def _with_experts(self, count: int) -> int:
        expert, router = 3 * self.dim * self.ffn_dim, self.num_experts * self.dim
        return super().num_params() + self.num_layers * ((count - 1) * expert + router)


PRESETS: dict[str, Mixtral] = {
    "mixtral-8x7b": Mixtral(
        num_layers=32,
        dim=4096,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=14336,
        vocab_size=32000,
        rope_theta=1e6,
        num_experts=8,
        experts_per_token=2,
    ),
    "tiny-mixtral": Mixtral(
        num_layers=4,
        dim=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=96,
        vocab_size=512,
        num_experts=4,
        experts_per_token=2,
    ),
}
