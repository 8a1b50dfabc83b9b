"""What transformers says of a config.json, for a launcher that never imports torch.

`python -m elastic_trainer.model.transformers_facts CONFIG_JSON` (or - for standard input) prints
one JSON object. The class is built on the meta device: no weights, no network, no remote code.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


def facts_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return what transformers' causal class of this config has.

    Raises:
        Exception: whatever transformers raises of a config that it cannot build.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**raw)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return {
        "class": type(model).__name__,
        "params": sum(each.numel() for each in model.parameters()),
        "active": _active(model),
        **_dimensions(model.config, model),
        "tp_plan": dict(model.tp_plan) or None,
        "pp": bool(model.pp_plan),
        "no_split": sorted(model._no_split_modules or ()),  # noqa: SLF001
        "error": None,
    }


def _active(model: nn.Module) -> int:
    """Return the parameters that a token meets; all, for now."""
    return sum(each.numel() for each in model.parameters())


def _dimensions(config: Any, model: Any) -> dict[str, Any]:
    heads = getattr(config, "num_attention_heads", None) or 1
    return {
        "num_layers": config.num_hidden_layers,
        "dim": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "ffn_dim": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "tie_embeddings": model.get_input_embeddings().weight
        is getattr(model.get_output_embeddings(), "weight", None),
    }


def main() -> None:
    """Print the facts of the file named on the command line."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    text = sys.stdin.read() if sys.argv[1] == "-" else Path(sys.argv[1]).read_text("utf-8")
    try:
        facts = facts_of(json.loads(text))
    except Exception as error:  # noqa: BLE001 -- whatever it is, the launcher shows it
        facts = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(facts))  # noqa: T201


if __name__ == "__main__":
    main()
