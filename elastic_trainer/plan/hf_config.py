"""A Hugging Face `config.json` -> ModelShape, of the families that models.FAMILIES has. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from elastic_trainer.plan.models import FAMILIES, ModelShape
from elastic_trainer.storage.typed import parse_json

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
    """Return the rotary fields of ModelShape."""
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
