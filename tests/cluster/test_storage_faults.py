"""Shared storage that stands still or is slow: epochs that run go on, and lose nothing."""

from __future__ import annotations

import pytest
from fault_matrix import LAYOUTS, check, events, losses, run_case, story
from frozen_storage import Disk, Freeze, Freezer, why_not

LAYOUT = LAYOUTS["dp3"]
STEPS = 400
SLACK_S = 0.3
"""What was under way when the storage froze."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    result = run_case(tmp_path_factory.mktemp("plain"), LAYOUT, steps=60)
    check(result, {}, steps=60)
    return losses(result.run_dir)


@pytest.fixture
def disk(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    try:
        with Disk(tmp_path) as found:
            yield found
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


def run_frozen(tmp_path, disk, plain, freeze, *, steps=STEPS, sets=()):
    """Run with `freeze`; return the result and when storage stood still."""
    freezer = Freezer(disk, disk.path / "run", freeze)
    freezer.start()
    try:
        result = run_case(
            tmp_path, LAYOUT, sets=sets, steps=steps, run_dir=disk.path / "run", timeout_s=240
        )
    finally:
        freezer.stop()
    assert len(freezer.windows) == freeze.times, story(tmp_path, "it was over before")
    check(result, plain, steps=steps)
    return result, freezer.windows


def within(result, name, window):
    begun, ended = window
    return [e for e in events(result.run_dir, name) if begun + SLACK_S < e["t_unix"] < ended]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_frozen_storage_stops_commits_but_not_training(tmp_path, disk, plain):
    result, [window] = run_frozen(tmp_path, disk, plain, Freeze(step=20, seconds=5.0))
    told = story(tmp_path, "")
    steps = within(result, "step.completed", window)
    assert len(steps) >= 5, told
    assert {event["epoch"] for event in events(result.run_dir, "epoch.formed")} == {1}, told
    assert within(result, "checkpoint.committed", window) == []
    # A step is committed once its line of the ledger is there.
    assert within(result, "step.committed", window) == []
    stalls = events(result.run_dir, "storage.stalled")
    assert max(event["seconds"] for event in stalls) >= 4.0, told
    assert any(e["t_unix"] > window[1] for e in events(result.run_dir, "checkpoint.committed"))
    assert any(
        "the save before is still being written" in event["reason"]
        for event in events(result.run_dir, "checkpoint.failed")
    ), told


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_slow_storage_costs_no_step(tmp_path, disk, plain):
    freeze = Freeze(step=5, seconds=1.0, times=6)  # writers wait 0.2 s of each
    result, windows = run_frozen(tmp_path, disk, plain, freeze)
    assert {event["epoch"] for event in events(result.run_dir, "epoch.formed")} == {1}
    assert sum(len(within(result, "step.completed", w)) for w in windows) >= 1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("event", ["run.started", "coordinator.elected", "epoch.formed"])
def test_a_start_waits_for_frozen_storage(event, tmp_path, disk, plain):
    run_frozen(tmp_path, disk, plain, Freeze(event=event, seconds=3.0), steps=24)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_dies_while_storage_is_frozen(tmp_path, disk, plain):
    """The next epoch has to wait for the board."""
    freeze = Freeze(step=20, seconds=4.0, kill_rank=1)
    result, [window] = run_frozen(tmp_path, disk, plain, freeze)
    formed = events(result.run_dir, "epoch.formed")
    assert len(formed) >= 2
    assert all(e["t_unix"] >= window[1] - 0.1 for e in formed[1:])
    assert result.summary["committed_steps_redone"] == 0
