"""Calibration on real nodes, by submitit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.spec.profile import parse_profile

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_two_idle_nodes_measure_and_leave_no_job(slurm):
    command = [sys.executable, "-m", "launcher.cli.main", "calibrate", "--quick", "--json"]
    command += ["--profile", "emulated", "--partition", "main"]
    command += ["--folder", str(slurm.dir / "calibration")]
    env = slurm.env(PYTHONPATH=str(ROOT), HOLDFAST_SITES=str(slurm.dir / "sites.yaml"))
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    path = Path(json.loads(done.stdout)["profile"])
    profile = parse_profile(path.read_bytes(), path.name)
    assert (profile.nodes, profile.gpus_per_node, profile.gpu) == (2, 1, "cpu")
    assert {(each.nodes, each.ranks) for each in profile.found.transfers} == {(2, 2)}
    assert not (slurm.dir / "calibration").exists()
    slurm.wait_idle()
