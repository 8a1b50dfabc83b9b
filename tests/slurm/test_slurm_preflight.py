"""Preflight on real nodes, by submitit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def preflight(slurm, folder, *options):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "launcher.cli.main", "preflight", "--json"),
            *("--dir", str(folder), "--shm-gib", "0", "--folder", str(folder / "files"), *options),
        ],
        cwd=ROOT,
        env=slurm.env(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.timeout(240)
def test_every_node_of_a_partition_is_asked_and_a_drained_one_fails(slurm):
    shared = slurm.dir / "shared storage"
    shared.mkdir()
    code, answer, err = preflight(slurm, shared, "--partition", "main")
    assert code == 0, (answer, err)
    assert [node["node"] for node in answer["nodes"]] == list(slurm.names)
    findings = [finding for node in answer["nodes"] for finding in node["findings"]]
    # All write to one disk here, on a busy machine at speeds of which one may be told to be slow.
    assert {f["level"] for f in findings if f["check"] != "storage"} == {"ok"}, findings
    assert {f["level"] for f in findings if f["check"] == "storage"} <= {"ok", "warn"}, findings
    checked = {finding["check"] for finding in findings}
    assert checked == {"gpus", "storage", "shm", "clock", "versions", "leftovers"}
    assert list(shared.iterdir()) == []

    slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=test")
    try:
        code, answer, _ = preflight(slurm, shared, "--nodes", "n[2-3]", "--check", "versions")
    finally:
        slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
    assert code == 1
    assert [(node["node"], node["level"]) for node in answer["nodes"]] == [
        ("n2", "fail"),
        ("n3", "ok"),
    ]
    # "draining" as long as the job before is not cleaned up there.
    assert "Slurm has it drain" in answer["nodes"][0]["problem"]

    code, answer, _ = preflight(slurm, slurm.dir, "--partition", "nowhere")
    assert (code, answer["problems"][0]["code"]) == (2, "HF661")
