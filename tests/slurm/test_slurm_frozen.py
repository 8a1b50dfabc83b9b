"""What was submitted runs, also after a requeue; and people can look at it while it does."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
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
with (run / f"said-{rank}").open("a") as said:
    said.write(f"{helper.VERSION} {helper.__file__}\\n")

def waiting_for_the_end():
    while not (run / "finish").exists():
        time.sleep(0.05)

waiting_for_the_end()
"""


def holdfast(slurm, *args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", *args],
        cwd=cwd,
        env=slurm.env(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", HOLDFAST_BEAT_S="0.5"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def said(run, count):
    """Return what rank 0 has said, once it has started `count` times."""
    path = run / "said-0"

    def lines():
        found = path.read_text().splitlines() if path.exists() else []
        return found if len(found) >= count else None

    return until(f"start {count} of rank 0", lines, timeout_s=WAIT_S)


@pytest.mark.timeout(500)
def test_a_requeued_job_runs_the_code_that_was_submitted(slurm):
    folder = slurm.dir / "proj"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "helper.py").write_text("VERSION = 'old'\n")
    done = holdfast(slurm, "submit", "job.yaml", "--run-dir", "runs/r", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    job, run = json.loads(done.stdout)["job_id"], folder / "runs" / "r"
    copy = json.loads((run / "code.json").read_text())["dir"]
    assert said(run, 1) == [f"old {copy}/helper.py"]

    until("rank 1", (run / "said-1").exists, timeout_s=WAIT_S)
    done = holdfast(slurm, "stacks", "runs/r", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    workers = json.loads(done.stdout)["workers"]
    assert [worker["rank"] for worker in workers] == [0, 1]
    assert all("waiting_for_the_end" in worker["text"] for worker in workers), workers
    assert len({worker["host"] for worker in workers}) == 2

    asked = ("shell", "runs/r", "--rank", "1", "--", "sh", "-c")
    done = holdfast(slurm, *asked, "hostname; cat /proc/$HOLDFAST_WORKER_PID/comm", cwd=folder)
    assert done.stdout.splitlines()[0] == workers[1]["host"], done.stderr
    assert "python" in done.stdout.splitlines()[1]

    (folder / "helper.py").write_text("VERSION = 'new'\n")
    slurm.run("scontrol", "requeue", job)
    assert said(run, 2) == [f"old {copy}/helper.py"] * 2
    (run / "finish").touch()
    ended = slurm.wait_state(job, "COMPLETED", timeout_s=WAIT_S)
    assert ended.restarts == 1
    loose = [
        str(path)
        for path in (run, *run.rglob("*"))
        if path.lstat().st_mode & 0o027 and not path.is_symlink() and path.name != "finish"
    ]
    assert loose == []


STAGED = """\
import os, sys
from pathlib import Path
import staged_mark

Path(sys.argv[1], "said-" + os.environ["RANK"]).write_text(f"{sys.prefix} {staged_mark.__file__}")
"""


@pytest.mark.timeout(400)
def test_nodes_start_from_their_own_copy_of_the_environment(slurm):
    folder, disk = slurm.dir / "staged", slurm.dir / "disk"
    venv = folder / "my env"
    folder.mkdir()
    make = [sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(venv)]
    subprocess.run(make, check=True, timeout=100)
    (site,) = venv.glob("lib/python3*/site-packages")
    # torch need not be copied for this test: it is found where the tests have it.
    (site / "rest.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{ROOT}\n")
    (site / "staged_mark.py").write_text("")
    code = folder / "code"
    code.mkdir()
    (code / "train.py").write_text(STAGED)
    job = JOB.replace(
        "slurm:", f"code: {{dir: code}}\nenv: {{venv: my env, stage: {disk}}}\nslurm:"
    )
    (folder / "job.yaml").write_text(job)
    done = holdfast(slurm, "submit", "job.yaml", "--run-dir", "runs/r", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr + done.stdout
    run = folder / "runs" / "r"
    (site / "later.py").write_text("changed after it was submitted")
    slurm.wait_state(json.loads(done.stdout)["job_id"], "COMPLETED", timeout_s=WAIT_S)
    (copy,) = [path for path in disk.iterdir() if path.is_dir()]
    for rank in (0, 1):
        prefix, mark = (run / f"said-{rank}").read_text().rsplit(" ", 1)
        assert prefix == str(copy)
        assert Path(mark).is_relative_to(copy)
    assert not list(copy.glob("lib/*/site-packages/later.py"))
    told = [
        json.loads(line)
        for path in (run / "events").glob("staging-*.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert sorted(event["how"] for event in told) == ["found", "unpacked"]
