"""Names, config.json and file packing of Hugging Face's causal language models. Pure.

An exported directory is what `save_pretrained` of transformers writes:
`config.json`, and either `model.safetensors` or `model-00001-of-0000N.safetensors`
with `model.safetensors.index.json`, which says in which file each tensor is.

Tensors have the same sizes and the same order of rows on both sides: this model
rotates halves as Hugging Face's does, so wq and wk need no permutation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from elastic_trainer.plan.models import (
    FULL,
    PRESETS,
    PUBLISHED_CONTEXT,
    SLIDING,
    LayeredShape,
    LocalRopeShape,
    ModelShape,
)

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MAX_FILE_BYTES: Final = 5_000_000_000
"""Largest file, unless one tensor alone is larger (5 GB, Hugging Face's own choice for years)."""

EMBEDDING: Final = "embedding.weight"
HEAD: Final = "head.weight"
"""Tied models have it in our checkpoints, as a copy of the embedding, and not in theirs."""

_TOP: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    HEAD: "lm_head.weight",
}
_IGNORED: Final = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


def to_hf(name: str, layer: Mapping[str, str]) -> str:
    """Return Hugging Face's name of our parameter `name`.

    `layer`: module of a block -> theirs, as `Decoder.hf_names`.

    Raises:
        KeyError: the parameter's module is not in `layer`.
    """
    if name in _TOP:
        return _TOP[name]
    _, number, rest = name.split(".", 2)
    module, _, parameter = rest.rpartition(".")
    return f"model.layers.{number}.{layer[module]}.{parameter}"


def is_derived(name: str) -> bool:
    """Return whether `name` is a buffer of old files that the config determines."""
    return _IGNORED.fullmatch(name) is not None


def context_of(shape: ModelShape) -> int:
    """Return the tokens of context to claim for `shape`, which lacks them.

    A preset has a published context; other shapes get the old context times the RoPE scaling.
    """
    for name, tokens in PUBLISHED_CONTEXT.items():
        if PRESETS[name] == shape:
            return tokens
    return round(shape.rope_original_context * shape.rope_scaling_factor)


def hf_config(
    shape: ModelShape,
    dtype: str,
    context: int | None = None,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of `config.json`.

    It has the form of transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`), which 5 reads
    as well. `elastic_trainer.plan.hf_config` reads it back to an equal shape. `own` is what an
    imported model's source or a job's own decoder adds or overrides.
    """
    # Where it is absent it is dim / heads, unless the family has a default of its own.
    has_head_dim = shape.head_dim or "head_dim" in shape.hf_defaults
    activation, only = shape.hf_activation
    context = context or context_of(shape)
    return {
        "architectures": [shape.architecture],
        "model_type": shape.family,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.dim,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        **({"head_dim": shape.head_size} if has_head_dim else {}),
        shape.hf_ffn: shape.ffn_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": context,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": _rope_scaling(shape),
        "tie_word_embeddings": shape.tie_embeddings,
        activation: only,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        # Of an import `own` has them; else the tokenizer knows them, the model does not. Without
        # these lines transformers takes 1 and 2, which are other tokens in most vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
        **{theirs: getattr(shape, ours) for ours, theirs in shape.hf_fields.items()},
        **(_layers(shape, context) if isinstance(shape, LayeredShape) else {}),
        **(_ropes(shape) if isinstance(shape, LocalRopeShape) else {}),
        **(own or {}),
    }


def _layers(shape: LayeredShape, context: int) -> dict[str, Any]:
    """Return config.json's keys for the window; its class may want a number where none is used."""
    windows = [shape.layer_window(layer) for layer in range(shape.num_layers)]
    used = {"use_sliding_window": any(windows)} if "use_sliding_window" in shape.hf_layers else {}
    return {
        **used,
        "sliding_window": shape.sliding_window or context,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def _ropes(shape: LocalRopeShape) -> dict[str, Any]:
    """Return the form of transformers 5, and the key of 4 for layers with a window."""
    theta = {"rope_theta": shape.rope_theta}
    full = {"rope_type": "default", **(_rope_scaling(shape) or {}), **theta}
    local = {"rope_type": "default", "rope_theta": shape.rope_local_theta}
    older = {shape.hf_local_theta: shape.rope_local_theta} if shape.hf_local_theta else {}
    return {**older, "rope_parameters": {FULL: full, SLIDING: local}}


def _rope_scaling(shape: ModelShape) -> dict[str, Any] | None:
    """Return config.json's `rope_scaling`, null where nothing is scaled."""
    if shape.rope_scaling_factor == shape.rope_magnitude == 1.0:
        return None
    scaling = {"rope_type": shape.rope_scaling, "factor": shape.rope_scaling_factor}
    if shape.rope_scaling == "linear":
        return scaling
    scaling["original_max_position_embeddings"] = shape.rope_original_context
    if shape.rope_scaling == "yarn":
        return {
            **scaling,
            "beta_fast": shape.rope_beta_fast,
            "beta_slow": shape.rope_beta_slow,
            "truncate": shape.rope_truncate,
            "attention_factor": shape.rope_attention_factor,
        }
    return {
        **scaling,
        "low_freq_factor": shape.rope_low_freq_factor,
        "high_freq_factor": shape.rope_high_freq_factor,
    }


def pack(sizes_bytes: Mapping[str, int], max_file_bytes: int) -> dict[str, int]:
    """Return the file of each name, from 1 on: in order, at most `max_file_bytes` a file.

    A larger tensor has a file to itself.
    """
    file_of: dict[str, int] = {}
    file, room_bytes = 0, 0
    for name, size_bytes in sizes_bytes.items():
        if not file or size_bytes > room_bytes:
            file, room_bytes = file + 1, max_file_bytes
        file_of[name] = file
        room_bytes -= size_bytes
    return file_of
