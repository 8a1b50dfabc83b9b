"""Nodes whose clocks are minutes apart: nothing is decided by comparing them."""

from __future__ import annotations

import os

import pytest
from fault_matrix import LAYOUTS, check, events, losses, run_case

# Imported by every Python of the run: a node's agent sets its clock, which its children inherit.
SKEW = """\
import os, sys, time

OFFSETS = {"node0": 420.0, "node1": -300.0, "node3": 86400.0}
with open("/proc/self/cmdline", "rb") as file:
    words = file.read().decode().split("\\0")
if "elastic_trainer.agent" in words and "--node" in words:
    os.environ["TEST_CLOCK_OFFSET_S"] = str(OFFSETS.get(words[words.index("--node") + 1], 0.0))
if offset := float(os.environ.get("TEST_CLOCK_OFFSET_S", "0")):
    real = time.time
    time.time = lambda: real() + offset
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_clocks_minutes_apart_change_nothing(tmp_path, monkeypatch):
    layout = LAYOUTS["dp4"]
    faults = ("kill-worker:2@5", "kill-node:0@10", "kill-coordinator@16")
    plain = run_case(tmp_path / "plain", layout)
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    result = run_case(tmp_path / "skewed", layout, faults)
    check(result, losses(plain.run_dir), faults)
    started = {event["node"]: event["t_unix"] for event in events(result.run_dir, "agent.started")}
    assert started["node3"] - started["node2"] > 80_000
    assert started["node0"] - started["node1"] > 600
