"""Models without torch: the families, the presets, and shapes as plain data. Pure.

docs/models.md is the page about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from elastic_trainer.plan.models import llama, mistral, mixtral, qwen3
from elastic_trainer.plan.models.llama import ModelShape, says
from elastic_trainer.plan.models.mistral import Mistral
from elastic_trainer.plan.models.mixtral import Mixtral
from elastic_trainer.plan.models.plugin import Plugin
from elastic_trainer.plan.models.qwen3 import Qwen3

__all__ = [
    "FAMILIES",
    "PRESETS",
    "PUBLISHED_CONTEXT",
    "ModelShape",
    "Plugin",
    "raw_of",
    "says",
    "shape_of",
]

FAMILIES: Final[Mapping[str, type[ModelShape]]] = {
    family.family: family for family in (ModelShape, Qwen3, Mistral, Mixtral)
}
"""Name, as in job files and config.json -> shape."""

PRESETS: Final[Mapping[str, ModelShape]] = {
    **llama.PRESETS,
    **qwen3.PRESETS,
    **mistral.PRESETS,
    **mixtral.PRESETS,
}
"""Models known by name."""

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
