"""What one rank of a layout holds, without the other ranks: shapes, counts, bytes.

Builds the rank's part on the meta device under torch's fake process group, by the
trainer's own code, so a layout of 16,384 GPUs can be looked at on a laptop:

    python -m elastic_trainer.train.rank_part RUN/job.json --rank 4096
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state.state import clean_name
from elastic_trainer.train.engine import Engine
from elastic_trainer.worker.torch_private import FakeStore

_FP32_BYTES, _BF16_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One rank's part of the model; sizes in elements and bytes."""

    rank: int
    coordinate: dict[str, int]
    stages: tuple[tuple[int, ...], ...]
    """Layers of each pipeline stage it holds; one stage of all layers without a pipeline."""
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]]
    """Parameter -> (shape of the whole, shape of the shard this rank stores)."""
    num_params_held: int
    """Parameters of its stages, whole: what its tp and FSDP groups share."""
    num_params_stored: int
    """Elements of its own shards."""
    parameter_bytes: int
    """fp32 shards."""
    gradient_bytes: int
    """fp32 shards."""
    optimizer_bytes: int
    """AdamW's two moments, fp32 shards."""
    gathered_bytes: int
    """Parameters gathered for computing at the same time, in the compute dtype: with a
    pipeline all it holds, else the largest block or table, and beside it tied tables."""
    accumulated_bytes: int
    """fp32 gradients, whole but for tp, that a pipeline adds up over the micro-batches of a
    step before it reduces them; 0 without one. DTensor keeps the embedding's whole over tp."""


def rank_part(config: TrainConfig, rung: Rung, rank: int) -> RankPart:
    """Build the part of `rank`; no process group may exist yet, and none is left behind."""
    world_size = rung.layout.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Set timeout is now only supported", UserWarning)
            engine = Engine(config, rung, rank, torch.device("cpu"))
        return _describe(engine, config, rank)
    finally:
        dist.destroy_process_group()


def _describe(engine: Engine, config: TrainConfig, rank: int) -> RankPart:
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    gathered: dict[str, int] = {}
    stored = accumulated = 0
    for wrapped_name, param in engine.model.named_parameters():
        name = clean_name(wrapped_name)
        local = tuple((param.to_local() if isinstance(param, DTensor) else param).shape)
        shapes[name] = (tuple(param.shape), local)
        stored += torch.Size(local).numel()
        block = ".".join(name.split(".")[:2]) if name.startswith("layers.") else name.split(".")[0]
        if config.model.tie_embeddings and not name.startswith("layers."):
            block = ""
        gathered[block] = gathered.get(block, 0) + _after_tp(param)
        accumulated += param.numel() if name == "embedding.weight" else _after_tp(param)
    if engine.stages:
        together = sum(gathered.values())
    else:
        blocks = [size for block, size in gathered.items() if block]
        together = gathered.get("", 0) + max(blocks, default=0)
    layers = [tuple(stage.span.layers) for stage in engine.stages]
    return RankPart(
        rank=rank,
        coordinate=engine.coordinate,
        stages=tuple(layers) or (tuple(range(config.model.num_layers)),),
        shapes=shapes,
        num_params_held=sum(torch.Size(whole).numel() for whole, _ in shapes.values()),
        num_params_stored=stored,
        parameter_bytes=_FP32_BYTES * stored,
        gradient_bytes=_FP32_BYTES * stored,
        optimizer_bytes=2 * _FP32_BYTES * stored,
        gathered_bytes=together
        * (_BF16_BYTES if config.train.precision == "bf16" else _FP32_BYTES),
        accumulated_bytes=_FP32_BYTES * accumulated if engine.stages else 0,
    )


def _after_tp(param: Tensor) -> int:
    """Return the elements of `param` on one rank once FSDP has gathered it: its tp shard."""
    numel = param.numel()
    if not isinstance(param, DTensor):
        return numel
    names = param.device_mesh.mesh_dim_names or ()
    if "tp" in names and param.placements[names.index("tp")].is_shard():
        numel //= param.device_mesh["tp"].size()
    return numel


def _as_text(layout: ParallelLayout, part: RankPart) -> str:
    """Return what a person wants to know of `part`; shapes are left to JSON."""
    at = ", ".join(f"{axis} {part.coordinate[axis]}" for axis in reversed(layout.order))
    spans = ", ".join(
        f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}" for layers in part.stages
    )
    ends = [name for name in ("embedding", "head") if f"{name}.weight" in part.shapes]
    items = {
        "parameters, fp32 shards": part.parameter_bytes,
        "gradients, fp32 shards": part.gradient_bytes,
        "AdamW's moments, fp32 shards": part.optimizer_bytes,
        "parameters gathered for computing": part.gathered_bytes,
        "gradients added up by the pipeline": part.accumulated_bytes,
    }
    lines = [
        f"rank {part.rank} of {layout.label}: {at}",
        f"layers {spans}" + (f", {' and '.join(ends)}" if ends else ""),
        f"{part.num_params_held:,} parameters in its stages, {part.num_params_stored:,} stored",
        *(f"{size / 2**30:10.3f} GiB  {what}" for what, size in items.items()),
        f"{sum(items.values()) / 2**30:10.3f} GiB  together, without activations and buffers",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Print the part of a rank."""
    parser = argparse.ArgumentParser(prog="elastic_trainer.train.rank_part", description=__doc__)
    parser.add_argument("job_json", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--nodes", type=int, help="nodes that are left; default: all")
    parser.add_argument("--json", action="store_true", help="with the shapes of all parameters")
    options = parser.parse_args()
    config = TrainConfig.from_json(options.job_json.read_text(encoding="utf-8"))
    ladder = config.ladder
    rung = ladder.rung_for(options.nodes or ladder.max_nodes)
    if rung is None:
        parser.error(f"--nodes {options.nodes}: the last rung needs {ladder.min_nodes}")
    if not 0 <= options.rank < rung.layout.world_size:
        parser.error(f"--rank: {rung.layout.label} has ranks 0 to {rung.layout.world_size - 1}")
    part = rank_part(config, rung, options.rank)
    if options.json:
        found = {"layout": str(rung.layout), **dataclasses.asdict(part)}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    else:
        sys.stdout.write(_as_text(rung.layout, part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
