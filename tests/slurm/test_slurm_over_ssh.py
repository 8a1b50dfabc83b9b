"""A site over a real SSH with a real Slurm: a folder without sbatch, a job file of five lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import sshd
from cluster import until
from jobs import ROOT, WAIT_S, User
from sshd import Sshd

from launcher.spec.site_files import VARIABLE

pytestmark = pytest.mark.timeout(400)

JOB = """\
name: tune
command: train.py --lr 3e-4
cluster: {nodes: 2}
env: {variables: {GREETING: it's "me" $(id)}}
"""
SCRIPT = """\
import os, sys, time
print("rank", os.environ["RANK"], sys.argv[1:], os.environ["GREETING"], flush=True)
while not os.path.exists("{stop}"):
    time.sleep(0.1)
"""


def test_a_job_file_of_five_lines_runs_on_a_cluster_elsewhere(slurm, tmp_path, monkeypatch, capfd):
    sshd.install()
    host, stop = Sshd(tmp_path / "ssh"), tmp_path / "stop"
    path = slurm.env(OMP_NUM_THREADS="1")["PATH"]
    program = host.put_holdfast(sys.executable, ROOT, tmp_path / "there", PATH=path)
    (tmp_path / "sites.yaml").write_text(
        f"alps:\n  ssh: login\n  folder: work\n  holdfast: {program}\n  target: slurm\n"
        "  defaults:\n"
        "    cluster: {gpus_per_node: 1, gpu: cpu}\n"
        "    elastic: {join_timeout_s: 60, hang_ceiling_s: 60, start_ceiling_s: 120}\n"
        "    slurm: {time: 30}\n"
    )
    monkeypatch.setenv(VARIABLE, str(tmp_path / "sites.yaml"))
    monkeypatch.setenv("PATH", str(host.bin))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("job.yaml").write_text(JOB)
    Path("train.py").write_text(SCRIPT.format(stop=stop))
    Path('it\'s a "file".txt').write_text("x")
    asked = User(capfd)

    def state(run):
        return asked.json("status", run, "--site", "alps")["state"]

    for run in ("one", "two"):
        asked("submit", "job.yaml", "--site", "alps", "--run-dir", f"runs/{run}")
    run = tmp_path / "there/work/runs/one"
    assert json.loads((run / "job.json").read_text())["name"] == "tune"
    (frozen,) = (run / "code").glob("*/")
    assert (frozen / 'it\'s a "file".txt').read_text() == "x"

    def printed():
        lines = asked("logs", "one", "--site", "alps", "--rank", "0")[0]
        return "rank 0 ['--lr', '3e-4'] it's \"me\" $(id)" in lines

    until("the script's line", printed, timeout_s=WAIT_S, every_s=0.5)
    asked("shell", "one", "--node", "n1", "--site", "alps", "--", "sh", "-c", "exit 7", code=7)
    asked("cancel", "two", "--site", "alps")
    until("two is cancelled", lambda: state("two") == "cancelled", timeout_s=WAIT_S)
    stop.touch()
    until("one is done", lambda: state("one") == "done", timeout_s=WAIT_S, every_s=0.5)
    assert asked.json("why", "one", "--site", "alps")["state"] == "done"
    rows = asked.json("list", "--site", "alps")
    assert {Path(row["run"]).name: row["state"] for row in rows} == {
        "one": "done",
        "two": "cancelled",
    }
