"""Names, sizes, config.json and file packing of Hugging Face's LlamaForCausalLM. Pure.

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

from elastic_trainer.models import PRESETS, PUBLISHED_CONTEXT, ModelShape

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
TOKENIZER_NAME: Final = "tokenizer.json"
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
_LAYER: Final = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w1.weight": "mlp.gate_proj.weight",
    "ffn.w3.weight": "mlp.up_proj.weight",
    "ffn.w2.weight": "mlp.down_proj.weight",
}
_TOP_BACK: Final = {theirs: ours for ours, theirs in _TOP.items()}
_LAYER_BACK: Final = {theirs: ours for ours, theirs in _LAYER.items()}
_IGNORED: Final = re.compile(r"model\.(layers\.[0-9]+\.self_attn\.)?rotary_emb\.inv_freq")


def to_hf(name: str) -> str:
    """Return Hugging Face's name of our parameter `name`."""
    if name in _TOP:
        return _TOP[name]
    prefix, layer, rest = name.split(".", 2)
    assert prefix == "layers", f"{name} is not a parameter of Llama"
    return f"model.layers.{layer}.{_LAYER[rest]}"


def from_hf(name: str) -> str | None:
    """Return our name of Hugging Face's `name`; None for a name that is none of Llama's."""
    match = re.fullmatch(r"model\.layers\.(0|[1-9][0-9]*)\.(.+)", name)
    if match is None:
        return _TOP_BACK.get(name)
    ours = _LAYER_BACK.get(match[2])
    return None if ours is None else f"layers.{match[1]}.{ours}"


def is_derived(name: str) -> bool:
    """Return whether `name` is a buffer that old files carry and that the config determines."""
    return _IGNORED.fullmatch(name) is not None


def param_sizes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return our name -> size of every parameter, in the order of the layers.

    A tied model has no `head.weight` here.
    """
    h, size = shape.dim, shape.head_size
    q_dim, kv_dim = shape.num_heads * size, shape.num_kv_heads * size
    layer = {
        "attention_norm.weight": (h,),
        "attention.wq.weight": (q_dim, h),
        "attention.wk.weight": (kv_dim, h),
        "attention.wv.weight": (kv_dim, h),
        "attention.wo.weight": (h, q_dim),
        "ffn_norm.weight": (h,),
        "ffn.w1.weight": (shape.ffn_dim, h),
        "ffn.w3.weight": (shape.ffn_dim, h),
        "ffn.w2.weight": (h, shape.ffn_dim),
    }
    sizes: dict[str, tuple[int, ...]] = {EMBEDDING: (shape.vocab_size, h)}
    for i in range(shape.num_layers):
        sizes |= {f"layers.{i}.{name}": size for name, size in layer.items()}
    sizes["norm.weight"] = (h,)
    if not shape.tie_embeddings:
        sizes[HEAD] = (shape.vocab_size, h)
    return sizes


def context_of(shape: ModelShape) -> int:
    """Return the tokens of context to claim for `shape`, which does not carry them.

    A preset's published context; otherwise the old context times the RoPE scaling.
    """
    for name, tokens in PUBLISHED_CONTEXT.items():
        if PRESETS[name] == shape:
            return tokens
    return round(shape.rope_original_context * shape.rope_scaling_factor)


def hf_config(shape: ModelShape, dtype: str, context: int | None = None) -> dict[str, Any]:
    """Return the content of `config.json`.

    Written in the form of transformers 4 (`rope_theta`, `rope_scaling`,
    `torch_dtype`), which 5 reads as well. `elastic_trainer.hf_config` reads it
    back to an equal shape.

    Args:
        shape: of the model.
        dtype: of the tensors, `float32` or `bfloat16`.
        context: `max_position_embeddings`; None: `context_of(shape)`.
    """
    scaling = {
        "rope_type": "llama3",
        "factor": shape.rope_scaling_factor,
        "low_freq_factor": shape.rope_low_freq_factor,
        "high_freq_factor": shape.rope_high_freq_factor,
        "original_max_position_embeddings": shape.rope_original_context,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.dim,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim or None,
        "intermediate_size": shape.ffn_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": context or context_of(shape),
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None if shape.rope_scaling_factor == 1.0 else scaling,
        "tie_word_embeddings": shape.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        # The tokenizer knows them, the model does not; without these lines
        # transformers takes 1 and 2, which are other tokens in most vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def pack(sizes_bytes: Mapping[str, int], max_file_bytes: int) -> dict[str, int]:
    """Return the file of each name, from 1 on: in order, at most `max_file_bytes` a file.

    A tensor larger than that has a file of its own.
    """
    file_of: dict[str, int] = {}
    file, room_bytes = 0, 0
    for name, size_bytes in sizes_bytes.items():
        if not file or size_bytes > room_bytes:
            file, room_bytes = file + 1, max_file_bytes
        file_of[name] = file
        room_bytes -= size_bytes
    return file_of
