"""Process groups of a mesh."""

from __future__ import annotations

import dataclasses
import multiprocessing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from elastic_trainer.parallel import mesh
from elastic_trainer.parallel.mesh import build_meshes
from elastic_trainer.plan.layout import ParallelLayout

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["elastic_trainer.train.main"])
TIMEOUT = timedelta(seconds=37)


def _rank(rank, port, layout, answers):
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world_size)
    connected = []
    mesh.connect = lambda group, _device: connected.append(group.group_desc)
    meshes = build_meshes(layout, torch.device("cpu"), TIMEOUT)
    views = [view for view in vars_of(meshes) if view is not None]
    groups = {
        name: dist.get_process_group_ranks(view.get_group(name))
        for view in views
        for name in view.mesh_dim_names
    }
    every = [group for view in views for group in view.get_all_groups()]
    assert sorted(connected) == sorted({group.group_desc for group in every})
    timeouts = [group_timeout(group, "cpu") for group in every]
    answers.put((rank, groups, timeouts, connected))
    # One that ends closes its connections, and others may still be making sure of theirs.
    store.wait(["every rank has answered"], TIMEOUT)


def vars_of(meshes):
    return [getattr(meshes, field.name) for field in dataclasses.fields(meshes)]


def group_timeout(group, device_type):
    return group._get_backend(torch.device(device_type)).options._timeout


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
        found = sorted(answers.get(timeout=50) for _ in ranks)
        store.set("every rank has answered", "")
        return found
    finally:
        for process in ranks:
            process.kill()
            process.join()


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            ParallelLayout(dp=4, dp_replicate=2),
            [
                {"dp_replicate": [0, 2], "dp_shard": [0, 1]},
                {"dp_replicate": [1, 3], "dp_shard": [0, 1]},
                {"dp_replicate": [0, 2], "dp_shard": [2, 3]},
                {"dp_replicate": [1, 3], "dp_shard": [2, 3]},
            ],
        ),
        (
            ParallelLayout(dp=2, pp=2, cp=2),
            [
                {"fsdp": [0, 1, 4, 5], "pp": [0, 2], "cp": [0, 1]},
                {"fsdp": [0, 1, 4, 5], "pp": [1, 3], "cp": [0, 1]},
                {"fsdp": [2, 3, 6, 7], "pp": [0, 2], "cp": [2, 3]},
                {"fsdp": [2, 3, 6, 7], "pp": [1, 3], "cp": [2, 3]},
                {"fsdp": [0, 1, 4, 5], "pp": [4, 6], "cp": [4, 5]},
                {"fsdp": [0, 1, 4, 5], "pp": [5, 7], "cp": [4, 5]},
                {"fsdp": [2, 3, 6, 7], "pp": [4, 6], "cp": [6, 7]},
                {"fsdp": [2, 3, 6, 7], "pp": [5, 7], "cp": [6, 7]},
            ],
        ),
        (
            ParallelLayout(dp=4, cp=2, ep=2),
            [
                {
                    "fsdp": list(range(8)),
                    "cp": [i - i % 2, i - i % 2 + 1],
                    "ep": [i // 4 * 4 + i % 2, i // 4 * 4 + i % 2 + 2],
                    "experts": sorted({i % 4 - i % 2, i % 4 - i % 2 + 1})
                    + sorted({4 + i % 4 - i % 2, 5 + i % 4 - i % 2}),
                }
                for i in range(8)
            ],
        ),
    ],
    ids=["hsdp", "dp-pp-cp", "ep"],
)
def test_every_group_has_the_ranks_and_the_one_time_out_and_is_connected_once(
    layout, expected, monkeypatch
):
    answers = _groups(layout, monkeypatch)
    assert [groups for _, groups, _, _ in answers] == expected
    # In one order: ranks that connect groups in different ones would wait for each other.
    assert [connected for *_, connected in answers] == [answers[0][-1]] * layout.world_size
    for _, groups, timeouts, connected in answers:
        assert len(connected) == len(groups)
        assert len(timeouts) >= len(groups)
        assert set(timeouts) == {TIMEOUT}
