"""Models without torch: families, presets, shapes as plain data. Pure.

docs/models.md is the page about them.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

_T = TypeVar("_T")
SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"
"""Kinds of layers, as transformers names them: those that see `sliding_window`, and all."""


def says(text: str) -> dict[str, str]:
    """Return the metadata of a field that job files have: `text` says there what it means."""
    return {"description": text}


def option(default: _T, text: str) -> _T:
    """Return the field of a key that job files may leave out; `text` as in `says`."""
    return field(default=default, metadata=says(text))


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's scale of attention for a context `factor` times longer (arXiv 2309.00071)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0


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
    hf_ffn: ClassVar[str] = "intermediate_size"
    """Key of config.json for `ffn_dim`."""
    hf_aliases: ClassVar[Mapping[str, str]] = {}
    """Another name of a key -> the one in `hf_fields`."""
    hf_defaults: ClassVar[Mapping[str, Any]] = {}
    """Key of config.json -> what transformers takes where it is absent, if that is not Llama's."""
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias", "sliding_window")
    """Keys of config.json for what is not trained here: false, 0, null or absent."""
    hf_activation: ClassVar[tuple[str, str]] = ("hidden_act", "silu")
    """Key of config.json for the feed-forward's activation -> the only one that it has."""
    hf_layers: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json that say, beside `layer_types`, which layers see a window."""
    hf_fixed: ClassVar[Mapping[str, Any]] = {}
    """Key of config.json -> the only value that is trained here."""
    hf_ignored: ClassVar[tuple[str, ...]] = ()
    """Keys of config.json without effect on what is trained, where `hf_refused` are off."""

    num_layers: int = field(metadata=says("Decoder layers."))
    dim: int = field(metadata=says("Model width."))
    num_heads: int = field(metadata=says("Query heads."))
    num_kv_heads: int
    ffn_dim: int = field(metadata=says("Width of the SwiGLU hidden layer."))
    vocab_size: int = field(metadata=says("Rows of the embedding."))
    head_dim: int = 0
    """0: dim // num_heads."""
    norm_eps: float = option(1e-5, "Epsilon of RMSNorm.")
    rope_theta: float = option(500000.0, "Base of the rotary frequencies.")
    rope_scaling_factor: float = option(1.0, "Of RoPE scaling; 1 leaves the frequencies alone.")
    rope_low_freq_factor: float = option(1.0, "Of llama3.")
    rope_high_freq_factor: float = option(4.0, "Of llama3.")
    rope_original_context: int = option(8192, "Of llama3, yarn: context before scaling, tokens.")
    rope_scaling: str = option("llama3", "Kind of RoPE scaling: llama3, linear or yarn.")
    rope_beta_fast: float = option(32.0, "Of yarn: so many turns or more in that context are kept.")
    rope_beta_slow: float = option(1.0, "Of yarn: so many or fewer are stretched by the factor.")
    rope_truncate: bool = option(True, "Of yarn: the two bounds are whole dimensions.")
    rope_attention_factor: float | None = option(
        None, "Of yarn: factor of cosines and sines; null: 0.1 ln(rope_scaling_factor) + 1."
    )
    tie_embeddings: bool = option(False, "Embedding and head share their weights.")

    @property
    def head_size(self) -> int:
        """Size of one attention head."""
        return self.head_dim or self.dim // self.num_heads

    @property
    def rope_magnitude(self) -> float:
        """Factor of cosines and sines: YaRN's attention factor (arXiv 2309.00071, section 3.4)."""
        if self.rope_scaling != "yarn":
            return 1.0
        if self.rope_attention_factor is not None:
            return self.rope_attention_factor
        return yarn_scale(self.rope_scaling_factor)

    @property
    def qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised before they are rotated."""
        return False

    @property
    def attention_bias(self) -> bool:
        """Whether the projections to queries, keys and values have biases."""
        return False

    @property
    def output_bias(self) -> bool:
        """Whether attention's last projection has one."""
        return self.attention_bias

    @property
    def sliding_window(self) -> int | None:
        """Position i sees j with i - window < j <= i; None: all up to i."""
        return None

    @property
    def layer_types(self) -> tuple[str, ...]:
        """SLIDING or FULL, of the layers in turn, from the first again after the last."""
        return (SLIDING,)

    def layer_window(self, layer: int) -> int | None:
        """Return `sliding_window` of layer `layer`, from 0; None: it sees all before it."""
        kind = self.layer_types[layer % len(self.layer_types)]
        return self.sliding_window if kind == SLIDING else None

    @property
    def ropes(self) -> tuple[ModelShape, ...]:
        """Shapes whose RoPE layers have; `layer_rope` says which."""
        return (self,)

    def layer_rope(self, layer: int) -> int:  # noqa: ARG002  of some families layers differ
        """Return which of `ropes` layer `layer` has, from 0."""
        return 0

    @property
    def layer_norms(self) -> int:
        """RMSNorms of a layer, beside those of queries and keys."""
        return 2

    @property
    def norms_in_fp32(self) -> bool:
        """Whether norms take and keep fp32 where the forward is in bf16."""
        return False

    @property
    def attention_scale(self) -> float | None:
        """What scores of attention are multiplied by; None: 1 / sqrt(head size)."""
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
        head size), three matrices of a gated feed-forward of h x ffn, norms of h,
        and what else attention has. Around them the embedding, the final norm and
        the head (absent when tied).
        """
        h, size = self.dim, self.head_size
        q_dim, kv_dim = self.num_heads * size, self.num_kv_heads * size
        attention = 2 * h * q_dim + 2 * h * kv_dim
        attention += (q_dim + 2 * kv_dim) * self.attention_bias + h * self.output_bias
        attention += 2 * size * self.qk_norm
        layer = attention + 3 * h * self.ffn_dim + self.layer_norms * h
        tables = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + tables + h

    def active_params(self) -> int:
        """Return the number of parameters that one token meets: all, unless there are experts."""
        return self.num_params()

    def trained_params(self) -> int:
        """Return the number of parameters that the optimizer changes: all, unless some are frozen.

        They alone have gradients and moments, and are in checkpoints.
        """
        return self.num_params()

    def flops_per_token(self, seq_len: int) -> float:
        """Return training FLOPs per token: 6 N + 12 L H E k, where a query sees k keys on average.

        Source: PaLM, arXiv 2204.02311, appendix B. k is `mean_keys`; N is what a token meets,
        without the embedding look-up, which multiplies nothing (a tied table is the head too).
        """
        look_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        attention = self.num_layers * self.num_heads * self.head_size * self.mean_keys(seq_len)
        return 6.0 * (self.active_params() - look_up) + 12.0 * attention

    def mean_keys(self, seq_len: int) -> float:
        """Return how many keys a query sees, on average over positions and layers.

        Half the sequence, or what a window leaves of that.
        """
        windows = (self.layer_window(layer) for layer in range(self.num_layers))
        seen = (min(window or seq_len, seq_len) for window in windows)
        return sum(keys - keys**2 / (2 * seq_len) for keys in seen) / self.num_layers


# Those that only families derive from generate no methods: each costs every command half a
# millisecond.


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class WindowedShape(ModelShape):
    """Dimensions of a decoder whose layers may see a sliding window."""

    sliding_window: int | None = option(
        None,
        "Of mistral, mixtral and families with layer_types: tokens that a position sees, itself "
        "included; null: all.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LayeredShape(WindowedShape):
    """Dimensions of a decoder of which some layers may see a window, and others all."""

    layer_types: tuple[str, ...] = option(
        (SLIDING,),
        f"Of qwen2, qwen3, olmo3 and gemma3_text: {SLIDING}, which see the window, or {FULL}, of "
        "the layers in turn, from the first again after the last.",
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class LocalRopeShape(LayeredShape):
    """Dimensions of a decoder whose layers with a window have a RoPE of their own, not scaled."""

    hf_local_theta: ClassVar[str | None] = None
    """Key of config.json for `rope_local_theta`, beside `rope_parameters`."""

    rope_local_theta: float = option(
        10000.0, "Of olmo3 and gemma3_text: rope_theta of the layers that see the window."
    )

    @property
    def ropes(self) -> tuple[ModelShape, ...]:
        """That of layers that see all, and that of layers with a window."""
        local = dataclasses.replace(
            self, rope_theta=self.rope_local_theta, rope_scaling="llama3", rope_scaling_factor=1.0
        )
        return (self, local)

    def layer_rope(self, layer: int) -> int:
        """Return 1 for a layer with a window."""
        return int(self.layer_window(layer) is not None)


@dataclass(frozen=True, kw_only=True)
class Qwen2(LayeredShape):
    """Dimensions of a Qwen2 or Qwen2.5 decoder (arXiv 2407.10671, 2412.15115).

    Queries, keys and values have biases.
    """

    family: ClassVar[str] = "qwen2"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    hf_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    hf_refused: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    hf_layers: ClassVar[tuple[str, ...]] = (
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
    )

    @property
    def attention_bias(self) -> bool:
        """Qwen2's mark."""
        return True

    @property
    def output_bias(self) -> bool:
        """The three alone have biases."""
        return False


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class NormedHeadsShape(ModelShape):
    """Dimensions of a decoder that normalises each head's queries and keys, as Qwen3's do."""

    attention_bias: bool = option(False, "Of qwen3: the projections of attention have biases.")

    @property
    def qk_norm(self) -> bool:
        """The mark of these."""
        return True


@dataclass(frozen=True, kw_only=True)
class Qwen3(NormedHeadsShape, LayeredShape):
    """Dimensions of a Qwen3 decoder (arXiv 2505.09388); heads have any size."""

    family: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"attention_bias": "attention_bias"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {**Qwen2.hf_defaults, "head_dim": 128}
    hf_refused: ClassVar[tuple[str, ...]] = ("mlp_bias",)
    hf_layers: ClassVar[tuple[str, ...]] = Qwen2.hf_layers


@dataclass(frozen=True, kw_only=True)
class Mistral(WindowedShape):
    """Dimensions of a Mistral decoder (arXiv 2310.06825): attention in a sliding window."""

    family: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"sliding_window": "sliding_window"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")


@dataclass(frozen=True, kw_only=True)
class Granite(ModelShape):
    """Dimensions of a Granite 3 decoder, whose activations are scaled at four places."""

    family: ClassVar[str] = "granite"
    architecture: ClassVar[str] = "GraniteForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {
        "embedding_multiplier": "embedding_multiplier",
        "attention_multiplier": "attention_multiplier",
        "residual_multiplier": "residual_multiplier",
        "logits_scaling": "logits_scaling",
    }
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    embedding_multiplier: float = option(1.0, "Of granite: factor of embeddings.")
    attention_multiplier: float = option(1.0, "Of granite: factor of attention's scores.")
    residual_multiplier: float = option(1.0, "Of granite: factor of each branch.")
    logits_scaling: float = option(1.0, "Of granite: divisor of logits.")

    @property
    def attention_scale(self) -> float | None:
        """In place of 1 / sqrt(head size)."""
        return self.attention_multiplier

    @property
    def decoder(self) -> str:
        """One with these constants."""
        return "elastic_trainer.model.granite:GraniteDecoder"


@dataclass(frozen=True, kw_only=True)
class Olmo2(ModelShape):
    """Dimensions of an OLMo 2 decoder (arXiv 2501.00656).

    Branches are normalised where they join the residual stream, not where they leave it. Queries
    are normalised over all heads, and so are keys.
    """

    family: ClassVar[str] = "olmo2"
    architecture: ClassVar[str] = "Olmo2ForCausalLM"
    hf_defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    @property
    def qk_norm(self) -> bool:
        """Queries and keys have norms; of all heads, see `num_params`."""
        return True

    @property
    def decoder(self) -> str:
        """One whose norms follow the branches."""
        return "elastic_trainer.model.olmo:OlmoDecoder"

    def num_params(self) -> int:
        """Return the number of parameters: norms of queries and keys are as wide as these."""
        wider = (self.num_heads + self.num_kv_heads - 2) * self.head_size
        return super().num_params() + self.num_layers * wider


@dataclass(frozen=True, kw_only=True)
class Olmo3(Olmo2, LocalRopeShape):
    """Dimensions of an OLMo 3 decoder: OLMo 2's, of whose layers some see a window."""

    family: ClassVar[str] = "olmo3"
    architecture: ClassVar[str] = "Olmo3ForCausalLM"
    hf_defaults: ClassVar[Mapping[str, Any]] = {
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    }
    """`sliding_window_pattern` is no key of its config.json: every fourth layer sees all."""
    hf_layers: ClassVar[tuple[str, ...]] = ("sliding_window",)


@dataclass(frozen=True, kw_only=True)
class Gemma3(LocalRopeShape):
    """Dimensions of the decoder of text of Gemma 3 (arXiv 2503.19786)."""

    family: ClassVar[str] = "gemma3_text"
    architecture: ClassVar[str] = "Gemma3ForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"query_pre_attn_scalar": "query_pre_attn_scalar"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    }
    """The published files leave out what is as in the 4B model."""
    hf_refused: ClassVar[tuple[str, ...]] = (
        "attention_bias",
        "mlp_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_bidirectional_attention",
    )
    hf_activation: ClassVar[tuple[str, str]] = ("hidden_activation", "gelu_pytorch_tanh")
    hf_layers: ClassVar[tuple[str, ...]] = ("sliding_window", "sliding_window_pattern")
    hf_ignored: ClassVar[tuple[str, ...]] = ("_sliding_window_pattern",)
    """transformers writes it beside `layer_types`, and never reads it."""
    hf_local_theta: ClassVar[str | None] = "rope_local_base_freq"

    query_pre_attn_scalar: int = option(
        256, "Of gemma3_text: scores of attention are divided by its square root."
    )

    @property
    def qk_norm(self) -> bool:
        """Of each head, as Qwen3."""
        return True

    @property
    def layer_norms(self) -> int:
        """Before and after each branch."""
        return 4

    @property
    def norms_in_fp32(self) -> bool:
        """As transformers computes 1 + w."""
        return True

    @property
    def attention_scale(self) -> float | None:
        """In place of 1 / sqrt(head size)."""
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def decoder(self) -> str:
        """One with Gemma's norms, activation and scaled embeddings."""
        return "elastic_trainer.model.gemma:GemmaDecoder"


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class MixtureShape(ModelShape):
    """Dimensions of a decoder of which each token goes to a few of a layer's experts.

    `ffn_dim` is the width of one expert.
    """

    hf_mixture: ClassVar[str]
    """Hugging Face's module of a layer's router, `gate`, and its `experts`."""
    hf_expert: ClassVar[Mapping[str, str]]
    """An expert's matrix -> Hugging Face's."""

    num_experts: int = option(1, "Of mixtral and qwen3_moe: experts of a layer.")
    experts_per_token: int = option(1, "Of mixtral and qwen3_moe: experts a token goes to.")

    @property
    def norm_topk_prob(self) -> bool:
        """Whether the weights of a token's experts are rescaled to a sum of one."""
        return True

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


@dataclass(frozen=True, kw_only=True)
class Mixtral(Mistral, MixtureShape):
    """Dimensions of a Mixtral decoder (arXiv 2401.04088)."""

    family: ClassVar[str] = "mixtral"
    architecture: ClassVar[str] = "MixtralForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {
        **Mistral.hf_fields,
        "num_experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    }
    hf_aliases: ClassVar[Mapping[str, str]] = {"num_experts": "num_local_experts"}
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
    hf_ignored: ClassVar[tuple[str, ...]] = ("router_aux_loss_coef",)
    hf_mixture: ClassVar[str] = "block_sparse_moe"
    hf_expert: ClassVar[Mapping[str, str]] = {"w1": "w1", "w2": "w2", "w3": "w3"}


@dataclass(frozen=True, kw_only=True)
class Qwen3Moe(NormedHeadsShape, MixtureShape):
    """Dimensions of a Qwen3-MoE decoder (arXiv 2505.09388) all of whose layers are mixtures."""

    family: ClassVar[str] = "qwen3_moe"
    architecture: ClassVar[str] = "Qwen3MoeForCausalLM"
    hf_ffn: ClassVar[str] = "moe_intermediate_size"
    hf_fields: ClassVar[Mapping[str, str]] = {
        **Qwen3.hf_fields,
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "norm_topk_prob": "norm_topk_prob",
    }
    hf_aliases: ClassVar[Mapping[str, str]] = {"num_local_experts": "num_experts"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    }
    hf_refused: ClassVar[tuple[str, ...]] = (
        "mlp_bias",
        "use_sliding_window",
        "output_router_logits",
        "mlp_only_layers",
    )
    hf_fixed: ClassVar[Mapping[str, Any]] = {"decoder_sparse_step": 1}
    hf_ignored: ClassVar[tuple[str, ...]] = (
        "sliding_window",
        "max_window_layers",
        "router_aux_loss_coef",
        "intermediate_size",
    )
    hf_mixture: ClassVar[str] = "mlp"
    hf_expert: ClassVar[Mapping[str, str]] = {
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
    }

    norm_topk_prob: bool = option(
        False, "Of qwen3_moe: weights of a token's experts are rescaled to a sum of one."
    )


@dataclass(frozen=True, kw_only=True)
class Plugin(ModelShape):
    """Dimensions of a user's own decoder, whose class the nodes import."""

    family: ClassVar[str] = "plugin"

    plugin: str = field(
        metadata=says("Your own decoder instead of a family: module:Class, as my_model:MyModel.")
    )
    params: int | None = option(
        None, "Of a plugin: its number of parameters; null: Llama's of these dimensions."
    )
    options: Mapping[str, str | int | float | bool | None] = field(
        default_factory=dict, hash=False, metadata=says("Of a plugin: values for its class.")
    )

    @property
    def decoder(self) -> str:
        """The job's own class."""
        return self.plugin

    def num_params(self) -> int:
        """Return what the job file says, else the number of a Llama's parameters."""
        return self.params or super().num_params()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Adapters of low rank (LoRA, arXiv 2106.09685): all that is trained of a model.

    A linear module W of `targets` computes W x + alpha / rank B A x; W stays as it is.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of linear modules, without what they are in."""
    params: int
    """Of all adapters."""


@dataclass(frozen=True, kw_only=True)
class Transformers(ModelShape):
    """A causal model of transformers' own class, which the nodes build from its config.json.

    The dimensions are for layouts and estimates alone: of what the config has none for they are
    the nearest, and the class is built from `config` as it is.
    """

    family: ClassVar[str] = "transformers"

    config: str
    """config.json as canonical JSON: sorted keys, no spaces, ASCII."""
    params: int
    """Tied ones counted once."""
    active: int
    """Parameters that one token meets."""
    attention: str = "sdpa"
    """attn_implementation, as transformers names it."""
    lora: Lora | None = None
    """None: all parameters are trained."""
    tp_sizes: Mapping[str, int] = field(default_factory=dict, hash=False, compare=False)
    """What tp must divide: words for a size -> it. For the launcher, as what follows."""
    refused: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False)
    """Key of the job file -> why it cannot be used with this class."""
    linears: Mapping[str, int] = field(default_factory=dict, hash=False, compare=False)
    """Name of linear modules -> inputs and outputs of all that have it, added up."""

    @property
    def architecture(self) -> str:  # type: ignore[override]
        """The class that the config names; empty: it names none."""
        return str((json.loads(self.config).get("architectures") or [""])[0])

    @property
    def decoder(self) -> str:
        """The one that wraps transformers' class."""
        return "elastic_trainer.model.transformers_model:TransformersModel"

    def num_params(self) -> int:
        """Return the exact number, as counted of the class; adapters are besides."""
        return self.params

    def trained_params(self) -> int:
        """Return the number of parameters of the adapters, or all."""
        return self.params if self.lora is None else self.lora.params

    def active_params(self) -> int:
        """Return the number of parameters that one token meets."""
        return self.active

    def flops_per_token(self, seq_len: int) -> float:
        """Return training FLOPs per token; with adapters without the gradients of what is frozen.

        Those are 2 N of the 6 N. What adapters multiply themselves is left out.
        """
        look_up = 0 if self.tie_embeddings else self.vocab_size * self.dim
        unused = 0.0 if self.lora is None else 2.0 * (self.active - look_up)
        return super().flops_per_token(seq_len) - unused


FAMILIES: Final[Mapping[str, type[ModelShape]]] = {
    family.family: family
    for family in (
        ModelShape,
        Qwen2,
        Qwen3,
        Mistral,
        Mixtral,
        Qwen3Moe,
        Granite,
        Olmo2,
        Olmo3,
        Gemma3,
    )
}
"""Name, as in job files and config.json -> shape."""


def _llama3(num_layers: int, dim: int, num_heads: int, ffn_dim: int, factor: float) -> ModelShape:
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


_7B: Final[dict[str, Any]] = {
    "num_layers": 32,
    "dim": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_dim": 14336,
    "vocab_size": 32000,
}
_TINY: Final[dict[str, Any]] = {
    "num_layers": 4,
    "dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_dim": 192,
    "vocab_size": 512,
}

PRESETS: Final[Mapping[str, ModelShape]] = {
    "llama3-8b": _llama3(32, 4096, 32, 14336, 1.0),
    "llama3-70b": _llama3(80, 8192, 64, 28672, 1.0),
    "llama3-405b": _llama3(126, 16384, 128, 53248, 8.0),
    "tiny": ModelShape(**_TINY),
    "tiny-wide": ModelShape(
        **_TINY | {"dim": 256, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 768}
    ),
    "qwen2.5-7b": Qwen2(
        num_layers=28,
        dim=3584,
        num_heads=28,
        num_kv_heads=4,
        ffn_dim=18944,
        vocab_size=152064,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "tiny-qwen2": Qwen2(**_TINY, norm_eps=1e-6, tie_embeddings=True),
    "qwen3-8b": Qwen3(
        num_layers=36,
        dim=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_dim=12288,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    # Heads of another size than dim / num_heads, and biases: all that the family has.
    "tiny-qwen3": Qwen3(**_TINY, head_dim=24, norm_eps=1e-6, attention_bias=True),
    "mistral-7b": Mistral(**_7B, rope_theta=10000.0, sliding_window=4096),
    "tiny-mistral": Mistral(**_TINY, sliding_window=16),
    "mixtral-8x7b": Mixtral(**_7B, rope_theta=1e6, num_experts=8, experts_per_token=2),
    "tiny-mixtral": Mixtral(**_TINY | {"ffn_dim": 96}, num_experts=4, experts_per_token=2),
    "tiny-granite": Granite(
        **_TINY,
        embedding_multiplier=12.0,
        attention_multiplier=0.1,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "qwen3-30b-a3b": Qwen3Moe(
        num_layers=48,
        dim=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        ffn_dim=768,
        vocab_size=151936,
        norm_eps=1e-6,
        rope_theta=1e6,
        num_experts=128,
        experts_per_token=8,
        norm_topk_prob=True,
    ),
    # Not rescaled, as mixtral's are.
    "tiny-qwen3-moe": Qwen3Moe(
        **_TINY | {"ffn_dim": 96}, head_dim=24, norm_eps=1e-6, num_experts=4, experts_per_token=2
    ),
    "olmo2-7b": Olmo2(
        **_7B | {"num_kv_heads": 32, "ffn_dim": 11008, "vocab_size": 100352}, norm_eps=1e-6
    ),
    "tiny-olmo2": Olmo2(**_TINY),
    # Layers of both kinds in each of two stages.
    "tiny-olmo3": Olmo3(
        **_TINY,
        sliding_window=16,
        layer_types=(SLIDING, FULL),
        rope_local_theta=500000.0,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_original_context=32,
    ),
    "gemma3-1b": Gemma3(
        num_layers=26,
        dim=1152,
        num_heads=4,
        num_kv_heads=1,
        head_dim=256,
        ffn_dim=6912,
        vocab_size=262144,
        norm_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=True,
        sliding_window=512,
        layer_types=(*(SLIDING,) * 5, FULL),
    ),
    "tiny-gemma3": Gemma3(
        **_TINY,
        head_dim=24,
        norm_eps=1e-6,
        rope_theta=1e6,
        tie_embeddings=True,
        sliding_window=16,
        layer_types=(SLIDING, FULL),
        query_pre_attn_scalar=20,
    ),
}
"""Models known by name. llama3-8b and -70b are Llama 3 (8 K of context); llama3-405b exists as
Llama 3.1 only, with its long-context RoPE scaling (factor 8 over 8,192). mistral-7b is 0.1, the one
with a window."""

PUBLISHED_CONTEXT: Final[Mapping[str, int]] = {
    "llama3-8b": 8192,
    "llama3-70b": 8192,
    "llama3-405b": 131072,
    "qwen2.5-7b": 131072,
    "qwen3-8b": 40960,
    "mistral-7b": 32768,
    "mixtral-8x7b": 32768,
    "qwen3-30b-a3b": 40960,
    "olmo2-7b": 4096,
    "gemma3-1b": 32768,
}
"""Tokens of context the published weights were trained for."""


_LATER: Final = (
    "rope_scaling",
    "rope_beta_fast",
    "rope_beta_slow",
    "rope_truncate",
    "rope_attention_factor",
    "layer_types",
    "sliding_window",
    "lora",
)
"""Fields younger than job.json: at their defaults they are left out, and 0.1.0 reads the rest."""


def raw_of(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as job.json and manifests have it: one without a family is Llama's."""
    raw = dataclasses.asdict(shape)
    for each in dataclasses.fields(shape):
        if (each.name in _LATER and raw[each.name] == each.default) or not each.compare:
            del raw[each.name]
    return raw if type(shape) is ModelShape else {"family": shape.family, **raw}


def shape_of(raw: Mapping[str, Any]) -> ModelShape:
    """Return the shape that `raw_of` wrote.

    Raises:
        ValueError: of a family that this version does not know.
        TypeError: a field is missing or unknown.
    """
    fields = dict(raw)
    if (lora := fields.get("lora")) is not None:
        fields["lora"] = Lora(**{**lora, "targets": tuple(lora["targets"])})
    family = fields.pop("family", ModelShape.family)
    known = {**FAMILIES, Plugin.family: Plugin, Transformers.family: Transformers}
    if family not in known:
        raise ValueError(f"model family {family!r:.40}: use the version that wrote it")
    fields = {key: tuple(each) if isinstance(each, list) else each for key, each in fields.items()}
    return known[family](**fields)
