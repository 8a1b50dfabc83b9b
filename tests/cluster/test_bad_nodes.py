"""Nodes that fail at every start, and programs that do: real agents, real workers, no trainer."""

from __future__ import annotations

import contextlib
import json
import os
import re
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
    raise OSError(5, "Input/output error", "/dev/disk/local")
if int(os.environ["WORLD_SIZE"]) == 3:
    time.sleep(60)
"""
OWN_ERRORS = """\
import os, time
import torch
from torch.distributed.elastic.multiprocessing.errors import record

group = "{group}"

@record
def with_error_file():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")

def until_the_kernel_kills():
    if not group:
        raise MemoryError
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
    held = [bytearray(1 << 20) for _ in range(1 << 12)]

if os.environ["HOLDFAST_NODE"] != "n1":
    time.sleep(60)
epoch = int(os.environ["HOLDFAST_EPOCH"])
if epoch == 1:
    raise ValueError("3 labels for 4 rows")
(with_error_file if epoch == 2 else until_the_kernel_kills)()
"""
"""On one node only: without an error file, with one, and with nothing but a signal."""
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


@pytest.mark.scenario
def test_the_same_error_everywhere_is_not_tried_again(tmp_path):
    codes, events = run_agents(tmp_path, ALL_RANKS)
    assert codes == {"n0": 93, "n1": 93, "n2": 93}
    assert len(named(events, "epoch.formed")) == 1
    (stopped,) = named(events, "job.stopped")
    assert "the mixture of data sets is empty" in stopped["reason"]
    assert re.search(r"\bof 3\b.*\bstep 0\b", stopped["reason"])


@pytest.fixture
def small_memory():
    """Make a cgroup of 64 MiB above what is there; an empty path where this cannot be done."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        path = root / f"holdfast-test-{os.getpid()}"
        try:
            path.mkdir()
            (path / limit).write_text(str(64 << 20))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        yield str(path)
        deadline = time.monotonic() + 10
        while path.exists():
            assert time.monotonic() < deadline
            with contextlib.suppress(OSError):
                path.rmdir()
            time.sleep(0.05)
        return
    yield ""


@pytest.mark.slow
def test_a_programs_own_errors_and_want_of_memory_exclude_no_healthy_node(tmp_path, small_memory):
    codes, events = run_agents(tmp_path, OWN_ERRORS.format(group=small_memory), "max_crashes=2")
    ends = [e for e in named(events, "worker.exit") if e["node"] == "n1"]
    kinds = [e["kind"] for e in ends]
    assert kinds == ["crash", "out_of_memory", "out_of_memory"], ends
    assert ends[2]["signal"] == (9 if small_memory else None)
    assert named(events, "member.evicted") == []
    assert [len(e["members"]) for e in named(events, "epoch.formed")] == [3, 3, 3]
    assert codes == {"n0": 94, "n1": 94, "n2": 94}, "its budget ends it"
    (stopped,) = named(events, "job.stopped")
    assert re.search(r"\bn1\b", stopped["reason"])


def test_a_node_where_workers_die_at_every_start_leaves_and_the_rest_finishes(tmp_path):
    codes, events = run_agents(tmp_path, ONE_NODE, "max_crashes=1")
    (evicted,) = named(events, "member.evicted")
    assert evicted["member"] == "n1"
    assert " 2 " in evicted["reason"]
    assert [len(e["members"]) for e in named(events, "epoch.formed")] == [3, 3, 2]
    assert {codes["n0"], codes["n2"]} == {0}
    leads = named(events, "coordinator.elected")[-1]["node"] == "n1"
    assert codes["n1"] == (0 if leads else 92)  # who coordinates stays to the end
