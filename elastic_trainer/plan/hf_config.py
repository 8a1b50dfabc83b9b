"""Hugging Face's config.json -> shape. Pure.

No key is passed over: each one is used, or has no effect on what is trained, or is refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from elastic_trainer.plan.models import (
    FAMILIES,
    FULL,
    SLIDING,
    LayeredShape,
    LocalRopeShape,
    ModelShape,
    yarn_scale,
)
from elastic_trainer.storage.typed import parse_json

_OLD_CONTEXT: Final = "original_max_position_embeddings"
_DIMENSIONS: Final = {
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_MOST: Final = {"num_hidden_layers": 10_000, "num_local_experts": 1024, "num_experts": 1024}
"""As of these in a job file; of other sizes 10**9."""
# fmt: off
_USED: Final = frozenset((
    *_DIMENSIONS.values(), "num_key_value_heads", "head_dim", "rms_norm_eps",
    "tie_word_embeddings", "model_type", "architectures", "layer_types", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", _OLD_CONTEXT,
))
_OFF: Final = frozenset((
    "quantization_config", "auto_map", "pruned_heads", "is_encoder_decoder",
    "add_cross_attention", "rope_interleaved", "use_mrope",
))
"""What no family has here: false, empty or null."""
_DROPOUT: Final = re.compile("dropout|_pdrop|_drop$")
"""In keys: the same of every kind of dropout, which is 0."""
WITHOUT_EFFECT: Final = frozenset((
    # Where the file comes from, and for whom.
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "torch_dtype",
    "dtype", "use_bfloat16", "tokenizer_class", "prefix", "unsloth_fixed", "unsloth_version",
    "transformers.js_config", "is_llama_config",
    # How the same numbers are computed, and what is returned beside them.
    "use_cache", "pretraining_tp", "torchscript", "chunk_size_feed_forward", "return_dict",
    "output_attentions", "output_hidden_states", "is_decoder", "attn_implementation",
    "_attn_implementation", "_attn_implementation_autoset", "_experts_implementation",
    "_flash_attn_2_enabled", "gradient_checkpointing", "tf_legacy_loss", "tie_encoder_decoder",
    # What weights begin with, and how many positions they were trained on.
    "initializer_range", "max_position_embeddings", "max_sequence_length",
    # Of classifiers, whose architectures are refused.
    "id2label", "label2id", "num_labels", "problem_type", "finetuning_task",
    "task_specific_params",
    # Of generation.
    "bad_words_ids", "begin_suppress_tokens", "cache_implementation", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens",
    "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
))
# fmt: on
"""Of transformers' PreTrainedConfig and GenerationConfig, and of tools that write them."""
_ROPE_KEYS: Final = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _OLD_CONTEXT), ()),
    "yarn": (
        ("factor", _OLD_CONTEXT),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
"""Type of RoPE -> the keys that it needs, and those with a default."""
_BESIDE_TEXT: Final = (
    "text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
    "image_token_index",
)  # fmt: skip
"""Of a config for text and images, without effect on its class of text alone."""
_ROPE_COMMON: Final = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


class ConfigError(Exception):
    """The file describes no model that can be trained here; `code` says which way."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def parse_object(text: str) -> dict[str, Any]:
    """Return the content of some `config.json`.

    Raises:
        ConfigError: HF021 not a JSON object.
    """
    try:
        raw = parse_json(text)
    except ValueError as error:
        raise ConfigError("HF021", f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError("HF021", "not a JSON object; give a model's config.json")
    return raw


def parse_hf_config(text: str) -> ModelShape:
    """Return the shape that the text of a `config.json` describes.

    Reads both the older form (`rope_theta`, `rope_scaling`) and the newer one
    (`rope_parameters`).

    Raises:
        ConfigError: HF021 not JSON or incomplete; HF022 another architecture, or
            a feature that this trainer does not have, or a key that it does not know.
    """
    raw = _text_alone(parse_object(text))
    family = _family_of(raw)
    raw = _renamed(raw, family.hf_aliases)
    _check_keys(raw, family)
    raw = {**family.hf_defaults, **raw}
    dimensions = {**_DIMENSIONS, "ffn_dim": family.hf_ffn}
    sizes: dict[str, Any] = {ours: _whole(raw, theirs) for ours, theirs in dimensions.items()}
    kv_heads = raw.get("num_key_value_heads")
    shape = family(
        **sizes,
        num_kv_heads=sizes["num_heads"] if kv_heads is None else _whole(raw, "num_key_value_heads"),
        head_dim=0 if raw.get("head_dim") is None else _whole(raw, "head_dim"),
        norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(raw, "tie_word_embeddings"),
        **(_ropes(raw, family) if issubclass(family, LocalRopeShape) else _rope(raw, raw)),
        **_own(raw, family),
        **(_layers(raw, sizes["num_layers"]) if issubclass(family, LayeredShape) else {}),
    )
    layer = FULL if shape.sliding_window is None else SLIDING
    types = raw.get("layer_types")
    if not isinstance(shape, LayeredShape) and types not in (None, [layer] * shape.num_layers):
        raise ConfigError(
            "HF022", f"layer_types is not {layer} for each of the {shape.num_layers} layers"
        )
    return shape


def _text_alone(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the part for text of a config for text and images, where its class is of text."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    kind = text.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None or raw.get("architectures") != [family.architecture]:
        return raw
    return {key: value for key, value in raw.items() if key not in _BESIDE_TEXT} | text


def _family_of(raw: dict[str, Any]) -> type[ModelShape]:
    kind = raw.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ConfigError(
            "HF022",
            f"model_type {kind!r:.40} is none of {', '.join(FAMILIES)}; train it as a plug-in "
            "(docs/models.md), or by a script (command:)",
        )
    named = raw.get("architectures") or [family.architecture]
    if named != [family.architecture]:
        raise ConfigError(
            "HF022", f"architectures {named!r:.60}: of {kind} only {family.architecture} is trained"
        )
    return family


def _renamed(raw: dict[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return `raw` with each key under one name."""
    for alias, name in aliases.items():
        if raw.get(alias) is not None and raw.get(name, raw[alias]) != raw[alias]:
            raise ConfigError("HF021", f"{alias} and {name} differ; keep one of them")
    given = {key: value for key, value in raw.items() if value is not None or key not in aliases}
    return {aliases.get(key, key): value for key, value in given.items()}


def _check_keys(raw: dict[str, Any], family: type[ModelShape]) -> None:
    """Refuse the first key that says more than is read here."""
    activation, only = family.hf_activation
    own = {family.hf_ffn, activation, *family.hf_fields.values(), *family.hf_layers}
    own |= {*family.hf_ignored}
    if issubclass(family, LocalRopeShape) and family.hf_local_theta:
        own.add(family.hf_local_theta)
    silent, fixed = _USED | WITHOUT_EFFECT | own, family.hf_fixed
    for key, value in raw.items():
        if value is None or key in silent or key.endswith("_token_id"):
            continue
        if key in fixed:
            if value != fixed[key]:
                raise ConfigError(
                    "HF022", f"{key} {value!r:.40} is not supported; only {fixed[key]!r}"
                )
            continue
        if key not in _OFF and key not in family.hf_refused and not _DROPOUT.search(key):
            raise ConfigError(
                "HF022",
                f"{key} {value!r:.40} is not known of {family.family}, and may change what is "
                "trained; delete it if it does not",
            )
        if value:
            raise ConfigError("HF022", f"{key} {value!r:.40} is not supported of {family.family}")
    if raw.get(activation, only) != only:
        raise ConfigError(
            "HF022", f"{activation} {raw[activation]!r:.40} is not supported; only {only!r}"
        )


def _layers(raw: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the window and which layers see it, as briefly as it can be said."""
    used = "use_sliding_window" not in raw or _flag(raw, "use_sliding_window")
    window = _whole(raw, "sliding_window") if used and raw["sliding_window"] is not None else None
    types = raw.get("layer_types")
    if types is None:
        types = [SLIDING if each else FULL for each in _default_windows(raw, num_layers, window)]
    known = isinstance(types, list) and all(each in (SLIDING, FULL) for each in types)
    if not known or len(types) != num_layers:
        raise ConfigError(
            "HF022", f"layer_types is not {SLIDING} or {FULL} for each of the {num_layers} layers"
        )
    if SLIDING not in types:
        return {"sliding_window": None}
    if window is None:
        raise ConfigError("HF022", f"layer_types has {SLIDING}, but no sliding_window is used")
    period = next(n for n in range(1, num_layers + 1) if types[n:] == types[:-n])
    return {"sliding_window": window, "layer_types": tuple(types[:period])}


def _default_windows(raw: dict[str, Any], num_layers: int, window: int | None) -> list[bool]:
    """Return which layers see the window where no `layer_types` says so."""
    if "sliding_window_pattern" in raw:
        every = _whole(raw, "sliding_window_pattern")
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    first = _whole(raw, "max_window_layers", least=0)
    return [window is not None and layer >= first for layer in range(num_layers)]


def _ropes(raw: dict[str, Any], family: type[LocalRopeShape]) -> dict[str, Any]:
    """Return what all layers' RoPE has, and what that of layers with a window has."""
    both, key = raw.get("rope_parameters"), family.hf_local_theta
    if both is None:
        theta = _number(raw, key or "rope_theta")
        if key is None and theta != family.hf_defaults["rope_theta"]:
            # Versions of transformers differ in what layers with a window then have.
            raise ConfigError(
                "HF022", f"rope_theta {theta:g} may be of some layers; use rope_parameters"
            )
        return {**_rope(raw, raw), "rope_local_theta": theta}
    if not isinstance(both, dict) or not {*both} <= {SLIDING, FULL}:
        raise ConfigError("HF021", f"rope_parameters is not an object of {SLIDING} and {FULL}")
    local, rest = both.get(SLIDING) or {}, {**raw, "rope_parameters": both.get(FULL)}
    found = _rope(raw, rest)
    alone = _rope(raw, {"rope_theta": raw[key or "rope_theta"], "rope_parameters": local})
    if len(alone) > 1:
        raise ConfigError("HF022", f"RoPE of {SLIDING} is scaled: {local!r:.60}; leave it alone")
    return {**found, "rope_local_theta": alone["rope_theta"]}


def _rope(raw: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the RoPE that `given` has, of a config `raw`."""
    rope = _rope_dict(given)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(
            "HF022", f"RoPE scaling {kind!r:.40} is not supported; only {', '.join(_ROPE_KEYS)}"
        )
    # transformers prefers the outer one, as of Phi-3.
    old_context = raw.get(_OLD_CONTEXT) or rope.get(_OLD_CONTEXT)
    if kind == "yarn":
        old_context = old_context or raw.get("max_position_embeddings")
    rope = {**rope, _OLD_CONTEXT: old_context}
    needed, others = _ROPE_KEYS[kind]
    if missing := [key for key in needed if rope.get(key) is None]:
        raise ConfigError("HF021", f"RoPE scaling {kind!r} lacks {', '.join(missing)}")
    for key, value in rope.items():
        if value is not None and key not in {*needed, *others, *_ROPE_COMMON, _OLD_CONTEXT}:
            raise ConfigError("HF022", f"{key} {value!r:.40} is not known of RoPE scaling {kind!r}")
    theta = {"rope_theta": _number(rope if "rope_theta" in rope else given, "rope_theta", 10000.0)}
    if kind == "default":
        return theta
    scaling = {"rope_scaling": kind, "rope_scaling_factor": _number(rope, "factor", least=1.0)}
    if kind == "linear":
        return {**theta, **scaling}
    scaling["rope_original_context"] = _whole(rope, _OLD_CONTEXT)
    return {**theta, **scaling, **(_llama3(rope) if kind == "llama3" else _yarn(rope))}


def _rope_dict(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what the older or the newer key has; nothing is rotated in part."""
    old, new = (raw.get(key) or {} for key in ("rope_scaling", "rope_parameters"))
    if not isinstance(old, dict) or not isinstance(new, dict):
        raise ConfigError("HF021", "rope_scaling is not a JSON object")
    theta = {"rope_theta": raw.get("rope_theta")} if old and "rope_theta" not in old else {}
    if old and new and new not in (old, {**theta, **old}):
        raise ConfigError("HF021", "rope_scaling and rope_parameters differ; keep one of them")
    rope = old or new
    for part in (raw, rope):
        share = part.get("partial_rotary_factor")
        if share not in (None, 1):
            raise ConfigError(
                "HF022", f"partial_rotary_factor {share!r:.40} is not supported; only 1"
            )
    return rope


def _llama3(rope: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_low_freq_factor": _number(rope, "low_freq_factor"),
        "rope_high_freq_factor": _number(rope, "high_freq_factor"),
    }


def _yarn(rope: dict[str, Any]) -> dict[str, Any]:
    """Return YaRN's own fields; null and 0 are absent, as in transformers."""
    truncate = _flag(rope, "truncate", default=True)
    rope = {key: value for key, value in rope.items() if value}
    attention = _number(rope, "attention_factor") if "attention_factor" in rope else None
    if attention is None and "mscale" in rope and "mscale_all_dim" in rope:
        factor = _number(rope, "factor")
        over, under = (
            yarn_scale(factor, _number(rope, key)) for key in ("mscale", "mscale_all_dim")
        )
        attention = over / under
    return {
        "rope_beta_fast": _number(rope, "beta_fast", 32.0),
        "rope_beta_slow": _number(rope, "beta_slow", 1.0),
        "rope_truncate": truncate,
        "rope_attention_factor": attention,
    }


def _own(raw: dict[str, Any], family: type[ModelShape]) -> dict[str, Any]:
    """Return the family's own fields: as the default is, or a whole number where that is null."""
    defaults = {each.name: each.default for each in dataclasses.fields(family)}
    found: dict[str, Any] = {}
    for ours, key in family.hf_fields.items():
        default = defaults[ours]
        if isinstance(default, bool):
            found[ours] = _flag(raw, key)
        elif isinstance(default, float):
            found[ours] = _number(raw, key, default)
        elif default is None and raw.get(key) is None:
            found[ours] = None
        else:
            found[ours] = _whole(raw, key)
    return found


def _flag(raw: dict[str, Any], key: str, *, default: bool = False) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError("HF021", f"{key} is {value!r:.40}; expected true or false")
    return default if value is None else value


def _whole(raw: dict[str, Any], key: str, *, least: int = 1) -> int:
    value, most = raw.get(key), _MOST.get(key, 10**9)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(
            "HF021", f"{key} is {value!r:.40}; expected a whole number from {least} to {most:,}"
        )
    return value


def _number(
    raw: dict[str, Any], key: str, default: float | None = None, *, least: float = 0.0
) -> float:
    """Return a number above 0, and `least` or more; without a default it must be there."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e18:
        raise ConfigError("HF021", f"{key} is {value!r:.40}; expected a number above 0")
    if value < least:
        raise ConfigError("HF021", f"{key} is {value!r:.40}; expected {least:g} or more")
    return float(value)
