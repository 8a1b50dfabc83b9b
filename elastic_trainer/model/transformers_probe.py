"""What transformers' own class does, seen by running a small one of its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import torch

from elastic_trainer.model.decoder import ModelError
from elastic_trainer.plan.models import Transformers

SIZES: Final[Mapping[str, int]] = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 128,
    "sliding_window": 8, "n_inner": 96, "ffn_hidden_size": 96, "ffn_dim": 96, "d_ff": 96,
    "d_kv": 16, "embedding_size": 64, "rotary_dim": 8, "lru_width": 64, "state_size": 8,
    "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}  # fmt: skip
"""Of a small model, by the usual names, which most classes have for theirs (attribute_map)."""
_LENGTHS: Final = (11, 13)
"""Of the probe's documents: beyond the window of SIZES."""
_SAME: Final = 1e-4


def small_config(kind: str, raw: Mapping[str, Any], **sizes: int) -> Any:
    """Return transformers' config of `kind`, a model_type, with SIZES and `sizes` for its own.

    Args:
        kind: model_type.
        raw: what else config.json says.
        sizes: more of them, which win.

    Raises:
        Exception: whatever transformers raises of sizes that do not fit the others.
    """
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    default = made()
    small = {k: v for k, v in {**SIZES, **sizes}.items() if getattr(default, k, None) is not None}
    if "qk_rope_head_dim" in small:
        small["head_dim"] = small["qk_rope_head_dim"]
    tokens = {k: 1 for k in vars(default) if k.endswith("_token_id") and getattr(default, k)}
    return made(**{**tokens, **raw, **small})


def check_documents(shape: Transformers) -> None:
    """See that the class keeps packed documents apart when their positions begin again.

    A small model of the kind, with as many layers, is given two documents in one sequence, and
    each alone.

    Raises:
        ModelError: HF335, it does not, or cannot be tried.
    """
    from transformers import AutoModelForCausalLM

    raw = json.loads(shape.config)
    kind = raw.pop("model_type")
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(small_config(kind, raw)).eval()
            tokens = torch.randint(2, SIZES["vocab_size"], (1, sum(_LENGTHS)))
        positions = torch.cat([torch.arange(length) for length in _LENGTHS]).unsqueeze(0)
        with torch.no_grad():
            packed = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            alone = [
                model(input_ids=part, use_cache=False).logits
                for part in tokens.split(_LENGTHS, dim=1)
            ]
        apart = (packed - torch.cat(alone, dim=1)).abs().max().item() < _SAME
    except Exception as error:
        raise ModelError(
            "HF335",
            f"whether {kind} keeps packed documents apart cannot be tried on a small one "
            f"({type(error).__name__}: {error}): use a data.format that does not pack",
        ) from error
    if not apart:
        raise ModelError(
            "HF335",
            f"{kind} lets a document see those before it in its sequence: use a data.format that "
            "does not pack",
        )
