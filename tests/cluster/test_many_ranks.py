"""What one rank of 16,384 connects to: the trainer's own code over a stand-in for gloo.

The stand-in counts what gloo opens and stores. Real workers, eight of them with groups of at most
two, open just as many sockets.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch.distributed as dist
from fake_world import apart
from harness import Run, heartbeat_path, make_config

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.train.session import WorkerContext
from elastic_trainer.train.trainer import Trainer
from elastic_trainer.train.warm_up import forget_others
from elastic_trainer.worker import rank_grid, torch_private
from elastic_trainer.worker.heartbeat import Heartbeat

SHAPE = ModelShape(num_layers=16, dim=64, num_heads=8, num_kv_heads=8, ffn_dim=64, vocab_size=256)
BLOB_BYTES = 200
"""What a rank stores of itself in a group, 192 measured: without a word of the other ranks."""


class CountedGloo(dist.ProcessGroup):
    """Stands in for gloo's group: no connection, no collective; says what gloo would open."""

    made: ClassVar[list[CountedGloo]] = []

    def __init__(self, _store, rank, size, timeout=None):
        super().__init__(rank, size)
        self.options = SimpleNamespace()
        self.lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"
        self.made.append(self)

    def _set_sequence_number_for_group(self):
        assert os.environ["GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"] == "1"  # BLOB_BYTES

    @property
    def group_name(self) -> str:
        return self.options.group_name

    @property
    def most_peers(self) -> int:
        return ring_and_halving(self.size()) if self.lazy else self.size() - 1


def ring_and_halving(num_ranks: int) -> int:
    """Peers that a rank talks to in all-gathers (a ring), reductions and broadcasts."""
    return min(num_ranks - 1, 2 + 2 * math.ceil(math.log2(num_ranks)))


def connect(run, job_json, rank):
    """Do what worker `rank` does until it would ask its peers; return what it is connected to."""
    config = TrainConfig.from_json(job_json)
    rung = config.ladder.rungs[0]
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Heartbeat(heartbeat_path(run, rank), create=True).close()
    who = WorkerContext(
        run_dir=run,
        rank=rank,
        local_rank=0,
        worker=0,
        world_size=rung.layout.world_size,
        epoch=1,
        rung=rung,
        node="n",
        heartbeat=heartbeat_path(run, rank),
        store=("127.0.0.1", server.port),
        run_id="r",
    )
    torch_private.OneThreadGloo = CountedGloo
    CheckpointManager.restore = lambda _manager: None
    trainer = Trainer(config, who, forget_others)
    trainer._init_process_group()
    trainer._build_model()
    trainer._allocate()
    trainer._restore()
    made = CountedGloo.made
    with pytest.raises(RuntimeError, match="No backend type"):
        dist.barrier()
    return [(group.size(), group.lazy, group.most_peers) for group in made]


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        (ParallelLayout(dp=2048, tp=8), 0),
        (ParallelLayout(dp=2048, tp=8, dp_replicate=128), 4097),
        (ParallelLayout(dp=1024, tp=8, pp=2), 16_383),
        (ParallelLayout(dp=2039, tp=8), 0),
        (ParallelLayout(dp=2039, tp=8), 16_311),
    ],
    ids=str,
)
@pytest.mark.timeout(240)
def test_a_rank_of_16384_has_few_sockets_and_stores_little(tmp_path, layout, rank):
    config = make_config(tmp_path, layout, model=SHAPE, global_batch=2048)
    groups = apart(connect, tmp_path, config.to_json(), rank, deadline_s=100.0)
    sizes = [size for size, _, _ in groups]
    assert max(sizes) < layout.world_size, "a group of all ranks"
    for size, lazy, _ in groups:
        assert size <= rank_grid.MAX_GROUP or lazy, f"{size} ranks, all connected"
    grid = 3 * (rank_grid.MAX_GROUP - 1) + 1  # axes of at most 32, and a pair
    mesh = sum(peers for size, lazy, peers in groups if lazy) + layout.tp + layout.pp
    sockets = 1 + sum(1 + peers for _, _, peers in groups)  # one of the store; a listener each
    assert sockets <= 1 + len(groups) + 2 * grid + mesh
    assert sockets < 300
    stored = BLOB_BYTES * len(groups)
    fetched = BLOB_BYTES * sum(peers + 1 for _, _, peers in groups)
    assert stored + fetched < 64_000


def sockets_of(pid: int) -> int:
    """Count the sockets that a process has open."""
    found = 0
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += str(path.readlink()).startswith("socket:")
        except FileNotFoundError:  # closed meanwhile
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", [ParallelLayout(dp=8), ParallelLayout(dp=4, tp=2)], ids=str)
def test_real_workers_open_as_many_sockets(tmp_path, layout):
    curves = {}
    for longest in (rank_grid.MAX_GROUP, 2):
        run = Run(tmp_path / str(longest), make_config(tmp_path / str(longest), layout, steps=500))
        run.max_group = longest
        with run.epoch(1, 8) as group:
            group.until("two steps", lambda: min(group.beat(r).step for r in range(8)) >= 2)
            sockets = [sockets_of(worker.pid) for worker in group.workers]
        curves[longest] = run.curve()
        mesh = [size for size in (layout.dp, layout.tp) if size > 1]
        if longest == 2:
            grids = 2 * 3 * (1 + 1)  # three axes of two, each with a listener
            meshes = sum(1 + ring_and_halving(size) for size in mesh)
            assert max(sockets) <= 1 + grids + meshes, sockets
            assert min(sockets) >= 1 + grids + 2 * len(mesh), sockets
        else:
            whole = 2 * (1 + 7)
            assert sockets == [1 + whole + sum(1 + size - 1 for size in mesh)] * 8
    few, whole = curves[2], curves[rank_grid.MAX_GROUP]
    for step in (1, 2):
        assert few[step] == pytest.approx(whole[step], rel=1e-12)
