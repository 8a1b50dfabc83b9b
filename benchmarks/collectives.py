"""Collectives, bytes and host syncs of one step of the trainer, counted on no GPU at all.

    python benchmarks/collectives.py [--layouts dp8-pp1-cp1-tp1] [--out FILE]

Prints a table, and last a JSON line. One rank of each layout runs `Trainer`'s own step under a
fake process group: each collective that torch dispatches counts, with the bytes of its largest
tensor. Bytes of a memory count as the device's where they depend on a parameter or a token; a host
that asks for one of them (`item`, `tolist`, `cpu`) waits for the device.

Where torchtitan 0.3 is installed (`pip install -e '.[torchtitan]'`), a row of its own model and
parallelisms follows, with the same dimensions (titan_step.py). Its host syncs are left out: its
Trainer makes them, which does not run here.
"""

from __future__ import annotations

import json
import multiprocessing
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch
import torch.distributed as dist
from common import OUT, machine, table, write_out
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan.anomalies import FINE
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.feed import MicroBatch
from elastic_trainer.train.marks import Collectives
from elastic_trainer.train.optimizer import build_optimizer
from elastic_trainer.train.session import Agreed
from elastic_trainer.train.trainer import Trainer
from elastic_trainer.worker.heartbeat import Request

_FORK = multiprocessing.get_context("fork")
SHAPE = ModelShape(num_layers=4, dim=64, num_heads=8, num_kv_heads=4, ffn_dim=160, vocab_size=512)
SEQ_LEN, MICRO_BATCHES = 64, 4
LAYOUTS = (
    "dp8-pp1-cp1-tp1",
    "dp8-pp1-cp1-tp1-hsdp2",
    "dp1-pp1-cp1-tp4",
    "dp4-pp2-cp1-tp1",
    "dp4-pp1-cp2-tp1",
    "dp4-pp1-cp1-tp2",
    "dp4-pp1-cp2-tp2-hsdp2",
    "dp2-pp2-cp1-tp2",
)
KINDS = {
    "all-gather": ("allgather", "all_gather"),
    "reduce-scatter": ("reduce_scatter",),
    "all-reduce": ("allreduce", "all_reduce"),
    "send": ("send",),
    "receive": ("recv",),
}
_C10D = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_LOCAL = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
"""Send nothing."""
_PAIRS = {
    "flex_cp_allgather": "all-gather",
    "flex_cp_allgather_backward": "reduce-scatter",
}
"""torch's operators of two collectives each, which are not dispatched one by one."""


@dataclass
class Counted:
    """What one step of one rank has."""

    collectives: Counter[str] = field(default_factory=Counter)
    """Kind -> number."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Kind -> bytes of the largest tensor of each, added up."""
    syncs: int = 0
    """Times that the host waits for the device."""

    def row(self, layout: str) -> list[object]:
        """Return what the table says of it."""
        counts = [self.collectives[kind] for kind in KINDS]
        total = sum(self.bytes.values()) / 2**10
        return [ParallelLayout.parse(layout).label, *counts, f"{total:,.0f}", self.syncs]


class Count(TorchDispatchMode):
    """Counts while it is entered; `on_device` are there before."""

    def __init__(self, on_device: list[Tensor]) -> None:
        super().__init__()
        self.found = Counted()
        self._device = {_memory(tensor): _storage(tensor) for tensor in on_device}
        """Address -> memory, which stays: another at its address would be taken for it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func`, and count it; of what wraps tensors their own parts are counted."""
        if any(issubclass(each, (DTensor, AsyncCollectiveTensor)) for each in types):
            return NotImplemented
        tensors = _tensors((args, kwargs))
        on_device = any(_memory(tensor) in self._device for tensor in tensors)
        name = func._schema.name.partition("::")[2]  # noqa: SLF001
        if func.namespace == "aten" and name in ("_local_scalar_dense", "nonzero"):
            self.found.syncs += on_device
        result = func(*args, **(kwargs or {}))
        made = _tensors(result)
        if name in _PAIRS:  # of keys and values
            for each in max(tensors, made, key=lambda pair: pair[0].nbytes):
                self._add(_PAIRS[name], each.nbytes)
        elif func.namespace in _C10D and name not in _LOCAL:
            kind = next(
                (k for k, names in KINDS.items() if name.lstrip("_").startswith(names)), name
            )
            self._add(kind, max(each.nbytes for each in (*tensors, *made)))
        written = tensors if name.endswith("_") or "out" in (kwargs or {}) else []
        if on_device:
            self._device |= {_memory(each): _storage(each) for each in (*made, *written)}
        return result

    def _add(self, kind: str, nbytes: int) -> None:
        self.found.collectives[kind] += 1
        self.found.bytes[kind] += nbytes

    def read(self, tensor: Tensor) -> Tensor:
        """Return a copy of `tensor` in the host's memory."""
        self.found.syncs += _memory(tensor) in self._device
        with torch.utils._python_dispatch._disable_current_modes():  # noqa: SLF001
            return tensor.detach().clone()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()  # noqa: SLF001


def _memory(tensor: Tensor) -> int:
    found: int = _storage(tensor)._cdata  # noqa: SLF001
    return found


@contextmanager
def _reads_counted(count: Count) -> Iterator[None]:
    """Within it, what reads a whole tensor is counted: on a processor torch dispatches none."""
    cpu, tolist = Tensor.cpu, Tensor.tolist

    def listed(tensor: Tensor) -> Any:
        return tolist(count.read(tensor))

    def read(tensor: Tensor) -> Tensor:
        return count.read(tensor)

    Tensor.cpu = read  # type: ignore[method-assign, assignment]
    Tensor.tolist = listed  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.cpu, Tensor.tolist = cpu, tolist  # type: ignore[method-assign]


def counted(run: Callable[[], object], on_device: list[Tensor]) -> Counted:
    """Return what `run` does."""
    count = Count(on_device)
    with _reads_counted(count), count:
        run()
    return count.found


def config_of(layout: ParallelLayout, *, no_sync: bool) -> TrainConfig:
    """Return the job.json of a job that has `layout`."""
    rung = Rung(num_nodes=1, layout=layout, micro_batches=MICRO_BATCHES, no_sync=no_sync)
    return TrainConfig(
        name="collectives",
        run_id="collectives",
        model_name="small",
        model=SHAPE,
        ladder=Ladder((rung,)),
        gpus_per_node=8,
        device="cpu",
        train=TrainSection(
            seq_len=SEQ_LEN,
            global_batch=MICRO_BATCHES * layout.dp,
            micro_batch=1,
            steps=9,
            recompute="none",
        ),
        data=DataSection(path="/data"),
        checkpoint=CheckpointSection(dir="/data"),
        elastic=ElasticSection(),
    )


def step_of(layout_text: str, *, no_sync: bool = False) -> Counted:
    """Return what the second step of rank 0 has; the first one sets up."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    layout = ParallelLayout.parse(layout_text)
    config = config_of(layout, no_sync=no_sync)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    schedules._PipelineSchedule._warmup_p2p = _agree_on_shapes  # type: ignore[method-assign]  # noqa: SLF001
    trainer = _trainer(config)
    size = 1, SEQ_LEN // layout.cp
    batches = [MicroBatch(*torch.ones(2, *size, dtype=torch.int64)) for _ in range(MICRO_BATCHES)]
    trainer.feed = SimpleNamespace(tokens=lambda _: 1, micro_batches=lambda _: iter(batches))  # type: ignore[assignment]
    trainer._train_step(1)  # noqa: SLF001
    state = [
        value
        for of in trainer.optimizer.state.values()
        for key, value in of.items()
        if key != "step"  # of AdamW on a processor; the fused one leaves it on the device
    ]
    tokens = [tensor for batch in batches for tensor in (batch.inputs, batch.targets)]
    there = [*trainer.model.parameters(), *state, *tokens]
    return counted(lambda: trainer._train_step(2), there)  # noqa: SLF001


def _trainer(config: TrainConfig) -> Trainer:
    """Return a trainer that agrees with itself."""
    rung = config.ladder.rungs[0]
    trainer = Trainer.__new__(Trainer)
    trainer.config, trainer.rung, trainer.device = config, rung, torch.device("cpu")
    trainer.engine = Engine(config, rung, 0, trainer.device)
    trainer.engine.allocate()
    trainer.model = trainer.engine.model
    initialise(trainer.model, 0)
    trainer.optimizer = build_optimizer(trainer.model, config.train.optimizer)
    trainer.heartbeat = SimpleNamespace(mark=lambda _: None, asked=lambda: Request.NONE)  # type: ignore[assignment]
    trainer.mark, trainer.device_times = trainer.heartbeat.mark, None
    trainer.collectives, trainer._first = Collectives(trainer.engine.meshes, trainer.heartbeat), 1  # noqa: SLF001
    trainer.guard = SimpleNamespace(decide=lambda *_: FINE)  # type: ignore[assignment]
    trainer.session = SimpleNamespace(  # type: ignore[assignment]
        votes=lambda *_: [0.0] * 6,
        agreed=lambda _: Agreed(Request.NONE, None),
        checkpoints=SimpleNamespace(before_update=lambda: None),
        ranks=SimpleNamespace(all_reduce=lambda *_args, **_more: None),
    )
    return trainer


def titan_step_of(layout_text: str) -> Counted:
    """Return what a step of torchtitan's model has in the same layout; the first one sets up."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    from titan_step import titan_step

    layout = ParallelLayout.parse(layout_text)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world_size)
    step, there = titan_step(layout, SHAPE, SEQ_LEN, MICRO_BATCHES)
    step()
    return counted(step, there)


def _agree_on_shapes(_schedule: object, stages: list[Any], *_args: object) -> None:
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC  # noqa: SLF001


def apart(function: Callable[[str], Counted], layout: str) -> Counted:
    """Return what `function` does in a process of its own: DTensor's caches keep groups."""
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=lambda: theirs.send(function(layout)))
    child.start()
    theirs.close()
    try:
        found: Counted = ours.recv()
    finally:
        child.join()
        ours.close()
    return found


def told(found: dict[str, Counted]) -> dict[str, Any]:
    """Return the JSON of one system: what it has in each layout."""
    return {
        layout: {**{kind: each.collectives[kind] for kind in KINDS}, "bytes": each.bytes.total()}
        for layout, each in found.items()
    }


@click.command(help=__doc__.split("\n")[0])
@click.option("--layouts", default=",".join(LAYOUTS), help="Some of them.", show_default=True)
@OUT
def main(layouts: str, out: Path | None) -> None:
    """Count every layout and print."""
    names = layouts.split(",")
    ours = {name: apart(step_of, name) for name in names}
    theirs = {}
    if find_spec("torchtitan") is not None:
        theirs = {name: apart(titan_step_of, name) for name in names}
    rows = []
    for name in names:
        rows.append(ours[name].row(name))
        if name in theirs:
            label, *counts, _ = theirs[name].row(name)
            rows.append([f"{label}, torchtitan", *counts, ""])
    most = max(each.syncs for each in ours.values())
    answer = {"benchmark": "collectives", "machine": machine()}
    answer |= {"holdfast": {"syncs": most, "layouts": told(ours)}}
    answer |= {"torchtitan": {"layouts": told(theirs)}} if theirs else {}
    peer = f"torchtitan {version('torchtitan')}" if theirs else "torchtitan is not installed"
    head = (
        f"A step of rank 0 under a fake process group: {SHAPE.num_layers} layers, "
        f"{MICRO_BATCHES} micro-batches, bf16, no recompute; KiB of the largest tensor of each "
        f"collective. {peer}."
    )
    lines = [head, "", table(["layout", *KINDS, "KiB", "host syncs"], rows), json.dumps(answer)]
    write_out("\n".join(lines), out)


if __name__ == "__main__":
    main()
