"""Reads what this layout needs out of what any layout wrote, whatever holds it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader

from elastic_trainer.checkpoint.state import (
    RNG,
    STEP,
    TRAINER,
    create_optimizer_state,
    live_tensors,
)


def load_into(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    reader: StorageReader,
    keeps: Mapping[str, Tensor],
) -> int:
    """Read this rank's part straight into the live tensors; no collectives.

    DCP's planner cuts what this layout needs out of what any layout wrote.
    `dcp.load` would add three object collectives to agree on plans that do not
    depend on each other, and it falls back to other pickles on an error.

    Args:
        model: whose values are overwritten.
        optimizer: the same; its empty state is made first.
        reader: of storage, or of memory.
        keeps: more of the trainer's own; those that the data has are overwritten.

    Returns:
        The step that the data is of.
    """
    metadata = reader.read_metadata()
    create_optimizer_state(model, optimizer, _tensor_sizes(metadata))
    rng = torch.get_rng_state()
    step = torch.zeros((), dtype=torch.int64)
    here = {k: v for k, v in keeps.items() if f"{TRAINER}.{k}" in metadata.state_dict_metadata}
    live = {**live_tensors(model, optimizer), TRAINER: {STEP: step, RNG: rng, **here}}
    target: dict[str, Tensor] = {
        f"{section}.{name}": tensor
        for section, tensors in live.items()
        for name, tensor in tensors.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(target), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
    reader.read_data(planner.finish_plan(plan), planner).wait()
    torch.set_rng_state(rng)
    return int(step.item())


def _tensor_sizes(metadata: Metadata) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {
        name: (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
