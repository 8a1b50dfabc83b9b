"""A user's model: its dimensions are in the job file, its class is for the nodes to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from elastic_trainer.plan.models.llama import ModelShape, says

Option = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class Plugin(ModelShape):
    """Dimensions of a decoder that a job brings along."""

    family: ClassVar[str] = "plugin"

    plugin: str = field(
        metadata=says("Your own decoder instead of a family: module:Class, as my_model:MyModel.")
    )
    params: int | None = field(
        default=None,
        metadata=says("Of a plugin: its number of parameters; null: Llama's of these dimensions."),
    )
    options: Mapping[str, Option] = field(
        default_factory=dict, metadata=says("Of a plugin: values for its class.")
    )

    @property
    def decoder(self) -> str:
        """The job's own class."""
        return self.plugin

    def num_params(self) -> int:
        """Return what the job file says, else the number of a Llama's parameters."""
        return self.params or super().num_params()
