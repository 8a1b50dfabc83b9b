"""Shared storage that stands still, is slow or refuses: epochs that run go on, and lose nothing."""

from __future__ import annotations

import threading

import pytest
from fault_matrix import LAYOUTS, Layout, check, events, losses, run_case, story
from fault_matrix import STEPS as CASE_STEPS
from frozen_storage import Disk, Freeze, Freezer, why_not

from elastic_trainer.state.manifest import directory_name

LAYOUT = LAYOUTS["dp3"]
STEPS = 1500
"""More than are done until the last freeze."""
SLACK_S = 0.3
"""What was under way when the storage froze."""
FREEZES = (
    *(
        Freeze(event=event, seconds=2.0)
        for event in ("run.started", "coordinator.elected", "epoch.formed")
    ),
    Freeze(step=20, seconds=5.0),
    Freeze(step=20, seconds=1.0, times=6),  # slow: writers wait 0.2 s of each
    Freeze(step=20, seconds=4.0, kill_rank=1),
)


@pytest.fixture
def disk(tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    try:
        with Disk(tmp_path) as found:
            yield found
    except PermissionError as error:
        pytest.skip(f"no file system can be mounted here: {error}")


def within(result, name, window):
    begun, ended = window
    return [e for e in events(result.run_dir, name) if begun + SLACK_S < e["t_unix"] < ended]


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_frozen_and_slow_storage_stop_commits_and_new_epochs_but_not_training(tmp_path, disk):
    plain = run_case(tmp_path / "plain", LAYOUT, steps=60)
    check(plain, {}, steps=60)
    run_dir = disk.path / "run"
    freezer = Freezer(disk, run_dir, FREEZES)
    freezer.start()
    try:
        result = run_case(tmp_path, LAYOUT, steps=STEPS, run_dir=run_dir, timeout_s=300)
    finally:
        freezer.stop()
    told = story(tmp_path, "")
    assert len(freezer.windows) == len(FREEZES), told
    *_, [frozen], slow, [with_death] = freezer.windows  # a start that waits only has to succeed
    check(result, losses(plain.run_dir), steps=STEPS)

    assert len(within(result, "step.completed", frozen)) >= 5, told
    assert within(result, "checkpoint.committed", frozen) == []
    # A step is committed once its line of the ledger is there.
    assert within(result, "step.committed", frozen) == []
    stalls = events(run_dir, "storage.stalled")
    assert max(event["seconds"] for event in stalls) >= 4.0, told
    commits = events(run_dir, "checkpoint.committed")
    assert any(e["t_unix"] > frozen[1] for e in commits), told
    assert events(run_dir, "checkpoint.failed"), "the save before was still being written"

    assert sum(len(within(result, "step.completed", window)) for window in slow) >= 1

    # Neither costs an epoch; the one after a death has to wait for the board.
    formed = [e["t_unix"] for e in events(run_dir, "epoch.formed")]
    later = [t_unix for t_unix in formed if t_unix > frozen[0]]
    assert min(later) >= with_death[1] - 0.1, told
    assert result.summary["committed_steps_redone"] == 0


@pytest.mark.timeout(240)
def test_a_last_save_that_fails_is_tried_again(tmp_path):
    place, run_dir = tmp_path / "checkpoints", tmp_path / "run"
    names = [place / directory_name(CASE_STEPS, 1, attempt) for attempt in range(1, 1000)]
    ended = threading.Event()

    def seen(event):
        while not events(run_dir, event):
            if ended.wait(0.01):
                return False
        return True

    def take_names():
        """Have none left for the checkpoint before workers have started, until one has failed."""
        if seen("run.started"):
            for name in names:
                name.mkdir(parents=True)
        if seen("checkpoint.failed"):
            names[0].rmdir()

    taker = threading.Thread(target=take_names)
    taker.start()
    sets = ("checkpoint.every_steps=null", "checkpoint.every_s=600", f"checkpoint.dir={place}")
    try:
        result = run_case(tmp_path, Layout("dp2", "{dp: auto}", nodes=2), sets=sets)
    finally:
        ended.set()
        taker.join()
    check(result, {})
    assert events(run_dir, "checkpoint.failed")
    assert [e["step"] for e in events(run_dir, "checkpoint.committed")] == [CASE_STEPS]
    assert len(events(run_dir, "epoch.formed")) == 1
