"""A small world of gloo processes for the checkpoint tests, forked from a warm server."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import multiprocessing
import os
import signal
import time
import traceback
import uuid
import warnings
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, update
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
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import Event
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.state import TrainingState, live_tensors
from elastic_trainer.worker.rank_grid import RankGrid

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo"]
)
DEADLINE_S = 50.0
CPU = torch.device("cpu")


class Tiny(nn.Module):
    """Sizes that no dp divides, and a parameter with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 10)
        self.few = nn.Linear(10, 3)
        self.out = nn.Linear(3, 7, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.few(torch.tanh(self.into(x)))))


def make_config(run: Path, world: int, replicate: int = 1, **checkpoint: object) -> TrainConfig:
    layout = ParallelLayout(dp=world, dp_replicate=replicate)
    section = CheckpointSection(dir=str(run / "checkpoints"), **{"every_s": None, **checkpoint})
    return TrainConfig(
        name="t",
        run_id="run-1",
        model_name="tiny",
        model=ModelShape(num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8),
        ladder=Ladder((Rung(num_nodes=world, layout=layout, micro_batches=1),)),
        gpus_per_node=1,
        device="cpu",
        train=TrainSection(seq_len=8, global_batch=12, steps=10),
        data=DataSection(path="/nowhere"),
        checkpoint=section,
        elastic=ElasticSection(start_ceiling_s=30.0),
    )


class Trainer:
    """A model under FSDP2 or HSDP with its optimizer, a board at `epoch`, and a manager."""

    def __init__(
        self, run: Path, *, seed: int = 0, epoch: int = 1, replicate: int = 1, at=None, **checkpoint
    ) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = (
            init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
            if replicate == 1
            else init_device_mesh(
                "cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard")
            )
        )
        torch.manual_seed(seed)
        self.model = Tiny()
        fully_shard(self.model.few, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.run, self.board = run, FileBoard(run / "board")
        if rank == 0:
            update(self.board, lambda state: dataclasses.replace(state, epoch=epoch))
        self.events = EventLog(run, f"worker-{rank}-e{epoch}", rank=rank, epoch=epoch)
        config = make_config(run, world, replicate, **checkpoint)
        self.manager = CheckpointManager(
            CheckpointPolicy.of(config, epoch=epoch, layout=config.ladder.rungs[0].layout),
            self.board,
            self.events,
            CPU,
            ranks=RankGrid(timedelta(seconds=config.elastic.start_ceiling_s)),
            state=TrainingState(self.model, (self.optimizer,)),
            at=at or (lambda _: None),
        )

    def step(self) -> None:
        self.model(torch.ones(2, 6)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step: int, *, wait: bool = True) -> bool:
        return self.manager.save(step, wait=wait)

    def restore(self) -> int:
        return self.manager.restore()

    def digests(self) -> dict[str, str]:
        """Name -> sha256 of the global tensor's bytes; collective."""
        out = {}
        for section, tensors in live_tensors(self.model, self.optimizer).items():
            for name, tensor in tensors.items():
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                raw = full.detach().contiguous().numpy().tobytes()
                out[f"{section}.{name}"] = hashlib.sha256(raw).hexdigest()
        return out

    def close(self) -> None:
        self.manager.close()
        self.events.close()


def commits(run: Path) -> list[int]:
    """Steps of the commits on the board, newest last."""
    return [c.step for c in board_state(run).commits]


def board_state(run: Path) -> BoardState:
    current = FileBoard(run / "board").get_state()
    return BoardState.decode(current[0]) if current else BoardState()


def directories(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def events(run: Path, name: str) -> list[Event]:
    found = []
    for path in sorted((run / "events").iterdir()):
        lines = path.read_text().splitlines()
        found += [event for line in lines if (event := Event.decode(line)) and event.event == name]
    return found


def _enter(rank: int, world: int, scratch: Path, job, args) -> None:
    gc.freeze()  # the server's: looking through it would copy its pages
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=world
    )
    try:
        result = job(*args)
        (scratch / f"result-{rank}").write_text(json.dumps(result))
    except BaseException:  # noqa: BLE001  whatever it is, the parent prints it
        (scratch / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    # Without the interpreter's end: a save's thread may still be inside gloo.
    os._exit(0)


def run_world(world: int, scratch: Path, job, *args, doomed: tuple[int, ...] = ()) -> list:
    """Run `job(*args)` on `world` ranks and return the results by rank.

    A `doomed` rank is expected to be killed and has the result None. Doom of rank 0
    takes all others along, as an agent would see to.
    """
    scratch = scratch / f"world-{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    ranks = [
        _SERVER.Process(target=_enter, args=(rank, world, scratch, job, args))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    try:
        left = {process.sentinel: process for process in ranks}
        while left:
            ended = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            assert ended, f"ranks still running after {DEADLINE_S} s"
            for sentinel in ended:
                process = left.pop(sentinel)
                process.join()
                if ranks.index(process) in doomed:
                    assert process.exitcode == -signal.SIGKILL
                    if process is ranks[0]:
                        return [None] * world
                    continue
                errors = [path.read_text() for path in sorted(scratch.glob("error-*"))]
                assert process.exitcode == 0, "\n".join(errors) or process.exitcode
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [
        None if rank in doomed else json.loads((scratch / f"result-{rank}").read_text())
        for rank in range(world)
    ]
