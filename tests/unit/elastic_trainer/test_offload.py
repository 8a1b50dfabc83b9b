"""Snapshots that are copied from a device while the training continues."""

from __future__ import annotations

import pytest
import torch
from device_streams import Device
from keeper_place import place_of

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state import offload
from elastic_trainer.state.offload import HOST, CudaOffload, offload_of
from elastic_trainer.state.snapshot_tier import SnapshotTier
from elastic_trainer.state.snapshots.image import Image

HERE = torch.device("cpu")
KEY = bytes(32)


def tier_of(shared_memory, device):
    return SnapshotTier(
        place_of(shared_memory),
        ParallelLayout(),
        rank=0,
        epoch=1,
        every_steps=1,
        emit=lambda *_, **__: None,
        offload=CudaOffload(HERE, device),
    )


def trained(shared_memory, monkeypatch, *, copies_first, waits=True):
    """Launch steps that add 1 to the weights, with a snapshot after the second; return its value.

    The device does all of it only when the host has launched everything.
    """
    device = Device(copies_first=copies_first)
    copy = offload.foreach_copy
    monkeypatch.setattr(offload, "foreach_copy", lambda *pairs: device.launch(lambda: copy(*pairs)))
    tier, weights = tier_of(shared_memory, device), torch.zeros(1000)
    for step in range(1, 5):
        if waits:
            tier.before_update()
        device.launch(lambda: weights.add_(1))
        if step == 2:
            assert tier.take({"model": {"w": weights}}, step)
            assert tier.votes() == (0.0, 0.0, 0.0), "nothing is sealed before it is copied"
    device.run()
    tier.wait(30)
    assert tier.votes() == (1.0, 0.0, 0.0)
    assert tier.agreed(1.0, 0.0) == 2
    assert weights.eq(4).all()
    (path,) = shared_memory.glob("own-*")
    image = Image(path)
    header = image.verify(KEY)
    (part,) = image.index(header)
    at = header.payload_at + part.at
    found = torch.frombuffer(
        image.map, dtype=torch.float32, count=part.num_bytes // 4, offset=at
    ).clone()
    image.close()
    assert len(device.pinned) == 1
    tier.close()
    assert not device.pinned, "memory is unmapped only once the device has forgotten it"
    return found


@pytest.mark.parametrize("copies_first", [True, False])
def test_a_snapshot_is_of_its_step_however_late_or_early_its_copy_runs(
    copies_first, shared_memory, monkeypatch
):
    assert trained(shared_memory, monkeypatch, copies_first=copies_first).eq(2).all()


def test_without_the_wait_a_late_copy_is_of_a_later_step(shared_memory, monkeypatch):
    found = trained(shared_memory, monkeypatch, copies_first=False, waits=False)
    assert found.eq(4).all()


def test_without_a_wait_of_the_copy_for_the_step_an_early_one_is_of_an_earlier(
    shared_memory, monkeypatch
):
    monkeypatch.setattr("device_streams.Stream.wait_stream", lambda *_: None)
    found = trained(shared_memory, monkeypatch, copies_first=True)
    assert found.eq(0).all()


def test_the_host_has_copied_on_return():
    source, target = torch.arange(5.0), torch.zeros(5)
    end = offload_of(HERE).copy([target], [source])
    source.zero_()
    assert target.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    end.wait()
    end.synchronize()
    assert not HOST.pin(target.data_ptr(), 20)


def test_what_is_on_the_host_is_copied_at_once_beside_what_is_on_a_device():
    device = Device(copies_first=False)
    source, target = torch.ones(3), torch.zeros(3)
    end = CudaOffload(torch.device("cuda", 0), device).copy([target], [source])
    assert target.eq(1).all()
    device.run()
    end.synchronize()
