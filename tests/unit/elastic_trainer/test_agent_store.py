from __future__ import annotations

import errno
import socket
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elastic_trainer.agent.rendezvous import EpochStore
from elastic_trainer.agent.wire.addresses import parse_ports
from elastic_trainer.agent.workers.environment import base_environment

WAIT = timedelta(seconds=10)


def refuses(address: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) != 0


def test_every_epoch_has_a_fresh_store_on_the_nodes_own_address() -> None:
    store = EpochStore("127.0.0.5")
    try:
        address, port = store.open(1)
        assert address == "127.0.0.5"
        client = TCPStore(address, port, is_master=False, timeout=WAIT)
        client.set("epoch", "1")
        assert refuses("127.0.0.1", port), "it listens elsewhere too"
        del client
        _, second = store.open(2)
        assert refuses(address, port), "the first one still serves"
        client = TCPStore(address, second, is_master=False, timeout=WAIT)
        assert not client.check(["epoch"])
        del client
    finally:
        store.close()
    assert refuses(address, second)


def test_ports_of_the_range_are_tried_in_turn() -> None:
    with socket.create_server(("127.0.0.6", 0)) as first:
        low = int(first.getsockname()[1])
        ports = range(low, low + 3)
        store = EpochStore("127.0.0.6", ports)
        try:
            used = [store.open(epoch)[1] for epoch in range(3)]
        finally:
            store.close()
        assert used == [low + 1, low + 2, low + 1]
        alone = EpochStore("127.0.0.6", range(low, low + 1))
        with pytest.raises(OSError, match=f"{low}-{low}") as caught:
            alone.open(0)
        assert caught.value.errno == errno.EADDRINUSE


def test_a_range_without_a_free_port_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.7", 0)) as first:
        low = int(first.getsockname()[1])
        with socket.create_server(("127.0.0.7", low + 1)):
            store = EpochStore("127.0.0.7", range(low, low + 2))
            with pytest.raises(OSError, match=rf"{low}-{low + 1} .*network\.ports"):
                store.open(0)


@pytest.mark.parametrize("text", ["", "a-b", "10-9", "0-5", "1-70000", "1-2-3"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="29400-29499"):
        parse_ports(text)


def test_good_ranges() -> None:
    assert parse_ports(None) == range(1)
    assert parse_ports("29400-29402") == range(29400, 29403)
    assert parse_ports("29400") == range(29400, 29401)


def test_the_base_environment_keeps_what_the_user_set() -> None:
    env = base_environment(
        {"OMP_NUM_THREADS": "4", "NCCL_SOCKET_IFNAME": "ib0"},
        workers=2,
        address="127.0.0.3",
        run_dir=None,
        record_dir=Path("/job"),
    )
    assert env["OMP_NUM_THREADS"] == "4"
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("lo", "ib0")
    assert "HOLDFAST_RUN_DIR" not in env
    where = {"address": "203.0.113.1", "run_dir": None, "record_dir": Path("/job")}
    assert base_environment({}, workers=2, **where) == {
        "HOLDFAST_RECORD_DIR": "/job",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TORCH_FR_BUFFER_SIZE": "512",
    }


def test_a_store_of_the_users_place_is_reached_by_all_names_and_at_the_same_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    store = EpochStore("127.0.0.8", range(port, port + 1), called="some-name")
    try:
        for epoch in (1, 2):
            assert store.open(epoch) == ("some-name", port)
            for name in ("127.0.0.1", "localhost", "127.0.0.8", socket.gethostname()):
                client = TCPStore(name, port, is_master=False, timeout=WAIT)
                assert client.add(f"{epoch}", 1) > 0
                assert not client.check([f"{epoch - 1}"])
                del client
    finally:
        store.close()
