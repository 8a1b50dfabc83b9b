"""Nodes that fail at every start, and programs that do: real agents, real workers, no trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)

ALL_RANKS = "raise ValueError('the mixture of data sets is empty')\n"
ONE_NODE = """\
import os, time
if os.environ["HOLDFAST_NODE"] == "n1":
    raise RuntimeError("/dev/disk/local: cannot read the header")
if int(os.environ["WORLD_SIZE"]) == 3:
    time.sleep(60)
"""
DEADLINE_S = 100.0
"""Three agents and three zygotes import torch, on a machine that others use too."""


def run_agents(tmp_path: Path, script: str, *conf: str) -> tuple[dict[str, int], list[dict]]:
    """Run three nodes to their end; return exit codes by node, and all events."""
    path = tmp_path / "work.py"
    path.write_text(script)
    shared = tmp_path / "shared"
    shared.mkdir()
    agents = {}
    for i in range(3):
        command = [sys.executable, "-m", "elastic_trainer.agent", "--node", f"n{i}"]
        command += ["--nnodes", "2:3", "--nproc-per-node", "1", "--rdzv-endpoint", str(shared)]
        command += ["--rdzv-id", tmp_path.name, "--local-addr", f"127.0.0.{i + 1}"]
        command += ["--rdzv-conf", ",".join(["join_timeout_s=90", *conf]), "--fresh", str(path)]
        agents[f"n{i}"] = subprocess.Popen(
            command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
    deadline = time.monotonic() + DEADLINE_S
    try:
        codes = {
            node: process.wait(max(0.1, deadline - time.monotonic()))
            for node, process in agents.items()
        }
    finally:
        for process in agents.values():
            process.kill()
            process.wait()
    lines = [
        json.loads(line)
        for file in tmp_path.rglob("events/agent-*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return codes, sorted(lines, key=lambda event: event["t_unix"])


def named(events: list[dict], name: str) -> list[dict]:
    return [event for event in events if event["event"] == name]


def test_the_same_error_everywhere_is_not_tried_again(tmp_path):
    codes, events = run_agents(tmp_path, ALL_RANKS)
    assert codes == {"n0": 93, "n1": 93, "n2": 93}
    assert len(named(events, "epoch.formed")) == 1
    (stopped,) = named(events, "job.stopped")
    assert "the mixture of data sets is empty" in stopped["reason"]
    assert "of 3 nodes at step 0" in stopped["reason"]


def test_a_node_where_workers_die_at_every_start_leaves_and_the_rest_finishes(tmp_path):
    codes, events = run_agents(tmp_path, ONE_NODE, "max_crashes=1")
    (evicted,) = named(events, "member.evicted")
    assert evicted["member"] == "n1"
    assert "failed 2 times" in evicted["reason"]
    assert [len(e["members"]) for e in named(events, "epoch.formed")] == [3, 3, 2]
    assert {codes["n0"], codes["n2"]} == {0}
    leads = named(events, "coordinator.elected")[-1]["node"] == "n1"
    assert codes["n1"] == (0 if leads else 92)  # who coordinates stays to the end
