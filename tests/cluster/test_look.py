"""`holdfast stacks` and `holdfast shell` on a run of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOB = """\
name: look
command: [train.py, "{run_dir}"]
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
"""
SCRIPT = """\
import os, sys, time
from pathlib import Path
run = Path(sys.argv[1])
(run / f"up-{os.environ['RANK']}").touch()

def waiting_for_the_end():
    while not (run / "finish").exists():
        time.sleep(0.05)

waiting_for_the_end()
"""


def holdfast(*args, cwd):
    return subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", *args],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.timeout(240)
def test_workers_of_a_running_job_are_looked_at(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(SCRIPT)
    run = tmp_path / "r"
    done = holdfast("submit", "job.yaml", "--to", "local", "--run-dir", "r", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    try:
        deadline = time.monotonic() + 100
        while not all((run / f"up-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline, holdfast("describe", "r", cwd=tmp_path).stdout
            time.sleep(0.1)
        done = holdfast("stacks", "r", "--rank", "1", "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (worker,) = json.loads(done.stdout)["workers"]
        assert (worker["rank"], worker["node"]) == (1, "node1")
        assert "waiting_for_the_end" in worker["text"]
        said = "echo $HOLDFAST_RUN_DIR $HOLDFAST_WORKER_PID; exit 7"
        done = holdfast("shell", "r", "--rank", "1", "--", "sh", "-c", said, cwd=tmp_path)
        assert (done.returncode, done.stdout.split()) == (7, [str(run), str(worker["pid"])])
        done = holdfast("stacks", "r", "--rank", "5", cwd=tmp_path)
        assert done.returncode == 2
        assert "HF662 rank 5 does not run now; ranks 0 to 1 run" in done.stderr
    finally:
        (run / "finish").touch()
        deadline = time.monotonic() + 60
        while (run / "launcher.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    done = holdfast("stacks", "r", cwd=tmp_path)
    assert (done.returncode, "HF662" in done.stderr) == (2, True)
