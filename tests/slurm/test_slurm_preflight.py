"""Preflight on real nodes, by submitit."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launcher.fleet.node_ledger import NodeLedger
from launcher.fleet.preflight.checks import CHECKS

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
    others = {finding["level"] for finding in findings if finding["check"] != "storage"}
    assert others <= {"ok", "not here"}, findings  # there are no GPUs, nor their tools
    assert {f["level"] for f in findings if f["check"] == "storage"} <= {"ok", "warn"}, findings
    checked = {finding["check"] for finding in findings}
    assert checked == set(CHECKS)
    assert list(shared.iterdir()) == []  # neither probes nor files of the round

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
    assert "drain" in answer["nodes"][0]["problem"]

    code, answer, _ = preflight(slurm, slurm.dir, "--partition", "nowhere")
    assert (code, answer["problems"][0]["code"]) == (2, "HF661")


@pytest.mark.timeout(240)
def test_groups_of_nodes_all_reduce_and_leave_no_job(slurm):
    options = ("--partition", "main", "--check", "versions", "--collectives")
    code, answer, err = preflight(slurm, slurm.dir, *options)
    assert code == 0, (answer, err)
    told = {node["node"]: node["findings"][-1] for node in answer["nodes"]}
    assert list(told) == list(slurm.names)
    assert {(each["check"], each["level"]) for each in told.values()} == {("collectives", "ok")}
    slurm.wait_idle()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_whose_network_fails_is_found_and_kept_off(slurm):
    place = slurm.dir / "files" / "collectives"

    def cut_off():
        deadline = time.monotonic() + 90
        while len(list(place.glob("hello-*.json"))) < len(slurm.names):
            assert time.monotonic() < deadline, "the nodes' processes have not started"
            time.sleep(0.01)
        slurm.link("n3", up=False)

    cutter = threading.Thread(target=cut_off)
    cutter.start()
    try:
        options = ("--partition", "main", "--check", "versions", "--collectives")
        ledger = slurm.dir / "fleet"
        code, answer, err = preflight(slurm, slurm.dir, *options, "--fleet", str(ledger))
    finally:
        cutter.join()
        slurm.link("n3", up=True)
    levels = {node["node"]: node["findings"][-1]["level"] for node in answer["nodes"]}
    assert levels == {name: "fail" if name == "n3" else "ok" for name in slurm.names}, err
    assert code == 1
    assert [entry.machine for entry in NodeLedger(ledger).entries()] == ["n3"]
