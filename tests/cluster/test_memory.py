"""Snapshots in memory, end to end: what is lost with a node is not lost with the job."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from test_run import (
    arguments,
    holdfast,
    job,
    launched,
    leftovers,
    losses,
    summary_of,
    wait_for,
    wait_for_step,
)

__all__ = ["job"]  # the fixture

SHM = Path("/dev/shm")


def events(run_dir, name):
    lines = [
        json.loads(line)
        for path in (run_dir / "events").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    return sorted((e for e in lines if e["event"] == name), key=lambda e: e["t_unix"])


def agents(run_dir):
    """Node -> process id of its newest agent."""
    return {event["node"]: event["pid"] for event in events(run_dir, "agent.started")}


def test_no_committed_step_is_redone(job, tmp_path):
    """Storage has only step 20 when the nodes die: memory has what they were at."""
    run_dir = tmp_path / "run"
    faults = ["kill-node:2@6", "kill-coordinator@12"]
    options = [option for fault in faults for option in ("--fault", fault)]
    args = [*arguments(job, run_dir), *options, "--set", "checkpoint.every_steps=20"]
    summary = summary_of(holdfast(*args))
    assert summary["committed_steps_redone"] == 0
    # A step may be killed between its end and its copies' arrival.
    assert summary["steps_redone"] <= len(faults)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    restored = events(run_dir, "snapshot.restored")
    assert len(restored) == len(faults)
    assert all(event["step"] >= 5 for event in restored)
    plain = tmp_path / "plain"
    summary_of(holdfast(*arguments(job, plain, "--nodes", "1")))
    for step, loss in losses(plain).items():
        assert losses(run_dir)[step] == pytest.approx(loss, rel=2e-5), step
    assert leftovers(run_dir) == []


def test_growth_goes_through_memory(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--set", "train.steps=100000")
    args += ["--set", "checkpoint.every_steps=null"]
    faults = ["--fault", "kill-node:1@3", "--fault", "return-node@6"]
    with launched([*args, *faults]) as process:
        grown = ("epoch.formed", lambda e: e["epoch"] > 2 and len(e["members"]) == 3)
        epoch = wait_for(run_dir, *grown, process)["epoch"]
        wait_for(run_dir, "step.completed", lambda e: e["epoch"] == epoch, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    summary = json.loads(out)
    assert summary["committed_steps_redone"] == 0
    (started,) = (e for e in events(run_dir, "trainer.started") if e["epoch"] == epoch)
    (stopping,) = (e for e in events(run_dir, "trainer.stopping") if e["why"] == "growth")
    assert started["restored_from"] == "memory"
    assert started["resume_step"] == stopping["step"]
    assert not any(e["epoch"] == 2 for e in events(run_dir, "checkpoint.committed"))


def test_a_node_lost_with_its_buddy_falls_back_to_storage_and_says_so(job, tmp_path):
    """Both at once: what the one held and the copy of it are gone."""
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--set", "train.steps=60")
    with launched(args) as process:
        wait_for(run_dir, "checkpoint.committed", lambda e: e["step"] >= 5, process)
        wait_for_step(run_dir, 8, process)
        first = events(run_dir, "epoch.formed")[0]["members"]
        # Rank 1's copy is on the node of rank 2; pausing first makes it one moment.
        doomed = [agents(run_dir)[node] for node in first[1:3]]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                os.kill(pid, number)
        out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    summary = json.loads(out)
    assert summary["steps"] == 60
    unusable = events(run_dir, "snapshot.unusable")
    # The newest may lack rank 2's copy too, when it died before that arrived.
    assert any("lacks 1 of 3 parts (1)" in event["reason"] for event in unusable), unusable
    (restored,) = events(run_dir, "checkpoint.restored")
    assert restored["step"] % 5 == 0
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)


def test_memory_is_given_back(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--set", "train.steps=40", "--fault", "kill-worker:1@8")
    with launched(args) as process:
        wait_for(run_dir, "snapshot.restored", lambda _: True, process)
        wait_for(run_dir, "step.committed", lambda e: e["epoch"] == 2, process)
        run_id = json.loads((run_dir / "job.json").read_text())["run_id"]
        kept = list(SHM.glob(f"holdfast-{run_id}-*/snapshots/*"))
        process.communicate(timeout=50)
    assert kept, "snapshots lie in /dev/shm"
    # Two own and two copies a worker, of one epoch; of the one before at most one each.
    assert len(kept) <= 3 * 6
    assert list(SHM.glob(f"holdfast-{run_id}-*")) == []


def test_without_memory_storage_does(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--fault", "kill-node:2@8")
    summary = summary_of(holdfast(*args, "--set", "checkpoint.memory_every_steps=0"))
    assert events(run_dir, "snapshot.restored") == []
    (failure,) = summary["failures"]
    assert failure["steps_redone"] >= 1
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
