"""Models without torch: families, presets, shapes as plain data, Hugging Face's config.json. Pure.

docs/models.md is the page about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, TypeVar

from elastic_trainer.storage.typed import parse_json

_T = TypeVar("_T")


def says(text: str) -> dict[str, str]:
    """Return the metadata of a field that job files have: `text` says there what it means."""
    return {"description": text}


def option(default: _T, text: str) -> _T:
    """Return the field of a key that job files may leave out; `text` as in `says`."""
    return field(default=default, metadata=says(text))


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
    norm_eps: float = option(1e-5, "Epsilon of RMSNorm.")
    rope_theta: float = option(500000.0, "Base of the rotary frequencies.")
    rope_scaling_factor: float = option(1.0, "Llama 3.1 long-context scaling; 1 turns it off.")
    rope_low_freq_factor: float = option(1.0, "Llama 3.1 RoPE scaling.")
    rope_high_freq_factor: float = option(4.0, "Llama 3.1 RoPE scaling.")
    rope_original_context: int = option(8192, "Context before scaling, in tokens.")
    tie_embeddings: bool = option(False, "Embedding and head share their weights.")

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


@dataclass(frozen=True, kw_only=True)
class Qwen3(ModelShape):
    """Dimensions of a Qwen3 decoder (arXiv 2505.09388) whose layers all see the whole sequence.

    Each head's queries and keys are normalised, heads have any size.
    """

    family: ClassVar[str] = "qwen3"
    architecture: ClassVar[str] = "Qwen3ForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"attention_bias": "attention_bias"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 32, "head_dim": 128}
    hf_refused: ClassVar[tuple[str, ...]] = ("mlp_bias", "use_sliding_window")

    attention_bias: bool = option(False, "Of qwen3: the projections of attention have biases.")

    @property
    def qk_norm(self) -> bool:
        """Qwen3's mark."""
        return True


@dataclass(frozen=True, kw_only=True)
class Mistral(ModelShape):
    """Dimensions of a Mistral decoder (arXiv 2310.06825): attention in a sliding window."""

    family: ClassVar[str] = "mistral"
    architecture: ClassVar[str] = "MistralForCausalLM"
    hf_fields: ClassVar[Mapping[str, str]] = {"sliding_window": "sliding_window"}
    hf_defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "sliding_window": 4096}
    hf_refused: ClassVar[tuple[str, ...]] = ("attention_bias", "mlp_bias")

    sliding_window: int | None = option(
        None, "Of mistral and mixtral: tokens that a position sees, itself included; null: all."
    )


@dataclass(frozen=True, kw_only=True)
class Mixtral(Mistral):
    """Dimensions of a Mixtral decoder (arXiv 2401.04088); `ffn_dim` is the width of one expert.

    Each token goes to a few of a layer's experts.
    """

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

    num_experts: int = option(1, "Of mixtral: experts of a layer.")
    experts_per_token: int = option(1, "Of mixtral: experts a token goes to.")

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


FAMILIES: Final[Mapping[str, type[ModelShape]]] = {
    family.family: family for family in (ModelShape, Qwen3, Mistral, Mixtral)
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
}
"""Models known by name. llama3-8b and -70b are Llama 3 (8 K of context); llama3-405b exists as
Llama 3.1 only, with its long-context RoPE scaling (factor 8 over 8,192). mistral-7b is 0.1, the one
with a window."""

PUBLISHED_CONTEXT: Final[Mapping[str, int]] = {
    "llama3-8b": 8192,
    "llama3-70b": 8192,
    "llama3-405b": 131072,
    "qwen3-8b": 40960,
    "mistral-7b": 32768,
    "mixtral-8x7b": 32768,
}
"""Tokens of context the published weights were trained for."""


def raw_of(shape: ModelShape) -> dict[str, Any]:
    """Return a shape as job.json and manifests have it: one without a family is Llama's."""
    family = {} if type(shape) is ModelShape else {"family": shape.family}
    return {**family, **dataclasses.asdict(shape)}


def shape_of(raw: Mapping[str, Any]) -> ModelShape:
    """Return the shape that `raw_of` wrote.

    Raises:
        ValueError: of a family that this version does not know.
        TypeError: a field is missing or unknown.
    """
    fields = dict(raw)
    family = fields.pop("family", ModelShape.family)
    known = {**FAMILIES, Plugin.family: Plugin}
    if family not in known:
        raise ValueError(f"model family {family!r:.40}: use the version that wrote it")
    return known[family](**fields)


# --- a Hugging Face config.json -------------------------------------------------------

_DIMENSIONS: Final = {
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_MOST: Final = {"num_hidden_layers": 10_000, "num_local_experts": 1024}
"""As of these in a job file; of other sizes 10**9."""


class ConfigError(Exception):
    """The file describes no model that can be trained here; `code` says which way."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_hf_config(text: str) -> ModelShape:
    """Return the shape that the text of a `config.json` describes.

    Reads both the older form (`rope_theta`, `rope_scaling`) and the newer one
    (`rope_parameters`).

    Raises:
        ConfigError: HF021 not JSON or incomplete; HF022 another architecture, or
            a feature that this trainer does not have.
    """
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise ConfigError("HF021", f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("HF021", "not a JSON object; give a model's config.json")
    family = _family_of(raw)
    raw = {**family.hf_defaults, **raw}
    sizes = {ours: _whole(raw, theirs) for ours, theirs in _DIMENSIONS.items()}
    kv_heads = raw.get("num_key_value_heads")
    return family(
        **sizes,
        num_kv_heads=sizes["num_heads"] if kv_heads is None else _whole(raw, "num_key_value_heads"),
        head_dim=0 if raw.get("head_dim") is None else _whole(raw, "head_dim"),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=raw.get("tie_word_embeddings") is True,
        **_rope(raw),
        **_own(raw, family),
    )


def _family_of(raw: dict[str, Any]) -> type[ModelShape]:
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            "HF022",
            f"model_type {kind!r:.40} is none of {', '.join(FAMILIES)}; train it as a plug-in "
            "(docs/models.md), or by a script (command:)",
        )
    for key in family.hf_refused:
        if raw.get(key):
            raise ConfigError("HF022", f"{key} {raw[key]!r:.40} is not supported of {kind}")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError("HF022", f"hidden_act {activation!r:.40} is not supported; only 'silu'")
    return family


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ConfigError("HF021", "rope_scaling is not a JSON object")
    theta = _number(rope if "rope_theta" in rope else raw, "rope_theta", 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise ConfigError("HF022", f"RoPE scaling {kind!r:.40} is not supported; only 'llama3'")
    return {
        "rope_theta": theta,
        "rope_scaling_factor": _number(rope, "factor", 8.0),
        "rope_low_freq_factor": _number(rope, "low_freq_factor", 1.0),
        "rope_high_freq_factor": _number(rope, "high_freq_factor", 4.0),
        "rope_original_context": (
            _whole(rope, "original_max_position_embeddings")
            if "original_max_position_embeddings" in rope
            else 8192
        ),
    }


def _own(raw: dict[str, Any], family: type[ModelShape]) -> dict[str, Any]:
    """Return the family's own fields: true or false, or a whole number, or null by default."""
    defaults = {each.name: each.default for each in dataclasses.fields(family)}
    found: dict[str, Any] = {}
    for ours, key in family.hf_fields.items():
        default = defaults[ours]
        if isinstance(default, bool):
            found[ours] = raw.get(key) is True
        elif default is None and raw.get(key) is None:
            found[ours] = None
        else:
            found[ours] = _whole(raw, key)
    return found


def _whole(raw: dict[str, Any], key: str) -> int:
    value, most = raw.get(key), _MOST.get(key, 10**9)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigError(
            "HF021", f"{key} is {value!r:.40}; expected a whole number from 1 to {most:,}"
        )
    return value


def _number(raw: dict[str, Any], key: str, default: float) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise ConfigError("HF021", f"{key} is {value!r:.40}; expected a number above 0")
    return float(value)
