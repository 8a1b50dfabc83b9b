"""The saved state: named tensors of a model and its optimizer, and their staged copies.

Names are those of torch's `get_state_dict(flatten_optimizer_state_dict=True)` under `model.` and
`optim.`, so torch's own tools read the checkpoints. Only tensors are saved: hyper-parameters are
functions of the config and the step.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from elastic_trainer.state.offload import WORTH_BYTES, fault_in, foreach_copy, start_idle
from elastic_trainer.worker.torch_private import dtensor_like, local_of

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_theirs.")
"""Prefixes that torch.compile, activation checkpointing and TransformersModel put into names."""

MODEL, OPTIM, TRAINER = "model", "optim", "trainer"
STEP, RNG, DEVICE_RNG = "step", "rng", "rng_device"
"""Names in section `trainer`: completed steps (int64 scalar), torch's generators of the CPU and, on
an accelerator, of its device (uint8)."""
NamedTensors = dict[str, dict[str, Tensor]]
"""Section (`model`, `optim`, `trainer`) -> name -> tensor; DCP joins the two with a dot."""


def clean_name(name: str) -> str:
    """Return a parameter's name without wrappers' prefixes: the one in checkpoints."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _named_params(model: nn.Module) -> dict[int, str]:
    return {id(param): clean_name(name) for name, param in model.named_parameters()}


def live_tensors(model: nn.Module, *optimizers: torch.optim.Optimizer) -> NamedTensors:
    """Return the tensors of `model` and `optimizers` themselves, not copies."""
    names = _named_params(model)
    return {
        MODEL: {
            clean_name(name): value
            for name, value in model.state_dict().items()
            if isinstance(value, Tensor)
        },
        OPTIM: {
            f"state.{names[id(param)]}.{key}": value
            for optimizer in optimizers
            for param, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        },
    }


def create_optimizer_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sizes: Mapping[str, tuple[torch.Size, torch.dtype]],
) -> None:
    """Give a fresh optimizer the empty state tensors that a checkpoint has values for.

    torch does it by a step with zero gradients, which costs more than the whole restore of a small
    model. `sizes`: full name (`optim.state.<param>.<key>`) -> global size and dtype.
    """
    names = _named_params(model)
    keys: dict[str, list[str]] = {}
    prefix = f"{OPTIM}.state."
    for full_name in sizes:
        if full_name.startswith(prefix):
            param_name, _, key = full_name.removeprefix(prefix).rpartition(".")
            keys.setdefault(param_name, []).append(key)
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            if optimizer.state.get(param):
                continue
            for key in keys.get(names[id(param)], ()):
                size, dtype = sizes[f"{prefix}{names[id(param)]}.{key}"]
                if size == param.shape:
                    value = _zeros_like(param, dtype)
                else:
                    device = param.device if on_device else torch.device("cpu")
                    value = torch.zeros(size, dtype=dtype, device=device)
                optimizer.state[param][key] = value


def _zeros_like(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros placed like `param`, past DTensor's dispatch and its first-call cost."""
    if not isinstance(param, DTensor):
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    local = torch.zeros_like(param.to_local().detach(), dtype=dtype)
    return dtensor_like(local, param)


class Stager:
    """Copies tensors into CPU buffers, which it reuses for the next copy.

    The copies never share memory with live tensors: on a CPU, torch's state dicts do. The caller
    must be done with a copy before it asks for the next.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._warming: threading.Thread | None = None
        self._stop = threading.Event()

    def warm(self, live: NamedTensors) -> None:
        """Make buffers for copies of `live` in a thread, which `stage` ends."""
        local = {name: local_data(tensor) for name, tensor in flat_names(live).items()}
        if self._warming is None and sum(t.nbytes for t in local.values()) >= WORTH_BYTES:
            self._warming = start_idle(lambda: self._make(local), "checkpoint-buffers")

    def wait(self, timeout_s: float) -> None:
        """Wait until the thread of `warm` has ended."""
        if self._warming is not None:
            self._warming.join(timeout_s)

    def stage(self, live: NamedTensors) -> NamedTensors:
        """Return the staged copy, DTensors with the same placements."""
        self.close()
        staged: NamedTensors = {}
        sources, targets = [], []
        for section, tensors in live.items():
            staged[section] = {}
            for name, tensor in tensors.items():
                sources.append(local_data(tensor))
                targets.append(self._buffer(f"{section}.{name}", sources[-1]))
                staged[section][name] = (
                    dtensor_like(targets[-1], tensor)
                    if isinstance(tensor, DTensor)
                    else targets[-1]
                )
        foreach_copy(targets, sources)
        if any(source.is_cuda for source in sources):
            torch.cuda.current_stream().synchronize()
        return staged

    def close(self) -> None:
        """End the thread of `warm`: within milliseconds."""
        if self._warming is not None:
            self._stop.set()
            self._warming.join()

    def _make(self, like: Mapping[str, Tensor]) -> None:
        for key, local in like.items():
            if self._stop.is_set():
                return
            on_gpu = torch.cuda.device(local.device) if local.is_cuda else nullcontext()
            with on_gpu:
                buffer = self._buffer(key, local)
            if not local.is_cuda:  # pinned memory has its pages
                fault_in(buffer, self._stop)

    def _buffer(self, key: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            buffer = torch.empty(
                like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda
            )
            self._buffers[key] = buffer
        return buffer


def local_data(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without its gradient."""
    return local_of(tensor).detach()


def flat_names(tensors: NamedTensors) -> dict[str, Tensor]:
    """Return the tensors by their full names, as DCP knows them."""
    return {
        f"{section}.{name}": tensor
        for section, named in tensors.items()
        for name, tensor in named.items()
    }


class FillingReader(abc.ABC):
    """A reader that finds the parts of tensors, and reads them, without a plan of DCP's."""

    @abc.abstractmethod
    def read_metadata(self) -> Metadata:
        """Return DCP's index, at least of which tensors there are."""

    @abc.abstractmethod
    def fill(self, target: Mapping[str, Tensor]) -> None:
        """Read this rank's part of `target`, by full name, in place; collective.

        Raises:
            DamagedError: something is not there.
            StepFailedError: on every rank.
        """


class TrainingState:
    """What both tiers keep: parameters, optimizers, torch's generators, small tensors besides.

    Each parameter has one optimizer. `keeps` are the same on all ranks; `load` overwrites those
    that the data has.
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
        """Return the tensors after `step`, not copies.

        `speaks`: this rank adds what is the same on all ranks (section `trainer`).
        """
        live = self._tensors()
        if speaks:
            random = {name: each.get_state() for name, each in self._generators.items()}
            live[TRAINER] = {STEP: torch.tensor(step), **random, **self._keeps}
        return live

    def load(self, reader: StorageReader | FillingReader) -> int:
        """Read this rank's part in place; return its step. Makes a fresh optimizer's state first.

        The reader may have collectives, so all ranks call it alike, and `read_into` once.
        """
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
        return live_tensors(self._model, *self._optimizers)

    def _sizes(self, metadata: Metadata) -> Mapping[str, tuple[torch.Size, torch.dtype]]:
        """Return the sizes and dtypes, by full name, that an optimizer's state is made with."""
        return {
            name: (entry.size, entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def generators_of(device: torch.device) -> dict[str, torch.Generator]:
    """Return by name the generators of random operations on `device` and on the CPU."""
    found = {RNG: torch.default_generator}
    if device.type == "cuda":
        # Its state is on the host: reading it waits for nothing.
        found[DEVICE_RNG] = torch.cuda.default_generators[device.index]
    return found


def read_into(
    target: NamedTensors, reader: StorageReader | FillingReader, metadata: Metadata
) -> None:
    """Read this rank's part of `target` in place; collective only if `reader` fills.

    DCP's planner cuts what this layout needs out of what any layout wrote. `dcp.load` would add
    three object collectives to agree on plans that do not depend on each other, and falls back to
    other pickles on an error.
    """
    flat = flat_names(target)
    if isinstance(reader, FillingReader):
        reader.fill(flat)
        return
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(flat), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    local = reader.prepare_global_plan(planner.create_global_plan([local]))[0]
    reader.read_data(planner.finish_plan(local), planner).wait()
