"""Process groups of a mesh."""

from __future__ import annotations

import multiprocessing
from datetime import timedelta

import pytest
import torch.distributed as dist

from elastic_trainer.layout import ParallelLayout
from elastic_trainer.mesh import FSDP_AXES, build_mesh, group_timeout

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["elastic_trainer.train"])
TIMEOUT = timedelta(seconds=37)


def _rank(rank, port, layout, answers):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=layout.world_size, timeout=TIMEOUT
    )
    mesh = build_mesh(layout, "cpu")
    groups = {
        name: dist.get_process_group_ranks(mesh.get_group(name)) for name in mesh.mesh_dim_names
    }
    answers.put((rank, groups, [group_timeout(g, "cpu") for g in mesh.get_all_groups()]))


def _groups(layout, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    answers = _SERVER.Queue()
    ranks = [
        _SERVER.Process(target=_rank, args=(rank, store.port, layout, answers))
        for rank in range(layout.world_size)
    ]
    try:
        for process in ranks:
            process.start()
        return sorted(answers.get(timeout=50) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (ParallelLayout(dp=2), [{"dp_shard": [0, 1]}] * 2),
        (
            ParallelLayout(dp=4, dp_replicate=2),
            [
                {"dp_replicate": [0, 2], "dp_shard": [0, 1]},
                {"dp_replicate": [1, 3], "dp_shard": [0, 1]},
                {"dp_replicate": [0, 2], "dp_shard": [2, 3]},
                {"dp_replicate": [1, 3], "dp_shard": [2, 3]},
            ],
        ),
    ],
    ids=str,
)
def test_every_group_has_the_ranks_and_the_one_time_out(layout, expected, monkeypatch):
    answers = _groups(layout, monkeypatch)
    assert [groups for _, groups, _ in answers] == expected
    for _, groups, timeouts in answers:
        assert set(groups) <= set(FSDP_AXES)
        assert timeouts == [TIMEOUT] * len(groups)
