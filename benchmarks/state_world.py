"""Worlds of processes that hold a training state: what snapshot.py measures on.

Ranks are forked from this process, one for each worker; keepers too, one for each node, as
agents run them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common  # noqa: F401  puts this checkout first
import torch
import torch.distributed as dist

from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import update
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.save import CheckpointPolicy
from elastic_trainer.state.snapshot_tier import KeeperPlace, SnapshotTier
from elastic_trainer.state.snapshots.peer import KEEPER_LABEL, KeeperAddress
from elastic_trainer.state.state import TrainingState, create_optimizer_state
from elastic_trainer.train.engine import Engine
from elastic_trainer.train.optimizer import build_optimizer
from elastic_trainer.worker.rank_grid import RankGrid
from elastic_trainer.worker.secret import KEY_BYTES, Badge, Secret, authenticate
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.local import die_with_parent
from launcher.render.local import render_local

FORK = mp.get_context("fork")
CPU = torch.device("cpu")
WORLD_S = 300.0


def prove(*, server: bool) -> Callable[..., None]:
    """Return the handshake of the benchmark's workers and keepers."""
    badge = Badge(Secret(b"b" * KEY_BYTES), KEEPER_LABEL, "bench")
    return partial(authenticate, badge=badge, server=server, timeout_s=10.0)


def _keep(directory: Path, pipe: Connection, tie: Callable[[], None]) -> None:
    tie()
    keeper = Keeper(directory, "127.0.0.1", authenticate=prove(server=True), key=bytes(KEY_BYTES))
    keeper.start()
    pipe.send(keeper.port)
    with contextlib.suppress(EOFError):
        pipe.recv()
    keeper.close()


@contextlib.contextmanager
def keepers(root: Path, num_nodes: int) -> Iterator[tuple[list[KeeperAddress], list[int]]]:
    """Run a keeper for each node, with `root`/NODE as its memory; yield peers and process ids."""
    peers, processes, pipes = [], [], []
    for node in range(num_nodes):
        directory = root / f"node{node}"
        directory.mkdir()
        pipe, theirs = FORK.Pipe()
        process = FORK.Process(
            target=_keep, args=(directory, theirs, die_with_parent()), daemon=True
        )
        process.start()
        theirs.close()
        peers.append(KeeperAddress(node=f"node{node}", address="127.0.0.1", port=pipe.recv()))
        processes.append(process)
        pipes.append(pipe)
    try:
        yield peers, [process.pid or 0 for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def _rank(
    body: Callable[..., Any],
    place: tuple[int, int, Path],
    pipe: Connection,
    tie: Callable[[], None],
) -> None:
    rank, size, store = place
    tie()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=WORLD_S),
    )
    try:
        pipe.send((True, body()))
    except BaseException:  # noqa: BLE001  told to the parent, which raises
        pipe.send((False, traceback.format_exc()))
    pipe.recv()  # stay, with all connections, until everybody is done
    os._exit(0)


def world(size: int, store: Path, body: Callable[..., Any]) -> list[Any]:
    """Run `body()` in `size` ranks of one process group; return their values, by rank.

    Raises:
        RuntimeError: one failed; with its traceback.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    pairs = [FORK.Pipe() for _ in range(size)]
    ranks = [
        FORK.Process(
            target=_rank, args=(body, (rank, size, store), theirs, die_with_parent()), daemon=True
        )
        for rank, (_, theirs) in enumerate(pairs)
    ]
    values = []
    try:
        for process in ranks:
            process.start()
        for rank, (pipe, _) in enumerate(pairs):
            if not pipe.poll(WORLD_S):
                raise RuntimeError(f"rank {rank} says nothing for {WORLD_S:.0f} s")
            good, value = pipe.recv()
            if not good:
                raise RuntimeError(value)
            values.append(value)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return values


def render(job: Path, run_dir: Path) -> TrainConfig:
    """Return the job.json of a job file, with all of its ladder."""
    spec = load_spec(job)
    bundle = render_local(spec, plan(spec), run_id="bench", run_dir=run_dir, base_dir=job.parent)
    return TrainConfig.from_json(bundle["job.json"])


class State:
    """This rank's model and optimizer with state, on the rung of its world's size.

    Args:
        config: job.json, one worker a node.
        run_dir: of the run.
        epoch: of this world.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, epoch: int) -> None:
        self.config, self.run_dir, self.epoch = config, run_dir, epoch
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        rung = config.ladder.rung_for(self.size)
        self.layout = rung.layout
        engine = Engine(config, rung, self.rank, CPU)
        engine.allocate()
        self.model = engine.model
        self.optimizer = build_optimizer(self.model, config.train.optimizer)
        sizes = {}
        for name, param in self.model.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                sizes[f"optim.state.{name}.{key}"] = (param.shape, param.dtype)
            sizes[f"optim.state.{name}.step"] = (torch.Size([]), torch.float32)
        create_optimizer_state(self.model, self.optimizer, sizes)

    def fill(self, value: float | None) -> None:
        """Set every tensor to `value`; None: to random numbers."""
        with torch.no_grad():
            for tensor in self.tensors():
                if value is None:
                    tensor.normal_()
                else:
                    tensor.fill_(value)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield this rank's part of every parameter and of its moments."""
        for param in self.model.parameters():
            yield _local(param)
            yield from (_local(value) for value in self.optimizer.state[param].values())

    def num_bytes(self) -> int:
        """Return the size of this rank's part."""
        return sum(tensor.nbytes for tensor in self.tensors())

    def memory(self, root: Path, nodes: list[KeeperAddress]) -> SnapshotTier:
        """Return the memory tier of this rank, whose node is `nodes[rank]`."""
        place = KeeperPlace(
            directory=root / nodes[self.rank].node,
            node=nodes[self.rank].node,
            local_rank=0,
            workers=1,
            members=tuple(nodes),
            spares=(),
            authenticate=prove(server=False),
            image_key=bytes(KEY_BYTES),
        )
        return SnapshotTier(
            place, self.layout, rank=self.rank, epoch=self.epoch, every_steps=1, emit=unexpected
        )

    def manager(self, memory: SnapshotTier | None = None) -> CheckpointManager:
        """Return a manager; collective."""
        board = FileBoard(self.run_dir / "board")
        if self.rank == 0:
            update(board, lambda old: dataclasses.replace(old, epoch=max(old.epoch, self.epoch)))
        dist.barrier()
        events = EventLog(self.run_dir, f"worker-{self.rank}-{os.getpid()}", epoch=self.epoch)
        return CheckpointManager(
            CheckpointPolicy.of(self.config, epoch=self.epoch, layout=self.layout),
            board,
            events,
            CPU,
            ranks=RankGrid(timedelta(seconds=WORLD_S)),
            state=TrainingState(self.model, (self.optimizer,)),
            memory=memory,
        )


def unexpected(event: str, step: int | None, **fields: Any) -> None:
    """Raise: no event of a memory tier is good news here."""
    raise AssertionError(f"{event} at step {step}: {fields}")


def timed(body: Callable[[], Any]) -> float:
    """Return the seconds until all ranks have done `body`; collective."""
    dist.barrier()
    begun = time.perf_counter()
    body()
    dist.barrier()
    return time.perf_counter() - begun


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()
