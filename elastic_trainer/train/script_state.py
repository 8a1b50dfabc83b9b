"""What a script's own loop keeps: besides tensors, objects that give and take a state dict."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from elastic_trainer.state.state import (
    MODEL,
    OPTIM,
    TRAINER,
    FillingReader,
    NamedTensors,
    TrainingState,
    clean_name,
)
from elastic_trainer.worker.progress import ApiError

Sharding = Callable[[str], tuple[DeviceMesh, Sequence[Placement]] | None]
"""`sharding(parameter's name)`: of which tensor a plain one is this rank's part; None: whole."""

OBJECTS: Final = "objects"
"""Name in section `trainer` of the objects' state, which is the same on all ranks; uint8."""
_LENGTH_BYTES: Final = 8
_GROWTH: Final = 4
"""The state of objects may grow so many times within an epoch: the size of an image is fixed."""
_GRAIN: Final = 4096
_COUNT_BYTES: Final = 16
"""Room for a number that an optimizer may keep for each parameter from its first step on."""


class ScriptState(TrainingState):
    """Model, optimizers with their `param_groups`, and what else a script wants kept.

    `tensors` and `objects` (schedulers, scalers) are the same on all ranks, the state dicts of
    `per_rank` (data loaders) are this rank's alone. `sharding` is of plain tensors that are a part.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        tensors: Mapping[str, Tensor],
        objects: Mapping[str, Stateful],
        per_rank: Mapping[str, Stateful],
        rank: int,
        world_size: int,
        sharding: Sharding | None,
    ) -> None:
        self._own = {f"own.{name}": value for name, value in tensors.items()}
        super().__init__(model, optimizers, self._own)
        self._objects, self._per_rank = objects, per_rank
        self._mine, self._world_size = _of_rank(rank), world_size
        self._sharding = sharding
        self._buffers: dict[str, Tensor] = {}
        self._found: dict[str, Tensor] = {}
        self._ranks_then = 0

    def live(self, step: int, *, speaks: bool) -> NamedTensors:
        """See TrainingState. Objects are asked again for their state."""
        live = super().live(step, speaks=speaks)
        if speaks:
            live[TRAINER][OBJECTS] = self._written(OBJECTS, self._said())
        if self._per_rank:
            states = _state_dicts(self._per_rank)
            live.setdefault(TRAINER, {})[self._mine] = self._written(self._mine, states)
        return live

    def load(self, reader: StorageReader | FillingReader) -> int:
        """See TrainingState. Objects get theirs by `hand_out`: it is not the data's fault."""
        there = reader.read_metadata().state_dict_metadata
        self._ranks_then = sum(name.startswith(f"{TRAINER}.{_of_rank('')}") for name in there)
        self._found = {
            name: torch.zeros(there[f"{TRAINER}.{name}"].size, dtype=torch.uint8)
            for name in (OBJECTS, self._mine)
            if f"{TRAINER}.{name}" in there
        }
        self._keeps = {**self._own, **self._found}
        step = super().load(reader)
        self._keeps = self._own
        return step

    def hand_out(self, step: int) -> None:
        """Give the objects what was kept of them after `step`.

        Raises:
            ApiError: HF533, something was kept without one of them, does not fit it, or is of
                another number of ranks.
        """
        if OBJECTS in self._found:
            said = _decoded(self._found[OBJECTS])
            _give("param_groups", self._set_groups, said["param_groups"])
            for optimizer, kept in zip(self._optimizers, said.get("state", ()), strict=False):
                _set_counts(optimizer, kept)
            _hand_out(self._objects, said["objects"], step)
        elif self._objects:
            _hand_out(self._objects, {}, step)
        if not self._per_rank:
            return
        if self._ranks_then != self._world_size:
            raise ApiError(
                f"HF533 {', '.join(self._per_rank)}: the state of step {step} is of each of "
                f"{self._ranks_then} ranks, and there are {self._world_size} now. Keep the number "
                "of nodes fixed (no elastic.min_nodes), or continue the data from the step"
            )
        _hand_out(self._per_rank, _decoded(self._found[self._mine]), step)

    def size(self) -> tuple[int, int]:
        """Return the bytes of the objects' state, and of this rank's: all ranks have to agree.

        Raises:
            ApiError: HF534, it cannot be read without running code.
        """
        mine = _encoded(_state_dicts(self._per_rank)) if self._per_rank else b""
        params = sum(len(g["params"]) for each in self._optimizers for g in each.param_groups)
        return len(_encoded(self._said())) + _COUNT_BYTES * params, len(mine)

    def reserve(self, objects: int, per_rank: int) -> None:
        """Make room for states that grow from the sizes given, in bytes: until the next epoch."""
        for name, size in ((OBJECTS, objects), (self._mine, per_rank)):
            room = -(-_GROWTH * (size + _LENGTH_BYTES) // _GRAIN) * _GRAIN
            self._buffers[name] = torch.zeros(room, dtype=torch.uint8)

    def _said(self) -> dict[str, Any]:
        groups = [
            [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
            for each in self._optimizers
        ]
        counts = [_counts(each) for each in self._optimizers]
        return {"param_groups": groups, "state": counts, "objects": _state_dicts(self._objects)}

    def _set_groups(self, kept: list[list[dict[str, Any]]]) -> None:
        for optimizer, groups in zip(self._optimizers, kept, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)

    def _written(self, name: str, states: Mapping[str, Any]) -> Tensor:
        buffer, data = self._buffers[name], _encoded(states)
        if len(data) + _LENGTH_BYTES > len(buffer):
            raise ApiError(
                f"HF534 the state dicts given to restore have grown to {len(data)} bytes, "
                f"{len(buffer) - _LENGTH_BYTES} fit until the next restart: give restore none "
                "that grows, such as a history"
            )
        written = len(data).to_bytes(_LENGTH_BYTES, "little") + data
        buffer[: len(written)] = torch.frombuffer(bytearray(written), dtype=torch.uint8)
        return buffer

    def _tensors(self) -> NamedTensors:
        live = super()._tensors()
        if self._sharding is not None:
            live[MODEL] = {name: self._whole(name, t) for name, t in live[MODEL].items()}
            live[OPTIM] = {
                name: t if t.dim() == 0 else self._whole(_parameter_of(name), t)
                for name, t in live[OPTIM].items()
            }
        return live

    def _sizes(self, metadata: Metadata) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        sizes = dict(super()._sizes(metadata))
        if self._sharding is None:
            return sizes
        params = {clean_name(name): param for name, param in self._model.named_parameters()}
        for full, (size, dtype) in sizes.items():
            name = _parameter_of(full.removeprefix(f"{OPTIM}."))
            if name in params and size == self._whole(name, params[name]).shape:
                sizes[full] = params[name].shape, dtype
        return sizes

    def _whole(self, parameter: str, value: Tensor) -> Tensor:
        """Return `value`, as the part of a whole tensor where it is one."""
        if self._sharding is None or isinstance(value, DTensor):
            return value
        if (placed := self._sharding(parameter)) is None:
            return value
        mesh, placements = placed
        return DTensor.from_local(value.detach(), mesh, list(placements), run_check=False)


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, list[Any]]:
    """Return what an optimizer keeps that is not a tensor, as Adafactor its steps, by parameter.

    One that keeps none for its first parameter keeps none: this is asked after each step.
    """
    first: Mapping[str, Any] = next(iter(optimizer.state.values()), {})
    keys = [key for key, value in first.items() if isinstance(value, int | float | str)]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {key: [optimizer.state.get(p, {}).get(key) for p in params] for key in keys}


def _set_counts(optimizer: torch.optim.Optimizer, kept: Mapping[str, list[Any]]) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for key, values in kept.items():
        for param, value in zip(params, values, strict=True):
            if value is not None:
                optimizer.state[param][key] = value


def _parameter_of(name: str) -> str:
    return name.removeprefix("state.").rpartition(".")[0]  # of `state.<parameter>.<key>`


def _of_rank(rank: int | str) -> str:
    return f"rank.{rank}"


def _state_dicts(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: each.state_dict() for name, each in objects.items()}


def _encoded(states: Mapping[str, Any]) -> bytes:
    """Return plain values and tensors as bytes that are read without running code.

    Raises:
        ApiError: HF534, there is something else among them.
    """
    buffer = io.BytesIO()
    torch.save(dict(states), buffer)
    buffer.seek(0)
    if unsafe := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        raise ApiError(
            f"HF534 the state dicts given to restore have {', '.join(sorted(unsafe))} in them, "
            "which cannot be loaded safely: numbers, strings, tensors, and lists and dicts of "
            "them can. Wrap the object in one whose state_dict() converts them"
        )
    return buffer.getvalue()


def _decoded(data: Tensor) -> dict[str, Any]:
    raw = data.numpy().tobytes()
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    held = io.BytesIO(raw[_LENGTH_BYTES : _LENGTH_BYTES + length])
    states: dict[str, Any] = torch.load(held, map_location="cpu", weights_only=True)
    return states


def _hand_out(objects: Mapping[str, Stateful], kept: Mapping[str, Any], step: int) -> None:
    for name, each in objects.items():
        if name not in kept:
            raise ApiError(
                f"HF533 the state of step {step} was kept without {name}: start a new run, or "
                f"leave {name} out of restore and set it from the step"
            )
        _give(name, each.load_state_dict, kept[name])


def _give(name: str, load: Callable[[Any], object], state: object) -> None:
    try:
        load(state)
    except Exception as error:  # somebody else's: whatever it raises, it says that it does not fit
        raise ApiError(
            f"HF533 {name} does not take the state that was kept of it: {error}"
        ) from error
