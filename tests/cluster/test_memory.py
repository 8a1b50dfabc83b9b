"""Snapshots in memory, end to end: what is lost with a node is not lost with the job."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest
from fault_matrix import leftovers
from test_run import (
    HOLDFAST,
    arguments,
    holdfast,
    job,
    launched,
    summary_of,
    wait_for,
    wait_for_step,
)
from tiny_run import events, losses

__all__ = ["job"]  # the fixture

SHM = Path("/dev/shm")


def agents(run_dir):
    """Node -> process id of its newest agent."""
    return {event["node"]: event["pid"] for event in events(run_dir, "agent.started")}


@pytest.mark.scenario
def test_a_node_and_the_coordinator_die_and_no_committed_step_is_redone(job, tmp_path):
    """Storage has only step 20 when the nodes die: memory has what they were at."""
    run_dir = tmp_path / "run"
    faults = ["kill-node:2@6", "kill-coordinator@12"]
    options = [option for fault in faults for option in ("--fault", fault)]
    args = [*arguments(job, run_dir), *options, "--set", "checkpoint.every_steps=20"]
    summary = summary_of(holdfast(*args))
    assert (summary["state"], summary["steps"]) == ("finished", 24)
    assert [f["injected"] for f in summary["failures"]] == ["kill-node", "kill-coordinator"]
    assert all(f["recovered_s"] > 0 and f["detected_s"] >= 0 for f in summary["failures"])
    assert len(summary["nodes_at_end"]) == 1
    ranges = [(entry["from_step"], entry["to_step"]) for entry in summary["layouts"]]
    assert (ranges[0][0], ranges[-1][1]) == (1, 24)
    assert all(before[1] + 1 == after[0] for before, after in pairwise(ranges))
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert summary["committed_steps_redone"] == 0
    # A step may be killed between its end and its copies' arrival.
    assert summary["steps_redone"] <= len(faults)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    restored = events(run_dir, "snapshot.restored")
    assert len(restored) == len(faults)
    assert all(event["step"] >= 5 for event in restored)
    assert leftovers(run_dir) == []
    report = holdfast(*HOLDFAST, "report", str(run_dir))
    assert report.returncode == 0, report.stderr
    assert "data:image/svg+xml;base64," in (run_dir / "report.html").read_text()
    plain = tmp_path / "plain"
    summary_of(holdfast(*arguments(job, plain, "--nodes", "1")))
    for step, loss in losses(plain).items():
        assert losses(run_dir)[step] == pytest.approx(loss, rel=2e-5), step


def test_a_node_comes_back_and_growth_goes_through_memory(job, tmp_path):
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
    (growth,) = summary["growths"]
    assert growth["joined"] == ["node1"]
    assert growth["pause_s"] > 0
    assert summary["committed_steps_redone"] == 0
    (started,) = (e for e in events(run_dir, "trainer.started") if e["epoch"] == epoch)
    (stopping,) = (e for e in events(run_dir, "trainer.stopping") if e["why"] == "growth")
    assert started["restored_from"] == "memory"
    assert started["resume_step"] == stopping["step"]
    assert not any(e["epoch"] == 2 for e in events(run_dir, "checkpoint.committed"))
    assert leftovers(run_dir) == []


@pytest.mark.slow
def test_a_node_lost_with_its_copy_falls_back_to_storage_and_says_so(job, tmp_path):
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
    lacks = [re.search(r"\b1 of 3\b.*\(1\)", event["reason"]) for event in unusable]
    assert any(lacks), unusable
    (restored,) = events(run_dir, "checkpoint.restored")
    assert restored["step"] % 5 == 0
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)


def test_a_worker_dies_and_memory_is_given_back(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--set", "train.steps=40", "--nodes", "2")
    # Runs of one name that begin in one second have one id: other tests' do not count here.
    args += ["--fault", "kill-worker:1@8", "--set", "name=gives-back"]
    with launched(args) as process:
        wait_for(run_dir, "snapshot.restored", lambda _: True, process)
        wait_for(run_dir, "step.committed", lambda e: e["epoch"] == 2, process)
        run_id = json.loads((run_dir / "job.json").read_text())["run_id"]
        kept = list(SHM.glob(f"holdfast-{run_id}-*/snapshots/*"))
        out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    summary = json.loads(out)
    (failure,) = summary["failures"]
    assert (failure["kind"], failure["rank"]) == ("killed", 1)
    assert [len(entry["nodes"]) for entry in summary["layouts"]] == [2, 2]
    assert leftovers(run_dir) == []
    assert kept, "snapshots lie in /dev/shm"
    # Two own and two copies a worker, of one epoch; of the one before at most one each.
    assert len(kept) <= 2 * 6
    assert list(SHM.glob(f"holdfast-{run_id}-*")) == []


@pytest.mark.slow
def test_without_memory_storage_does(job, tmp_path):
    run_dir = tmp_path / "run"
    args = arguments(job, run_dir, "--nodes", "2", "--fault", "kill-node:1@8")
    summary = summary_of(holdfast(*args, "--set", "checkpoint.memory_every_steps=0"))
    assert events(run_dir, "snapshot.restored") == []
    (failure,) = summary["failures"]
    assert failure["steps_redone"] >= 1
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
