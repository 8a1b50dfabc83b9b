"""The state of a model with adapters: the adapters' alone, beside weights that stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.storage import StorageReader

from elastic_trainer.model.adapters import base_name
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.state import (
    MODEL,
    STEP,
    TRAINER,
    FillingReader,
    NamedTensors,
    TrainingState,
    clean_name,
    live_tensors,
    read_into,
)

BASE = "base"
"""Name in section `trainer`: digest of the manifest of the frozen weights (32 uint8)."""


class AdapterState(TrainingState):
    """What is saved and restored: adapters, their optimizer, and which weights they are beside.

    Args:
        model: with adapters.
        optimizers: of the adapters.
        base_sha256: of the frozen weights' manifest.
        keeps: as of `TrainingState`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        base_sha256: str,
        keeps: Mapping[str, Tensor],
    ) -> None:
        self._base = torch.tensor(list(bytes.fromhex(base_sha256)), dtype=torch.uint8)
        self._found = self._base.clone()  # what is loaded goes here
        super().__init__(model, optimizers, {**keeps, BASE: self._found})

    def load(self, reader: StorageReader | FillingReader) -> int:
        """As of `TrainingState`.

        Raises:
            DamagedError: the adapters were trained beside other weights.
        """
        step = super().load(reader)
        if not torch.equal(self._found, self._base):
            theirs, ours = (bytes(each.tolist()).hex()[:12] for each in (self._found, self._base))
            self._found.copy_(self._base)
            raise DamagedError(
                f"its adapters were trained beside weights of digest {theirs}, not {ours}"
            )
        return step

    def _tensors(self) -> NamedTensors:
        tensors, trained = super()._tensors(), trained_names(self._model)
        kept = {name: tensor for name, tensor in tensors[MODEL].items() if name in trained}
        return {**tensors, MODEL: kept}


class FrozenWeights(TrainingState):
    """All of a model with adapters but these; they are read, and never saved."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, ())

    def load(self, reader: StorageReader | FillingReader) -> int:
        """Read this rank's part in place from a checkpoint without adapters; return its step."""
        step, trained = torch.zeros((), dtype=torch.int64), trained_names(self._model)
        frozen = {
            base_name(name): tensor
            for name, tensor in live_tensors(self._model)[MODEL].items()
            if name not in trained
        }
        read_into({MODEL: frozen, TRAINER: {STEP: step}}, reader, reader.read_metadata())
        return int(step.item())


def trained_names(model: nn.Module) -> set[str]:
    """Return the names, as in checkpoints, of the parameters that are not frozen."""
    return {clean_name(name) for name, param in model.named_parameters() if param.requires_grad}
