"""A node's part in `holdfast calibrate`: what its processors, memory and links do.

Run with `python -m`; arguments: the folder that all nodes share, and this node's number, from 0.
The launcher (launcher/fleet/calibration.py) has written there what is asked; the first rank of each
round writes what it found. A child is forked for every rank of a round, so that no process group
outlives its round, and a GPU belongs to a child only.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from elastic_trainer.model.decoder import attend
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    OptimizerConfig,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.measured import (
    Asked,
    Attended,
    Copy,
    EngineStep,
    Found,
    Product,
    Transfer,
    layer_shape,
    rounds,
)
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.storage.files import read_json, write_json
from elastic_trainer.storage.typed import build
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.feed import MicroBatch
from elastic_trainer.train.optimizer import build_optimizer, clip_gradients, gradient_square_sum
from elastic_trainer.worker.collective_check import join_group

ROUND_S: Final = 90.0
"""Longest time of a round, from its first process to the answer."""
_POLL_S: Final = 0.05
_BATCHES: Final = 7
"""Times that a repeated measurement is taken; the median counts."""
_LONG_BATCHES: Final = 3
"""Of what takes longer than its budget each time."""
_BUDGET_S: Final = {False: 0.25, True: 0.01}
"""Of all batches of one figure: by `Asked.quick`."""
_PRECISIONS: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
_KIB: Final = 1 << 10
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """What is measured, by device; the last of each is the largest."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    """Of products: square, and three times as wide, as a feed-forward."""
    attended: tuple[int, ...]
    """Tokens of a sequence."""
    head_size: int
    """Of its eight heads."""
    copied: tuple[int, ...]
    sent: tuple[int, ...]
    """Bytes of collectives."""
    layers: tuple[tuple[int, int, int], ...]
    """Dim, tokens of a sequence and sequences: one for what launching costs, one of long products.
    """


SIZES: Final = {
    "cpu": ProbeSizes(
        rows=(64, 512, 2048),
        widths=(64, 256, 1024),
        attended=(128, 512),
        head_size=32,
        copied=(_MIB, 64 * _MIB),
        sent=(4 * _KIB, 64 * _KIB, _MIB, 16 * _MIB),
        layers=((32, 16, 1), (256, 256, 2)),
    ),
    "cuda": ProbeSizes(
        rows=(1024, 4096, 16384),
        widths=(1024, 4096, 8192),
        attended=(4096, 16384),
        head_size=128,
        copied=(16 * _MIB, 1024 * _MIB),
        sent=(64 * _KIB, _MIB, 16 * _MIB, 256 * _MIB, 1024 * _MIB),
        layers=((256, 64, 1), (4096, 4096, 1)),
    ),
}
QUICK: Final = ProbeSizes(
    rows=(16,),
    widths=(32,),
    attended=(32,),
    head_size=16,
    copied=(64 * _KIB,),
    sent=(_KIB, 64 * _KIB),
    layers=((32, 16, 1),),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One rank of a round: its device, and how long figures are measured."""

    device: torch.device
    asked: Asked
    group: tuple[int, ...] = (0,)
    """Of all ranks those of the process group, in its order."""

    @property
    def sizes(self) -> ProbeSizes:
        """What is measured."""
        return QUICK if self.asked.quick else SIZES[self.device.type]

    def seconds(self, run: Callable[[], object]) -> float:
        """Return how long `run` takes, the device's work included: the median of several means.

        All ranks of the group call it at once, and get what the slowest took.
        """
        return self.seconds_of([run])[0]

    def seconds_of(self, runs: Sequence[Callable[[], object]]) -> list[float]:
        """Return how long each of `runs` takes, as `seconds` does.

        Their batches alternate, so that a node that is busy for a while is so in all of them: what
        counts may be a difference.
        """
        budget_s = _BUDGET_S[self.asked.quick]
        counts, shortest = [], math.inf
        for run in runs:
            self._batch(run, 1)
            once = self._slowest(self._batch(run, 1))
            counts.append(max(1, round(budget_s / _BATCHES / max(once, 1e-7))))
            shortest = min(shortest, once)
        batches = _BATCHES if shortest < budget_s else _LONG_BATCHES
        took = [
            [self._batch(run, count) for run, count in zip(runs, counts, strict=True)]
            for _ in range(batches)
        ]
        return [self._slowest(statistics.median(each)) for each in zip(*took, strict=True)]

    def _batch(self, run: Callable[[], object], count: int) -> float:
        if len(self.group) > 1:
            dist.barrier()
        self.wait()
        begun = time.perf_counter()
        for _ in range(count):
            run()
        self.wait()
        return (time.perf_counter() - begun) / count

    def wait(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slowest(self, seconds: float) -> float:
        if len(self.group) == 1:
            return seconds
        longest = torch.tensor([seconds], device=self.device, dtype=torch.float64)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest.item())


# -- one rank --------------------------------------------------------------------------------------


def alone(probe: Probe) -> Found:
    """Measure what a rank does by itself; of a process group of one."""
    on_cuda = probe.device.type == "cuda"
    name = torch.cuda.get_device_name(probe.device) if on_cuda else _processor()
    small = torch.zeros(8, device=probe.device)
    return Found(
        device=name,
        torch=torch.__version__,
        launch_s=probe.seconds(lambda: small.add_(1.0)),
        products=tuple(_products(probe)),
        attention=tuple(_attention(probe)),
        copies=tuple(_copies(probe)),
        steps=tuple(_steps(probe, [ParallelLayout()])),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _products(probe: Probe) -> Iterator[Product]:
    for precision, dtype in _PRECISIONS.items():
        for rows in probe.sizes.rows:
            for width in probe.sizes.widths:
                for outer in (width, 3 * width):
                    a, b = (
                        torch.randn(size, device=probe.device, dtype=dtype)
                        for size in ((rows, width), (width, outer))
                    )
                    seconds = probe.seconds(partial(torch.mm, a, b))
                    yield Product(
                        precision=precision, rows=rows, inner=width, outer=outer, seconds=seconds
                    )


def _attention(probe: Probe) -> Iterator[Attended]:
    heads, size = 8, probe.sizes.head_size
    for precision, dtype in _PRECISIONS.items():
        for tokens in probe.sizes.attended:
            q, k, v, gradient = (
                torch.randn(
                    (1, heads, tokens, size), device=probe.device, dtype=dtype
                ).requires_grad_(number < 3)
                for number in range(4)
            )

            def both(q: Tensor = q, k: Tensor = k, v: Tensor = v, to: Tensor = gradient) -> None:
                torch.autograd.grad(attend(q, k, v), (q, k, v), to)

            yield Attended(
                precision=precision, tokens=tokens, width=heads * size, seconds=probe.seconds(both)
            )


def _copies(probe: Probe) -> Iterator[Copy]:
    for size in probe.sizes.copied:
        here = torch.zeros(size, dtype=torch.uint8, device=probe.device)
        targets = {"device": torch.zeros_like(here)}
        if probe.device.type == "cuda":
            targets["host"] = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
        for to, target in targets.items():
            seconds = probe.seconds(partial(target.copy_, here, non_blocking=True))
            yield Copy(to=to, bytes=size, seconds=seconds)


# -- the trainer's own step ------------------------------------------------------------------------


def _steps(probe: Probe, layouts: Sequence[ParallelLayout]) -> Iterator[EngineStep]:
    """Yield steps that tell what a layer, a micro-batch's ends and an update cost, by layout."""
    small, *large = probe.sizes.layers
    for layout in layouts:
        # A layer's cost is the difference of the two small ones: they are measured together.
        yield from _measured(probe, layout, [(small, 2, 4), (small, 6, 4)])
        for size in large:
            yield from _measured(probe, layout, [(size, 2, 2 * layout.pp)])


def _measured(
    probe: Probe, layout: ParallelLayout, cases: Sequence[tuple[tuple[int, int, int], int, int]]
) -> Iterator[EngineStep]:
    """Yield the steps of all cases: a size, the layers and the micro-batches of each."""
    asked, runs = [], list[Callable[[], None]]()
    for (dim, seq_len, micro_batch), num_layers, micro_batches in cases:
        step = EngineStep(
            layout=str(layout),
            precision="bf16" if probe.device.type == "cuda" else "fp32",
            dim=dim,
            num_layers=num_layers,
            seq_len=seq_len,
            micro_batch=micro_batch,
            micro_batches=micro_batches,
            compute_s=0.0,
            update_s=0.0,
        )
        _, compute, update = engine_step(step, probe.device, compiled=probe.asked.compiled)
        compute()
        update()  # the optimizer makes its state
        asked.append(step)
        # Gradients are not freed between two steps: they are added to, which costs as much.
        runs += [update, compute]
    took = iter(probe.seconds_of(runs))
    for step, update_s, compute_s in zip(asked, took, took, strict=True):
        yield replace(step, compute_s=compute_s, update_s=update_s)


def engine_step(
    asked: EngineStep, device: torch.device, *, compiled: bool
) -> tuple[Engine, Callable[[], None], Callable[[], None]]:
    """Return the trainer's engine, forward and backward of one step of it, and the update after.

    In the process group that is there, whose ranks are those of the layout.
    """
    layout, shape = ParallelLayout.parse(asked.layout), layer_shape(asked.dim, asked.num_layers)
    train = TrainSection(
        seq_len=asked.seq_len,
        global_batch=asked.micro_batch * asked.micro_batches * layout.dp,
        micro_batch=asked.micro_batch,
        steps=1000,
        precision=asked.precision,
        recompute="none",
        compile=compiled,
        optimizer=OptimizerConfig(),
    )
    rung = Rung(num_nodes=1, layout=layout, micro_batches=asked.micro_batches)
    engine, update = build_engine(shape, train, rung, device)
    tokens = torch.randint(0, shape.vocab_size, (asked.micro_batch, asked.seq_len + 1))
    batch = MicroBatch(tokens[:, :-1].to(device), tokens[:, 1:].to(device))

    def compute() -> None:
        engine.forward_backward([batch] * asked.micro_batches, train.global_batch * asked.seq_len)

    return engine, compute, update


def build_engine(
    shape: ModelShape, train: TrainSection, rung: Rung, device: torch.device
) -> tuple[Engine, Callable[[], None]]:
    """Return an engine with initial values, and what the trainer does after forward and backward.

    That is the gradient's norm over all ranks, clipping, and the optimizer; gradients are kept.
    """
    config = TrainConfig(
        name="measured",
        run_id="measured",
        model_name="measured",
        model=shape,
        ladder=Ladder((rung,)),
        gpus_per_node=rung.layout.world_size,
        device=device.type,
        train=train,
        data=DataSection(path="/nowhere"),
        checkpoint=CheckpointSection(dir="/nowhere"),
        elastic=ElasticSection(),
    )
    engine = Engine(config, rung, dist.get_rank(), device)
    engine.allocate()
    initialise(engine.model, 0)
    optimizer = build_optimizer(engine.model, train.optimizer)

    def update() -> None:
        squares = gradient_square_sum(engine.model).cpu()
        if rung.layout.world_size > 1:
            dist.all_reduce(squares)
        clip_gradients(engine.model, squares.sqrt().item(), train.optimizer.clip_norm)
        optimizer.step()

    return engine, update


# -- ranks together --------------------------------------------------------------------------------


def together(probe: Probe) -> Found:
    """Measure collectives of all ranks of the group, and a message from the first to the last."""
    ranks, per_node = len(probe.group), probe.asked.workers
    nodes = len({rank // per_node for rank in probe.group})
    found = []
    for size in probe.sizes.sent:
        each = max(1, size // 4 // ranks)
        part = torch.ones(each, device=probe.device)
        whole = torch.ones(each * ranks, device=probe.device)
        runs: dict[str, Callable[[], object]] = {
            "all_gather": partial(dist.all_gather_into_tensor, whole, part),
            "reduce_scatter": partial(dist.reduce_scatter_tensor, part, whole),
            "all_reduce": partial(dist.all_reduce, whole, op=dist.ReduceOp.MAX),
            "send": partial(_there_and_back, whole, ranks),
        }
        for kind, run in runs.items():
            seconds = probe.seconds(run) / (2 if kind == "send" else 1)
            bytes_ = 4 * each * ranks
            found.append(
                Transfer(kind=kind, nodes=nodes, ranks=ranks, bytes=bytes_, seconds=seconds)
            )
    return Found(transfers=tuple(found))


def _there_and_back(message: Tensor, ranks: int) -> None:
    here, last = dist.get_rank(), ranks - 1
    if here == 0:
        dist.send(message, last)
        dist.recv(message, last)
    elif here == last:
        dist.recv(message, 0)
        dist.send(message, 0)


def pair(probe: Probe) -> Found:
    """Measure the trainer's step in the layouts of two ranks."""
    layouts = [ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(pp=2)]
    return Found(steps=tuple(_steps(probe, layouts)))


# -- rounds ----------------------------------------------------------------------------------------

_MEASURES: Final[dict[str, Callable[[Probe], Found]]] = {
    "alone": alone,
    "inside": together,
    "across": together,
    "pair": pair,
}


def serve(folder: str, number: str) -> None:
    """Take part in all rounds as node `number`, and end."""
    place, node = Path(folder), int(number)
    asked = build(Asked, read_json(place / "asked.json"))
    for name, groups in rounds(len(asked.nodes), asked.workers).items():
        mine = [
            multiprocessing.get_context("fork").Process(
                target=_take_part, args=(place, asked, name, group, rank), daemon=True
            )
            for group in groups
            for rank in group
            if rank // asked.workers == node
        ]
        for child in mine:
            child.start()
        end = time.monotonic() + ROUND_S
        for child in mine:
            child.join(max(0.0, end - time.monotonic()))
        if any(child.exitcode != 0 for child in mine):
            for child in mine:
                child.kill()
            _tell(place, node, f"{name}: no end within {ROUND_S:g} s, or a process died")
            return


def _take_part(place: Path, asked: Asked, name: str, group: tuple[int, ...], rank: int) -> None:
    try:
        _measure(place, asked, name, group, rank)
    except Exception as error:  # noqa: BLE001  the launcher is told
        traceback.print_exc()
        _tell(place, rank // asked.workers, f"{name}: {type(error).__name__}: {error}"[:1000])
        sys.stderr.flush()
        os._exit(1)


def _tell(place: Path, node: int, problem: str) -> None:
    """Say why there is no answer; what was said first counts."""
    path = place / f"problem-{node}.json"
    if not path.exists():
        write_json(path, {"problem": problem})


def _measure(place: Path, asked: Asked, name: str, group: tuple[int, ...], rank: int) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))  # as workers have
    local, on_cuda = rank % asked.workers, asked.device == "cuda"
    device = torch.device("cuda", local) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    host = asked.address or socket.gethostbyname(socket.gethostname())
    with join_group(
        place / f"store-{name}-{group[0]}.json",
        host=host,
        rank=group.index(rank),
        size=len(group),
        backend="cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        limit=timedelta(seconds=ROUND_S),
    ):
        found = _MEASURES[name](Probe(device=device, asked=asked, group=group))
        if rank == 0:
            write_json(place / f"found-{name}.json", asdict(found))


if __name__ == "__main__":
    serve(*sys.argv[1:3])
