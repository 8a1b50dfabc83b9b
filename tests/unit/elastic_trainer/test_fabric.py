"""Nodes that have the fabric of the job file and those that do not, as fake sysfs trees."""

from __future__ import annotations

import os
import resource

import pytest

from elastic_trainer.agent import __main__ as main
from elastic_trainer.agent.hardware import (
    FabricError,
    Port,
    check_fabric,
    chosen,
    nccl_net,
)
from elastic_trainer.plan.locked_memory import locked_memory

VERBS = "libc.so.6"
"""A library that is there."""


@pytest.fixture
def machine(tmp_path):
    """Add an adapter; return the root of sys and dev."""

    def add(name, *layers, state="4: ACTIVE", driver="mlx5_core", opens=True):
        adapter = tmp_path / "sys/class/infiniband" / name
        for number, layer in enumerate(layers, 1):
            port = adapter / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(f"{state}\n")
            (port / "link_layer").write_text(f"{layer}\n")
        drivers = tmp_path / "sys/bus/pci/drivers" / driver
        drivers.mkdir(parents=True, exist_ok=True)
        (adapter / "device").mkdir()
        (adapter / "device/driver").symlink_to(drivers)
        verbs = tmp_path / "sys/class/infiniband_verbs" / f"uverbs{name[-1]}"
        verbs.mkdir(parents=True)
        (verbs / "ibdev").write_text(f"{name}\n")
        if opens:
            (tmp_path / "dev/infiniband").mkdir(parents=True, exist_ok=True)
            (tmp_path / "dev/infiniband" / verbs.name).touch()
        return tmp_path

    return add


def check(root, fabric, devices=None, verbs=VERBS):
    named = {} if devices is None else {"NCCL_IB_HCA": devices}
    check_fabric({"HOLDFAST_FABRIC": fabric, **named}, root, verbs)


def refused(root, fabric, *more, code=93, **options):
    with pytest.raises(FabricError, match="HF505") as caught:
        check(root, fabric, *more, **options)
    assert caught.value.exit_code == code
    return str(caught.value)


def test_no_fabric_is_no_question(tmp_path):
    check_fabric({}, tmp_path, "no-such-library")
    check(tmp_path, "none", verbs="no-such-library")


@pytest.mark.parametrize("fabric", ["infiniband", "roce", "efa"])
def test_a_node_without_adapters_does_not_start(tmp_path, fabric):
    assert "none" in refused(tmp_path, fabric)


def test_the_link_layer_decides(machine):
    root = machine("mlx5_0", "InfiniBand")
    check(root, "infiniband", "mlx5")
    assert "mlx5_0:1 (InfiniBand, active)" in refused(root, "roce", "mlx5")
    machine("mlx5_1", "Ethernet")
    check(root, "roce", "mlx5")
    refused(root, "infiniband", "=mlx5_1")


def test_a_port_that_is_down_does_not_count(machine):
    root = machine("mlx5_0", "InfiniBand", state="1: DOWN")
    assert "mlx5_0:1 (InfiniBand, down)" in refused(root, "infiniband", code=92)
    refused(root, "roce")


def test_an_adapter_that_a_container_was_not_given_does_not_count(machine):
    root = machine("mlx5_0", "InfiniBand", opens=False)
    assert "mlx5_0:1 (InfiniBand, active, " in refused(root, "infiniband")


def test_an_image_without_libibverbs_is_told(machine):
    root = machine("mlx5_0", "InfiniBand")
    assert "no-such.so" in refused(root, "infiniband", verbs="no-such.so")


def test_efa_is_known_by_its_driver(machine):
    root = machine("rdmap0s6", "Unspecified", driver="efa")
    check(root, "efa", verbs="no-such.so")
    refused(root, "infiniband")
    refused(machine("mlx5_0", "Ethernet"), "roce", "=rdmap0s6")


@pytest.mark.parametrize(
    ("wanted", "takes"),
    [
        ("", True),
        ("mlx5", True),
        ("mlx4,mlx5", True),
        ("=mlx5", False),
        ("=mlx5_1", True),
        ("mlx5_1:1", False),
        ("=mlx5_1:2", True),
        ("^mlx5_1", False),
        ("^=mlx5_1:1", True),
        ("^mlx4", True),
        ("bnxt", False),
    ],
)
def test_adapters_are_chosen_as_nccl_does(wanted, takes):
    port = Port("mlx5_1", 2, "mlx5_core", "InfiniBand", active=True, usable=True)
    assert chosen(port, wanted) == takes


@pytest.mark.parametrize("fabric", ["infiniband", "roce"])
def test_nccl_is_held_to_the_fabric_where_there_is_no_plugin_to_shut_out(fabric):
    env = {**os.environ, "HOLDFAST_FABRIC": fabric}
    assert nccl_net(env, "no-such-plugin.so") == {"NCCL_NET": "IB"}
    assert nccl_net(env, VERBS) == {}
    assert nccl_net({**env, "NCCL_NET": "IBext_v8"}, "no-such-plugin.so") == {}
    assert nccl_net({**env, "NCCL_NET_PLUGIN": "hpcx"}, "no-such-plugin.so") == {}
    assert nccl_net({**env, "HOLDFAST_FABRIC": "efa"}, "no-such-plugin.so") == {}
    assert nccl_net(dict(os.environ), "no-such-plugin.so") == {}


def test_the_agent_ends_before_it_does_anything(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "_import_torch", lambda: None)
    monkeypatch.setenv("HOLDFAST_FABRIC", "infiniband")
    monkeypatch.setenv("NCCL_IB_HCA", "=no-such-adapter")
    (tmp_path / "script.py").touch()
    flags = ["--nnodes", "1", "--rdzv-endpoint", str(tmp_path / "shared"), "--rdzv-id", "x"]
    argv = [*flags, "--local-addr", "127.0.0.1", str(tmp_path / "script.py")]
    assert main.main(argv) == 93
    assert " HF505 fabric: infiniband" in capsys.readouterr().err
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize(
    ("limit", "effective", "wrong"),
    [
        (resource.RLIM_INFINITY, 0, False),
        (64 << 10, 0, True),
        (8 << 20, 1 << 13, True),
        (8 << 20, 1 << 14, False),
    ],
)
def test_rdma_needs_memory_that_may_be_locked(limit, effective, wrong):
    granted = "CapPrm:\t0\nCapBnd:\t0000000000004000\n"
    status = f"Name:\tx\n{granted}CapEff:\t{effective:016x}\n"
    found = locked_memory(status, limit)
    assert (found is not None and f"{limit >> 10} KiB" in found) == wrong
