"""config.json -> what transformers' own class is, and whether it is trained here. Pure.

transformers itself answers in a process of its own (elastic_trainer/model/transformers_facts.py);
here is what follows from the answer, and what can be said of a file where transformers is not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from elastic_trainer.plan.config import LoraSection
from elastic_trainer.plan.hf_config import WITHOUT_EFFECT, ConfigError, parse_object
from elastic_trainer.plan.models import Lora, Transformers
from elastic_trainer.storage.typed import build, parse_json

TP_STYLES: Final = frozenset({
    "colwise", "colwise_gather_output", "colwise_rep", "embedding_rowwise", "replicate",
    "replicated_with_grad_allreduce", "rowwise", "rowwise_rep", "rowwise_split_input",
})  # fmt: skip
"""Of transformers' tensor-parallel plans (transformers/distributed/tensor_parallel.py): what the
nodes can do."""
DIMENSIONS: Final = {
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"),
    "dim": ("hidden_size", "n_embd", "d_model", "n_embed", "dim"),
    "num_heads": (
        "num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
    ),
    "num_kv_heads": ("num_key_value_heads", "n_head_kv", "num_kv_heads", "kv_n_heads"),
    "head_dim": ("head_dim", "attention_head_dim", "d_head"),
    "ffn_dim": (
        "intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "d_inner",
        "decoder_ffn_dim",
    ),
    "vocab_size": ("vocab_size",),
}  # fmt: skip
"""Dimension -> keys of config.json, the usual one first."""
_SWITCHES: Final = {
    "quantization_config": "quantised weights are not trained",
    "is_encoder_decoder": "encoders are not trained",
    "add_cross_attention": "encoders are not trained",
    "output_router_logits": "the loss of the router is not trained on",
    "use_bidirectional_attention": "positions would see what comes after them",
}
"""Key that must be off -> why. Of the config as transformers completes it."""
_RANDOM: Final = re.compile("^(?!classifier_|summary_).*(drop|jitter|noise)")
"""In keys: what makes a forward pass random, which no two layouts would do alike; those of
classifiers are in no class here."""
_WINDOWS: Final = {
    "sliding_attention": "sliding_window",
    "chunked_attention": "attention_chunk_size",
}
"""Type of a layer -> key without which its mask cannot be made."""
_NOT_CAUSAL: Final = {"causal": False, "is_causal": False, "attn_type": "bi"}
"""Key -> value of a config whose positions see those after them."""
MOST_LAYERS: Final = 10_000
"""As of a job file's dimensions: transformers makes each of them to count."""
# fmt: off
_BESIDE: Final = frozenset((
    # Layers that predict several tokens: beside the model, and in no class here.
    "num_nextn_predict_layers", "num_mtp_layers",
    # Lengths that nothing is made of, and of which layers a window would be.
    "n_ctx", "seq_length", "model_max_length", "max_window_layers",
    # How other code computes the same.
    "ep_size", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32",
    "pad_vocab_size_multiple", "offset_alibi", "auto_map",
))
# fmt: on
_SAME: Final = {
    "experts_per_token": "num_experts_per_tok",
    "hidden_act": "hidden_activation",
    "d_inner": "intermediate_size",
}
"""Key of other code -> transformers', where both have the same value."""
_AS_ALWAYS: Final = {"moe_layer_freq": 1, "mlp_type": "default"}
"""Key of other code -> the value by which all layers are as in transformers' class."""
_LISTED: Final = 6
"""Strange keys that a message names."""
_FASTER: Final = re.compile("^fused_|_fusion$|flash_att")
"""In keys of other code: the same numbers by other kernels."""
_NEVER: Final = {
    "layout.cp": "attention of transformers' classes sees one rank's tokens only",
    "layout.pp": "classes of transformers are not cut into stages",
    "layout.ep": "experts of transformers' classes stay together",
    "train.float8": "what transformers' classes multiply is not known",
    "train.compile": "blocks of transformers' classes are not compiled",
}
"""Key of a job file -> why it is not for any class of transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What transformers says of a config.json."""

    architecture: str
    """The class that it builds."""
    params: int
    """Tied ones counted once."""
    active: int
    """Of these, those that a token meets."""
    sizes: Mapping[str, int]
    """Dimensions of `ModelShape`, by field."""
    tie_embeddings: bool
    attention: str
    """What transformers takes by default."""
    attentions: tuple[str, ...]
    """attn_implementation that the class has."""
    tp_plan: Mapping[str, str] | None
    """Module or parameter, with * for numbers -> style of tensor parallelism; None: it has none."""
    tp_sizes: Mapping[str, int]
    """What tp must divide: words for a size -> it."""
    recurrent: bool
    """Whether layers carry a state from token to token, which no mask cuts between documents."""
    linears: Mapping[str, int] = field(default_factory=dict)
    """Name of linear modules, without what they are in and but the head -> inputs and outputs of
    all that have it, added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of transformers, about one config.json: one of the three."""

    facts: Facts | None = None
    refused: str | None = None
    """What is not trained here, with key or class."""
    error: str | None = None
    """Why transformers builds no model of it."""

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Read what `transformers_facts` prints.

        Raises:
            ValueError: it is something else.
        """
        raw = parse_json(text)
        if not isinstance(raw, dict):
            raise ValueError(f"{text!r:.40} is no object")  # noqa: TRY004  it is of a text
        facts = raw.get("facts")
        return build(cls, {**raw, "facts": None if facts is None else build(Facts, facts)})


def read_config(text: str) -> dict[str, Any]:
    """Return the config.json of some model.

    Raises:
        ConfigError: HF021 it is not JSON, or has too many layers; HF022 it names no type of model.
    """
    raw = parse_object(text)
    if not isinstance(raw.get("model_type"), str):
        raise ConfigError("HF022", "model_type is missing, so no class of transformers is named")
    if (layers := dimensions(raw).get("num_layers", 0)) > MOST_LAYERS:
        raise ConfigError("HF021", f"{layers:,} layers; expected {MOST_LAYERS:,} or fewer")
    return raw


def refusal(
    raw: Mapping[str, Any],
    complete: Mapping[str, Any],
    known: frozenset[str] | None = None,
    name: str = "transformers",
) -> str | None:
    """Return what a config asks for that is not trained here, by its key; None: nothing.

    Args:
        raw: as it is written.
        complete: the same with transformers' defaults; as written where they are not known.
        known: keys that the config's class has; None: not known.
        name: of that class.
    """
    found = _switched_on(raw, complete)
    if found is not None or known is None:
        return found
    for kind, key in _WINDOWS.items():
        if kind in (complete.get("layer_types") or ()) and complete.get(key) is None:
            return f"layer_types has {kind}, and {key} is null"
    harmless = known | WITHOUT_EFFECT | _BESIDE
    strange = [
        f"{key} {value!r:.40}"
        for key, value in raw.items()
        # What is off no code does, whether or not it knows the switch.
        if value and key not in harmless and not (_FASTER.search(key) or key.endswith("_token_id"))
        if value not in (_AS_ALWAYS.get(key), complete.get(_SAME.get(key, "")))
    ]
    if not strange:
        return None
    listed = ", ".join(strange[:_LISTED]) + (" and more" if len(strange) > _LISTED else "")
    return f"{listed}: not known of {name}; delete what changes nothing that is trained"


def _switched_on(raw: Mapping[str, Any], complete: Mapping[str, Any]) -> str | None:
    for key, why in _SWITCHES.items():
        if value := raw.get(key) or complete.get(key):
            return f"{key} {value!r:.40}: {why}"
    for key, value in _NOT_CAUSAL.items():
        if complete.get(key) == value:
            return f"{key} {value!r}: positions would see what comes after them"
    for key, value in complete.items():
        if _RANDOM.search(key) and value and type(value) in (int, float):
            return f"{key} {value!r:.40}: nothing random is trained; set it to 0"
    return None


def dimensions(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the dimensions of `ModelShape` that a config says, by field; absent: it says none."""
    found = {}
    for ours, keys in DIMENSIONS.items():
        values = (_largest(config.get(key)) for key in keys)
        if (value := next(filter(None, values), None)) is not None:
            found[ours] = value
    return found


def _largest(value: Any) -> int | None:
    """Return a whole number, the largest of several; None: it is none."""
    several = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
    whole = [each for each in several if isinstance(each, int) and not isinstance(each, bool)]
    return max((each for each in whole if each > 0), default=None)


def own_class(raw: Mapping[str, Any], facts: Facts, attention: str | None = None) -> Transformers:
    """Return the shape of the class that transformers builds of `raw`.

    Raises:
        ConfigError: HF022 the class has no such attention; HF021 as `_shape`.
    """
    if attention is not None and attention not in facts.attentions:
        listed = ", ".join(facts.attentions)
        raise ConfigError(
            "HF022", f"attention {attention}: {facts.architecture} has {listed}; use one of them"
        )
    return _shape(
        raw,
        facts.sizes,
        architecture=facts.architecture,
        params=facts.params,
        active=facts.active,
        tie_embeddings=facts.tie_embeddings,
        attention=attention or facts.attention,
        tp_sizes=facts.tp_sizes,
        refused=_limits(facts),
        linears=facts.linears,
    )


def with_adapters(shape: Transformers, wanted: LoraSection) -> Transformers:
    """Return the shape with adapters beside the modules that `train.lora` names.

    A linear module has rank x (inputs + outputs) parameters of an adapter.

    Raises:
        ConfigError: HF026 the class's modules are not known; HF140 it has none of that name, or
            takes no adapters.
    """
    if not shape.linears:
        raise ConfigError(
            "HF026",
            "of adapters it must be asked, which is not installed here with torch: pip install "
            "'holdfast-ml[train,hf]'",
        )
    if why := shape.refused.get("train.lora"):
        raise ConfigError("HF140", f"is not for {shape.architecture} of transformers: {why}")
    targets = tuple(sorted(set(wanted.targets or shape.linears)))
    if unknown := [name for name in targets if name not in shape.linears]:
        raise ConfigError(
            "HF140",
            f"targets: {shape.architecture} has no linear module {unknown[0]}; it has "
            f"{', '.join(shape.linears)}",
        )
    lora = Lora(
        rank=wanted.rank,
        alpha=float(wanted.rank if wanted.alpha is None else wanted.alpha),
        targets=targets,
        params=wanted.rank * sum(shape.linears[name] for name in targets),
    )
    # peft's modules are not those that the plan of tensor parallelism cuts.
    refused = {**shape.refused, "layout.tp": "adapters are not cut"}
    return replace(shape, lora=lora, refused=refused)


def unasked(raw: Mapping[str, Any], params: int, attention: str | None = None) -> Transformers:
    """Return the shape where transformers is not installed, and `params` are as the user says.

    Raises:
        ConfigError: HF021 as `_shape`; HF022 as `refusal`.
    """
    if reason := refusal(raw, raw):
        raise ConfigError("HF022", reason)
    text = raw.get("text_config")
    inner = text if isinstance(text, Mapping) else raw
    named = raw.get("architectures")
    return _shape(
        raw,
        dimensions(inner),
        architecture=named[0] if isinstance(named, list) and named else None,
        params=params,
        active=params,
        tie_embeddings=inner.get("tie_word_embeddings") is not False,
        attention=attention or "sdpa",
        tp_sizes={},
        refused={
            **_NEVER,
            "layout.tp": "its plan is not known: transformers is not installed here",
        },
    )


def _shape(
    raw: Mapping[str, Any], sizes: Mapping[str, int], *, architecture: str | None, **others: Any
) -> Transformers:
    """Return the shape with what `sizes` lacks filled in, as most models have it.

    Raises:
        ConfigError: HF021 a dimension that there is no guess for is missing.
    """
    for needed in ("num_layers", "dim", "vocab_size"):
        if needed not in sizes:
            raise ConfigError("HF021", f"says no {DIMENSIONS[needed][0]}, under none of its names")
    dim, heads = sizes["dim"], sizes.get("num_heads", 1)
    named = {**raw, "architectures": [architecture]} if architecture else raw
    return Transformers(
        config=json.dumps(named, sort_keys=True, separators=(",", ":")),
        num_layers=sizes["num_layers"],
        dim=dim,
        num_heads=heads,
        num_kv_heads=sizes.get("num_kv_heads", heads),
        head_dim=sizes.get("head_dim") or max(1, dim // heads),
        ffn_dim=sizes.get("ffn_dim", 4 * dim),
        vocab_size=sizes["vocab_size"],
        **others,
    )


def _limits(facts: Facts) -> dict[str, str]:
    """Return key of the job file -> why it cannot be used with the class."""
    limits = {**_NEVER}
    plan = facts.tp_plan
    strange = sorted(set((plan or {}).values()) - TP_STYLES)
    if not plan:
        limits["layout.tp"] = "it has no plan"
    elif strange:
        limits["layout.tp"] = f"its plan has {', '.join(strange)}, which is not done here"
    if facts.recurrent:
        limits["data.format"] = "its layers carry a state from one document to the next"
        limits["train.lora"] = "its layers use matrices without the modules that adapters replace"
    return limits
