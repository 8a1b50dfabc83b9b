"""Adapters of low rank beside the frozen matrices of transformers' own classes, as peft makes them.

peft is imported where adapters are made, not with this module: other jobs need none.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import torch
from torch import Tensor, nn

from elastic_trainer.model.decoder import ModelError, initial_rows
from elastic_trainer.plan.models import Lora

_ADAPTER: Final = ".default."
"""In parameters' names: peft's for a model's only adapter."""
_FROZEN: Final = ".base_layer."
_AROUND: Final = "base_model.model."
"""Before names in peft's files: of what it wraps a model in."""


def adapter_config(lora: Lora) -> Any:
    """Return peft's config.

    Raises:
        ModelError: HF336, peft cannot be imported.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ModelError(
            "HF336",
            f"train.lora needs peft, which cannot be imported on this node ({error}): "
            "pip install 'holdfast-ml[lora]'",
        ) from error
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=list(lora.targets),
        bias="none",
    )


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Put adapters without values, on the meta device, into `model`, and freeze all else of it.

    Raises:
        ModelError: HF336, peft cannot be imported; HF335, adapters are not as planned.
    """
    config = adapter_config(lora)
    from peft import inject_adapter_in_model

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that GPT-2's matrices are transposed
            inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except Exception as error:
        raise ModelError(
            "HF335",
            f"peft cannot put adapters into {type(model).__name__} ({type(error).__name__}: "
            f"{error}): fix train.lora, or use another version of peft",
        ) from error
    count = sum(param.numel() for param in model.parameters() if param.requires_grad)
    if count != lora.params:
        raise ModelError(
            "HF335",
            f"the adapters have {count:,} parameters, planned were {lora.params:,}: use the "
            "versions of transformers and peft here that the job was submitted with",
        )


def initial_values(name: str, size: torch.Size, rows: range, seed: int) -> Tensor:
    """Return rows of the initial value of an adapter's parameter: B is zero, A by `initial_rows`.

    A's deviation is that of peft's own, which are uniform: torch's for linear modules (Kaiming with
    a = sqrt(5)), 1 / sqrt(3 inputs).
    """
    deviation = 1 / math.sqrt(3 * size[1]) if ".lora_A." in name else 0.0
    return initial_rows(name, size, rows, seed, mean=0.0, deviation=deviation)


def base_name(name: str) -> str:
    """Return a frozen parameter's name in the class without adapters."""
    return name.replace(_FROZEN, ".")


def file_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    return _AROUND + name.replace(_ADAPTER, ".")
