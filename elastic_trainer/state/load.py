"""What is kept and restored, and how any layout reads what any other wrote."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from elastic_trainer.state.state import (
    DEVICE_RNG,
    RNG,
    STEP,
    TRAINER,
    NamedTensors,
    create_optimizer_state,
    live_tensors,
)


class LocatingReader(StorageReader, abc.ABC):
    """A reader whose `read_metadata` knows the tensors, but not where their parts lie."""

    @abc.abstractmethod
    def locate(self, target: Mapping[str, Tensor]) -> Metadata:
        """Return the parts that meet this rank's of `target`; collective.

        Args:
            target: full name -> tensor to fill.

        Raises:
            StepFailedError: on every rank.
        """


class State(Protocol):
    """What both tiers keep: the trainer's, or that of somebody's own loop."""

    def live(self, step: int, *, speaks: bool) -> NamedTensors:
        """Return the tensors themselves, not copies, after `step`.

        `speaks`: this rank adds what is the same on all ranks (section `trainer`).
        """

    def load(self, reader: StorageReader) -> int:
        """Read this rank's part in place; return the step it is of.

        The reader may have collectives, so all ranks call it alike, and `read_into` once.
        """


class TrainingState:
    """Parameters, optimizers, torch's generators, and what else the trainer wants kept.

    Args:
        model: whose values are kept.
        optimizers: of its parameters; each parameter has one.
        keeps: more small tensors of the trainer's, the same on all ranks; those that the data
            has are overwritten by `load`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        keeps: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._model, self._optimizers, self._keeps = model, optimizers, keeps or {}
        self._generators = generators_of(next(model.parameters()).device)

    def live(self, step: int, *, speaks: bool) -> NamedTensors:
        """See State."""
        live = self._tensors()
        if speaks:
            random = {name: each.get_state() for name, each in self._generators.items()}
            live[TRAINER] = {STEP: torch.tensor(step), **random, **self._keeps}
        return live

    def load(self, reader: StorageReader) -> int:
        """See State. A fresh optimizer's empty state is made first."""
        metadata = reader.read_metadata()
        sizes = self._sizes(metadata)
        for optimizer in self._optimizers:
            create_optimizer_state(self._model, optimizer, sizes)
        step, there = torch.zeros((), dtype=torch.int64), metadata.state_dict_metadata
        # Data of another device, or of before its generator was kept, has the CPU's alone.
        known = {k: v for k, v in self._generators.items() if f"{TRAINER}.{k}" in there}
        random = {name: each.get_state() for name, each in known.items()}
        keeps = {k: v for k, v in self._keeps.items() if f"{TRAINER}.{k}" in there}
        live = self._tensors()
        live[TRAINER] = {STEP: step, **random, **keeps}
        read_into(live, reader, metadata)
        for name, state in random.items():
            known[name].set_state(state)
        return int(step.item())

    def _tensors(self) -> NamedTensors:
        """Return sections `model` and `optim`."""
        return live_tensors(self._model, *self._optimizers)

    def _sizes(self, metadata: Metadata) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return full name -> size and dtype of what an optimizer's state is made like."""
        return _tensor_sizes(metadata)


def generators_of(device: torch.device) -> dict[str, torch.Generator]:
    """Return by name the generators that random operations on `device` and on the CPU use."""
    found = {RNG: torch.default_generator}
    if device.type == "cuda":
        # Its state lies on the host: reading it waits for nothing.
        found[DEVICE_RNG] = torch.cuda.default_generators[device.index]
    return found


def read_into(target: NamedTensors, reader: StorageReader, metadata: Metadata) -> None:
    """Read this rank's part of what `target` names straight into its tensors.

    There are no collectives but a LocatingReader's own.

    DCP's planner cuts what this layout needs out of what any layout wrote.
    `dcp.load` would add three object collectives to agree on plans that do not
    depend on each other, and it falls back to other pickles on an error.

    Args:
        target: section -> name -> tensor to fill.
        reader: of storage, or of memory.
        metadata: what `reader.read_metadata` has returned.
    """
    flat: dict[str, Tensor] = {
        f"{section}.{name}": tensor
        for section, tensors in target.items()
        for name, tensor in tensors.items()
    }
    if isinstance(reader, LocatingReader):
        metadata = reader.locate(flat)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(flat), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _tensor_sizes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
