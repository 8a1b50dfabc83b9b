"""What a standby does ahead of its epoch: the first step's fixed costs, and nothing that stays.

On a CPU: a whole step of this rank's part under a fake process group, so that Dynamo and Inductor
have compiled it, and code that runs once has run; of a pipeline its stages are built. On a GPU the
running epoch has the memory: the context, and cuBLAS.
"""

from __future__ import annotations

import ctypes
import gc
import json
import random
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Rung
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.optimizer import build_optimizer, clip_gradients, gradient_square_sum
from elastic_trainer.train.trainer import device_of, load_config
from elastic_trainer.worker.rank_grid import RankGrid
from elastic_trainer.worker.torch_private import FakeStore, forget_compiled

_compiled_for: list[tuple[ParallelLayout, list[str]]] = []
"""What this process has warmed up for: at most one, none in a worker that was not a standby."""
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


def warm_up(env: Mapping[str, str]) -> None:
    """Do once what is the same in every epoch of a rung; leave no group, number or tensor behind.

    `env` is that of a worker, as far as it is known: HOLDFAST_RUNG is of the epoch to come.
    """
    config = load_config(Path(env["HOLDFAST_RECORD_DIR"]))
    device = device_of(config, int(env["LOCAL_RANK"]))
    rung = Rung.from_dict(json.loads(env["HOLDFAST_RUNG"]))
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS", "1")))
    state = random.getstate()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the epoch's own step says them
        if device.type == "cuda":
            torch.cuda.set_device(device)
            _ = torch.ones(64, 64, device=device).mm(torch.ones(64, 64, device=device)).sum().item()
        else:
            _step(config, rung, int(env["RANK"]) % rung.layout.world_size, device)
    random.setstate(state)
    gc.collect()
    if _malloc_trim is not None:
        _malloc_trim(0)


def forget_others(engine: Engine) -> None:
    """Drop what was compiled for another layout, or for groups of other names.

    Other shapes would be compiled as dynamic ones. Ranks without a standby compile them as they
    are, and sums of the two differ. Compiled code calls groups by their names, which may be others'
    here. `engine` has not run.
    """
    if _compiled_for and _compiled_for.pop() != _compiled_as(engine):
        forget_compiled()


def _compiled_as(engine: Engine) -> tuple[ParallelLayout, list[str]]:
    names = [group.group_name for group in engine.meshes.groups]
    return replace(engine.layout, dp=1, dp_replicate=1, ep=1), names


def _step(config: TrainConfig, rung: Rung, rank: int, device: torch.device) -> None:
    """Run one step of `rank` whose collectives do nothing."""
    layout = rung.layout
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        RankGrid(timedelta(), backend="fake")  # the trainer's: names of groups count on from it
        engine = Engine(config, rung, rank, device)
        engine.allocate()
        optimizer = build_optimizer(engine.model, config.train.optimizer)
        if layout.pp > 1:
            return  # the first step of a pipeline takes shapes from what its peers send
        engine.empty_step(1)
        clip_gradients(engine.model, gradient_square_sum(engine.model).item(), 1.0)
        optimizer.step()
        if config.train.compile:
            _compiled_for.append(_compiled_as(engine))
    finally:
        dist.destroy_process_group()
