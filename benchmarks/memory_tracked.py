"""The memory formulas beside what torch's MemTracker counts of our trainer, on no GPU at all.

    python benchmarks/memory_tracked.py [--whole] [--out FILE]

Prints the tables of docs/memory.md; takes some minutes, `--whole` half an hour. Fake tensors under
a fake process group: any rank of any layout, on any processor. What a GPU does otherwise than a
processor is put in its place: flash attention and the fused RMSNorm, whose shapes torch knows
without a GPU. The bytes of the second step count, since the first has no optimizer state. Not
counted are CUDA's context, the buffers of NCCL and cuBLAS, fragmentation, and memory that streams
give back late.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from common import OUT, say, table, write_out
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

import elastic_trainer.model.decoder
import elastic_trainer.parallel.apply
import elastic_trainer.parallel.context
from elastic_trainer.parallel.apply import use_float8
from elastic_trainer.plan.config import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    TrainConfig,
    TrainSection,
)
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import PRESETS
from elastic_trainer.train import engine
from elastic_trainer.train.feed import MicroBatch
from elastic_trainer.train.optimizer import build_optimizer, clip_gradients, gradient_square_sum
from launcher.spec.gpu_memory import GIB, Workload, rank_bytes

_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One rank of one layout."""

    model: str
    layers: int
    """Of the model's; peaks grow by the layer."""
    layout: str
    """As `dp8-pp2-cp1-tp8`."""
    pp_rank: int = 0
    seq_len: int = 8192
    micro_batch: int = 1
    micro_batches: int = 1
    """Per dp rank and step."""
    recompute: str = "full"
    precision: str = "bf16"
    float8: bool = False
    interleave: int = 1
    no_sync: bool = False

    def config(self) -> TrainConfig:
        """Return the job.json of a job that has this layout on all nodes."""
        layout = ParallelLayout.parse(self.layout)
        rung = Rung(
            num_nodes=1,
            layout=layout,
            micro_batches=self.micro_batches,
            no_sync=self.no_sync,
        )
        return TrainConfig(
            name="memory",
            run_id="memory",
            model_name=self.model,
            model=replace(PRESETS[self.model], num_layers=self.layers),
            ladder=Ladder((rung,)),
            gpus_per_node=8,
            device="cpu",
            interleave=self.interleave,
            train=TrainSection(
                seq_len=self.seq_len,
                global_batch=self.micro_batches * self.micro_batch * layout.dp,
                micro_batch=self.micro_batch,
                steps=1,
                recompute=self.recompute,
                precision=self.precision,
                float8=self.float8,
            ),
            data=DataSection(path="/data"),
            checkpoint=CheckpointSection(dir="/data"),
            elastic=ElasticSection(),
        )

    def predicted_bytes(self) -> int:
        """Return what the launcher predicts of what torch allocates."""
        work = Workload(
            shape=replace(PRESETS[self.model], num_layers=self.layers),
            seq_len=self.seq_len,
            micro_batch=self.micro_batch,
            precision=self.precision,
            float8=self.float8,
            recompute=self.recompute,
            interleave=self.interleave,
            no_sync=self.no_sync,
        )
        layout = ParallelLayout.parse(self.layout)
        return rank_bytes(work, layout, self.micro_batches, self.pp_rank).counted

    def row(self) -> list[str]:
        """Return what the table says of it."""
        where = f"{self.pp_rank + 1} of {ParallelLayout.parse(self.layout).pp}"
        more = [f"interleave {self.interleave}"] if self.interleave > 1 else []
        more += ["no_sync"] if self.no_sync else []
        more += [self.precision] if self.precision != "bf16" else []
        more += ["float8"] if self.float8 else []
        return [
            f"{self.model}, {self.layers} layers",
            ", ".join([ParallelLayout.parse(self.layout).label, *more]),
            where,
            f"{self.seq_len:,}",
            str(self.micro_batches),
            self.recompute,
            f"{self.predicted_bytes() / GIB:.2f}",
        ]


HEAD = ["model", "layout", "stage", "tokens", "micro-batches", "recompute", "predicted GiB"]
LEVELS = ("none", "selective", "full")
SHARDED = Case(model="llama3-8b", layers=4, layout="dp64-pp1-cp1-tp1")
SPLIT = replace(SHARDED, model="llama3-70b", layout="dp8-pp1-cp1-tp8", recompute="selective")
TWO_STAGES = Case(model="llama3-70b", layers=8, layout="dp8-pp2-cp1-tp8", micro_batches=4)
FOUR_STAGES = Case(
    model="llama3-405b", layers=8, layout="dp2-pp4-cp4-tp8", seq_len=32768, micro_batches=4
)
CASES = (
    *(replace(SHARDED, recompute=level) for level in LEVELS),
    replace(SHARDED, micro_batches=3),
    replace(SHARDED, micro_batches=3, no_sync=True),
    replace(SHARDED, micro_batches=3, no_sync=True, recompute="none"),
    replace(SHARDED, micro_batch=2, recompute="selective", layers=8),
    replace(SHARDED, precision="fp32", recompute="none"),
    replace(SHARDED, layout="dp16-pp1-cp4-tp1", recompute="none"),
    replace(SHARDED, layout="dp64-pp1-cp1-tp1-hsdp8", layers=8),
    replace(SHARDED, seq_len=1024),
    replace(SHARDED, model="qwen3-8b", recompute="none"),
    replace(SHARDED, model="mistral-7b", recompute="selective"),
    *(replace(SHARDED, model="olmo2-7b", recompute=level) for level in ("none", "selective")),
    *(replace(SHARDED, model="gemma3-1b", recompute=level) for level in LEVELS),
    SPLIT,
    replace(SPLIT, model="olmo2-7b"),
    replace(SPLIT, micro_batches=3, no_sync=True),
    *(
        Case(model="mixtral-8x7b", layers=4, layout=layout, recompute=level)
        for layout, level in (
            ("dp64-pp1-cp1-tp1", "none"),
            ("dp64-pp1-cp1-tp1", "selective"),
            ("dp8-pp1-cp1-tp8", "full"),
        )
    ),
    *(replace(TWO_STAGES, recompute=level, pp_rank=rank) for level in LEVELS for rank in (0, 1)),
    *(replace(TWO_STAGES, recompute="none", interleave=2, pp_rank=rank) for rank in (0, 1)),
    *(
        replace(FOUR_STAGES, recompute=level, pp_rank=rank)
        for level in LEVELS
        for rank in (0, 1, 3)
    ),
    *(replace(FOUR_STAGES, recompute=level, pp_rank=1, float8=True) for level in LEVELS),
)
"""Of the models' layers a few: the bytes of a stage grow by the layer."""
WHOLE = tuple(
    replace(case, recompute=level, pp_rank=rank)
    for case, ranks in (
        (replace(SHARDED, layers=32), (0,)),
        (replace(TWO_STAGES, layers=80, layout="dp8-pp4-cp1-tp8"), (0, 1, 3)),
        (
            Case(
                model="llama3-405b",
                layers=126,
                layout="dp8-pp16-cp16-tp8",
                seq_len=131072,
                micro_batches=16,
            ),
            (0, 7, 15),
        ),
    )
    for level in LEVELS
    for rank in ranks
)
"""All layers; the first, a middle and the last stage."""


def tracked_bytes(case: Case) -> dict[str, int]:
    """Return what MemTracker counts at the peak of the second step: kind -> bytes, and `Total`.

    In a process of its own, since DTensor's caches keep the groups of an earlier world.
    """
    ours, theirs = _FORK.Pipe(duplex=False)
    child = _FORK.Process(target=lambda: theirs.send(_count(case)))
    child.start()
    theirs.close()
    try:
        counted: dict[str, int] = ours.recv()
    finally:
        child.join()
        ours.close()
    return counted


def _count(case: Case) -> dict[str, int]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    config = case.config()
    rung = config.ladder.rungs[0]
    layout = rung.layout
    rank = layout.rank({"dp": 0, "tp": 0, "cp": 0, "pp": case.pp_rank})
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    _as_on_a_gpu()
    _without_real_tensors()
    meshes = engine.build_meshes(layout, torch.device("cpu"), timedelta(seconds=9))
    engine.build_meshes = lambda *_args: meshes
    tracker = MemTracker()
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = engine.Engine(config, rung, rank, torch.device("cpu"))
        part.allocate()
        optimizer = build_optimizer(part.model, config.train.optimizer)
        tracker.track_external(part.model, optimizer)
        size = case.micro_batch, case.seq_len // layout.cp
        with tracker:
            for _step in range(2):
                tracker._peak_mem, tracker._peak_mem_snap = {}, {}
                tokens = [torch.zeros(size, dtype=torch.int64) for _ in range(case.micro_batches)]
                part.forward_backward([MicroBatch(each, each) for each in tokens], 1)
                gradient_square_sum(part.model)
                clip_gradients(part.model, 2.0, 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    (peak,) = (
        kinds
        for device, kinds in tracker.get_tracker_snapshot("peak").items()
        if device.type == "cpu"
    )
    return {str(getattr(kind, "value", kind)): count for kind, count in peak.items()}


class _FusedNorm(torch.autograd.Function):
    """Keeps what the fused kernel keeps, which torch takes apart on a processor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x[..., :1].float())
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _scale = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


def _as_on_a_gpu() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, **_rest: object) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out: Tensor = flash(q, k, v, is_causal=True)[0]
        return out

    def norm(x: Tensor, _shape: object, weight: Tensor, _eps: object) -> Tensor:
        out: Tensor = _FusedNorm.apply(x, weight)
        return out

    def in_float8(block: nn.Module, **_emulated: bool) -> None:
        use_float8(block, emulated=False)

    elastic_trainer.parallel.apply.use_float8 = in_float8
    elastic_trainer.model.decoder.attend = attend
    elastic_trainer.parallel.context.attend = attend
    torch.nn.functional.rms_norm = norm


def _without_real_tensors() -> None:
    """Let what torch computes beside the step, on small real tensors or whole ones, not count."""
    make_mesh = DeviceMesh.__init__

    def real(self: DeviceMesh, *args: object, **kwargs: object) -> None:
        with unset_fake_temporarily():
            make_mesh(self, *args, **kwargs)

    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(self: ShardingPropagator, op_schema: object) -> object:
        with _disable_current_modes():
            return propagate(self, op_schema)

    def agree(_schedule: object, stages: list, *_args: object) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    before_forward = MemTracker._pre_fw_hook

    def again(self: MemTracker, module: nn.Module, inputs: object) -> object:
        with contextlib.suppress(KeyError):  # it refuses modules that run twice
            self.memory_tracking.pop(module)
        return before_forward(self, module, inputs)

    DeviceMesh.__init__ = real
    ShardingPropagator._propagate_tensor_meta_non_cached = uncounted
    schedules._PipelineSchedule._warmup_p2p = agree
    MemTracker._pre_fw_hook = again


@click.command(help=__doc__.split("\n")[0])
@click.option("--whole", is_flag=True, help="Models with all of their layers.")
@OUT
def main(out: Path | None, *, whole: bool) -> None:
    """Track every case and print."""
    rows, errors = [], []
    for case in WHOLE if whole else CASES:
        counted = tracked_bytes(case)["Total"]
        error = case.predicted_bytes() / counted - 1
        errors.append(abs(error))
        rows.append([*case.row(), f"{counted / GIB:.2f}", f"{error:+.1%}"])
        say(" ".join(rows[-1]))
    told = {"cases": len(errors), "worst": max(errors), "mean": sum(errors) / len(errors)}
    write_out(f"{table([*HEAD, 'counted GiB', 'error'], rows)}\n\n{json.dumps(told)}", out)


if __name__ == "__main__":
    main()
