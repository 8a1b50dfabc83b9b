"""What was submitted runs, also after a requeue; and people can look at it while it does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import until

ROOT = Path(__file__).parents[2]
WAIT_S = 150.0
JOB = """\
name: frozen
command: [train.py, "{run_dir}"]
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
elastic: {min_nodes: 1, join_timeout_s: 60}
slurm: {partition: main, time: 30, shutdown_s: 60, signal_lead_s: 200, umask: "0027"}
"""
SCRIPT = """\
import os, sys, time
from pathlib import Path
import helper

run, rank = Path(sys.argv[1]), os.environ["RANK"]
print("started", helper.VERSION, flush=True)
with (run / f"said-{rank}").open("a") as said:
    said.write(f"{helper.VERSION} {helper.__file__}\\n")

def waiting_for_the_end():
    while not (run / "finish").exists():
        time.sleep(0.05)

waiting_for_the_end()
"""


def start(slurm, *args, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", *args],
        cwd=cwd,
        env=slurm.env(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HOLDFAST_BEAT_S="0.5"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def holdfast(slurm, *args, cwd):
    """Run a command to its end; return its exit code, stdout and stderr."""
    with start(slurm, *args, cwd=cwd) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def said(run, count):
    """Return what rank 0 has said, once it has started `count` times."""
    path = run / "said-0"

    def lines():
        found = path.read_text().splitlines() if path.exists() else []
        return found if len(found) >= count else None

    return until(f"start {count} of rank 0", lines, timeout_s=WAIT_S)


@pytest.mark.timeout(500)
def test_a_requeued_job_runs_the_code_that_was_submitted_and_is_followed(slurm):
    folder = slurm.dir / "proj"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("VERSION = 'old'\n")
    code, out, err = holdfast(
        slurm, "submit", "job.yaml", "--run-dir", "runs/r", "--json", cwd=folder
    )
    assert code == 0, err + out
    job, run = json.loads(out)["job_id"], folder / "runs" / "r"
    copy = json.loads((run / "code.json").read_text())["dir"]
    follower = start(slurm, "logs", "runs/r", "-f", cwd=folder)
    try:
        assert said(run, 1) == [f"old {copy}/helper.py"]
        until("rank 1", (run / "said-1").exists, timeout_s=WAIT_S)
        look_inside(slurm, folder)

        (folder / "helper.py").write_text("VERSION = 'new'\n")
        slurm.run("scontrol", "requeue", job)
        assert said(run, 2) == [f"old {copy}/helper.py"] * 2
        (run / "finish").touch()
        ended = slurm.wait_state(job, "COMPLETED", timeout_s=WAIT_S)
        assert ended.restarts == 1
        out, err = follower.communicate(timeout=60)
    finally:
        follower.kill()
        follower.communicate()
    assert out.count("started old") == 2, out + err
    assert any(f"-- attempt {job}.1" in line for line in out.splitlines()), out
    loose = [
        str(path)
        for path in (run, *run.rglob("*"))
        if path.lstat().st_mode & 0o027 and not path.is_symlink() and path.name != "finish"
    ]
    assert loose == []


def look_inside(slurm, folder):
    code, out, err = holdfast(slurm, "stacks", "runs/r", "--json", cwd=folder)
    assert code == 0, err + out
    workers = json.loads(out)["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert all("waiting_for_the_end" in worker["text"] for worker in workers), workers
    assert len({worker["host"] for worker in workers}) == 2

    inside = "hostname; cat /proc/$HOLDFAST_WORKER_PID/comm"
    asked = ("shell", "runs/r", "--rank", "1", "--", "sh", "-c", inside)
    _, out, err = holdfast(slurm, *asked, cwd=folder)
    assert out.splitlines()[:2] == [workers[1]["host"], "holdfast-worker"], err
