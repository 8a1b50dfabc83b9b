"""The emulated cluster is a Slurm of several nodes: what the other tests here rely on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import SlurmCluster, until


def write(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/bash\n{text}\n")
    return path


def test_a_job_runs_on_every_node_and_each_has_its_own_name_and_address(slurm, tmp_path):
    script = write(tmp_path / "job.sh", "srun sh -c 'hostname; ip -4 -br addr show eth0'")
    job = slurm.sbatch(script, "-N4", "--gpus-per-node=8", f"--output={tmp_path}/out")
    assert slurm.wait_state(job, "COMPLETED").nodes == "n[1-4]"
    said = (tmp_path / "out").read_text()
    for name in slurm.names:
        assert f"{name}\n" in said
        assert f"{slurm.address(name)}/24" in said


def test_a_node_without_power_is_silent_and_comes_back(slurm, tmp_path):
    name = slurm.names[-1]
    knock = ("timeout", "1", "bash", "-c", f"</dev/tcp/{slurm.address(name)}/6818")
    assert slurm.on("n1", *knock, check=False).returncode == 0
    slurm.power_off(name)
    assert slurm.on("n1", *knock, check=False).returncode != 0
    assert not slurm.is_up(name)
    slurm.power_on(name)
    slurm.wait_idle()
    script = write(tmp_path / "job.sh", "hostname")
    job = slurm.sbatch(script, "-w", name, f"--output={tmp_path}/out")
    slurm.wait_state(job, "COMPLETED")
    assert (tmp_path / "out").read_text() == f"{name}\n"


def test_what_a_killed_slurmd_has_started_goes_on(slurm, tmp_path):
    script = write(tmp_path / "job.sh", f"srun sh -c 'touch {tmp_path}/up; exec sleep 77'")
    slurm.sbatch(script, "-w", "n3", "--no-requeue", f"--output={tmp_path}/out")
    until("the step", (tmp_path / "up").exists, timeout_s=30)
    slurm.kill_slurmd("n3")
    assert slurm.on("n3", "pgrep", "-fx", "sleep 77").returncode == 0
    slurm.start_slurmd("n3")
    assert slurm.is_up("n3")


def test_a_second_cluster_stands_beside_the_first(slurm, tmp_path):
    with SlurmCluster(2) as other:
        job = other.sbatch(write(tmp_path / "job.sh", "srun hostname"), "-N2")
        other.wait_state(job, "COMPLETED")
        assert slurm.run("squeue", "-h").stdout == ""
    assert not other.dir.exists()
    slurm.wait_idle()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_its_process_is_interrupted_or_killed(slurm, number):
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cluster.py")), "1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        folder = process.stdout.readline().partition("=")[2].partition("/bin")[0]
        assert running_in(folder)
        process.send_signal(number)
        process.wait(timeout=30)
        until("all gone", lambda: not running_in(folder), timeout_s=10)
        assert Path(folder).exists() == (number == signal.SIGKILL)
    finally:
        process.kill()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def running_in(folder: str) -> list[str]:
    """Return the processes that have a cluster's directory in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"D={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.append(path.name)
        except OSError:
            continue  # it has just ended
    return [pid for pid in found if int(pid) != os.getpid()]
