"""The training thread takes no page faults where a thread has been there before it."""

from __future__ import annotations

import resource
import threading

import pytest
import torch
from keeper_place import place_of

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state import snapshot_tier as tier_module
from elastic_trainer.state.offload import WORTH_BYTES, fault_in
from elastic_trainer.state.snapshot_tier import SnapshotTier
from elastic_trainer.state.state import Stager

LARGE_BYTES = 48 << 20
"""Beyond what malloc keeps for the next caller, so fresh memory each time."""
NUM_PAGES = LARGE_BYTES // 4096


def large():
    return {"model": {"w": torch.arange(LARGE_BYTES // 4, dtype=torch.float32).reshape(64, -1)}}


def faults(body):
    """Return how many page faults this thread takes in `body`, and its value."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    value = body()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before, value


def test_staging_into_warmed_buffers_takes_no_faults():
    live, stager = large(), Stager()
    stager.warm(live)
    stager.wait(60)
    num_faults, staged = faults(lambda: stager.stage(live))
    assert torch.equal(staged["model"]["w"], live["model"]["w"])
    cold, _ = faults(lambda: Stager().stage(live))
    assert num_faults < NUM_PAGES / 100
    assert cold > num_faults + 10  # huge pages, where a machine gives them unasked, are few


@pytest.mark.process
def test_a_save_that_comes_too_early_ends_the_warming_and_loses_nothing():
    for _ in range(5):
        live, stager = large(), Stager()
        stager.warm(live)
        staged = stager.stage(live)
        assert torch.equal(staged["model"]["w"], live["model"]["w"])
        assert not stager._warming.is_alive()


def test_small_states_need_no_thread():
    live, stager = {"model": {"w": torch.ones(WORTH_BYTES // 4 - 1)}}, Stager()
    stager.warm(live)
    assert stager._warming is None


def test_stopped_it_leaves_the_rest():
    stop, buffer = threading.Event(), torch.ones(LARGE_BYTES, dtype=torch.uint8)
    stop.set()
    fault_in(buffer, stop)
    assert buffer.all()
    fault_in(buffer, threading.Event())
    assert not buffer[::4096].any()


def tier(shared_memory, world_size=1):
    said = []
    layout = ParallelLayout(dp=world_size)
    place = place_of(shared_memory, workers=world_size)
    made = SnapshotTier(
        place, layout, rank=0, epoch=1, every_steps=1, emit=lambda *a, **_: said.append(a)
    )
    return made, said


@pytest.mark.process
def test_the_first_snapshot_of_a_large_state_only_makes_the_images(shared_memory, monkeypatch):
    made = threading.Event()  # however late this thread runs, the images are not ready before
    monkeypatch.setattr(tier_module, "fault_in", lambda *what: made.wait(60) and fault_in(*what))
    memory, said = tier(shared_memory)
    live = large()
    num_faults, taken = faults(lambda: memory.take(live, 1))
    assert not taken
    assert not memory.take(live, 2)  # and none of this is a snapshot that was skipped
    made.set()
    memory.wait(60)
    assert memory.votes() == (0.0, 0.0, 1.0)
    assert memory.agreed(0.0, 0.0, 1.0) is None
    for step in (3, 4):  # one in each image
        more, taken = faults(lambda step=step: memory.take(live, step))
        assert taken
        num_faults += more
        memory.wait(60)
        assert memory.votes() == (1.0, 0.0, 0.0)
        assert memory.agreed(1.0, 0.0, 0.0) == step
    assert num_faults < NUM_PAGES / 20  # of 2 * NUM_PAGES; the plan takes some
    assert said == []
    memory.close()


def test_a_rank_that_was_ready_waits_for_one_that_was_not(shared_memory):
    memory, said = tier(shared_memory, world_size=2)
    small = {"model": {"w": torch.ones(4)}}
    assert memory.take(small, 1)
    memory.wait(60)
    assert memory.agreed(1.0, 0.0, 0.0) is None
    assert memory.under_way
    assert memory.agreed(1.0, 0.0, 1.0) is None
    assert not memory.under_way
    assert (memory.committed_step, said) == (None, [])
    assert memory.take(small, 2)
    memory.wait(60)
    assert memory.agreed(2.0, 0.0, 0.0) == 2
    memory.close()


def test_no_room_for_the_images_is_a_failed_snapshot(shared_memory, monkeypatch):
    monkeypatch.setattr(tier_module, "no_room", lambda *_: "none left")
    memory, said = tier(shared_memory)
    for _ in range(2):
        assert not memory.take(large(), 1)
        memory.wait(60)
        assert memory.votes() == (0.0, 1.0, 0.0)
        assert memory.agreed(0.0, 1.0, 0.0) is None
    assert [event for event, _ in said] == ["snapshot.failed"] * 2
    memory.close()
