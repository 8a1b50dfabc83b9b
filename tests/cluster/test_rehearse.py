"""`holdfast rehearse` for real: emulated nodes, processes that die, a disk that is full."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tiny_run import JOB, TEXT

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def save(*_):
    time.sleep(float(sys.argv[1]))
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
for _ in range(150):
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    time.sleep(0.02)
"""
SAVES = """\
name: saves
command: saves.py {save_s}
cluster: {{nodes: 2, gpus_per_node: 1, gpu: cpu}}
elastic: {{min_nodes: 1, stop_grace_s: 3}}
slurm: {{signal_lead_s: 300}}
"""


@contextlib.contextmanager
def rehearsing(folder, *words):
    command = [sys.executable, "-m", "launcher.cli.main", "rehearse", "job.yaml"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, "--folder", "rehearsal", *words],
        cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def rehearsed(folder, *words):
    with rehearsing(folder, *words, "--json") as process:
        out, err = process.communicate(timeout=200)
    return process.returncode, json.loads(out), err


def levels(answer):
    return {row["failing"]: row["level"] for row in answer["failures"]}


def saving_in(folder, save_s):
    (folder / "saves.py").write_text(SCRIPT)
    (folder / "job.yaml").write_text(SAVES.format(save_s=save_s))


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("save_s", "code", "level"), [(0.2, 0, "ok"), (30, 1, "fail")])
def test_a_save_that_is_too_slow_for_its_signal_is_found(tmp_path, save_s, code, level):
    saving_in(tmp_path, save_s)
    found, answer, err = rehearsed(tmp_path, "--only", "preemption")
    assert (found, levels(answer)) == (code, {"preemption": level}), (answer, err)
    assert (answer["folder"] is None) == (not (tmp_path / "rehearsal").exists()) == (code == 0)


@pytest.mark.timeout(60)
def test_a_lead_that_is_too_short_for_the_jobs_own_size_is_found(tmp_path):
    saving_in(tmp_path, 0.2)
    code, answer, err = rehearsed(
        tmp_path, "--only", "preemption", "--set", "slurm.signal_lead_s=5"
    )
    assert (code, levels(answer)) == (1, {"preemption": "fail"}), err
    assert "HF160" in answer["failures"][0]["text"]


@pytest.mark.timeout(100)
def test_a_full_disk_is_survived(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    job = JOB.format(layout="{dp: auto}", nodes=2, workers=1, steps=24)
    job += "checkpoint: {every_s: null, every_steps: 4}\n"
    job += "elastic: {min_nodes: 1, hang_ceiling_s: 30, start_ceiling_s: 60, join_timeout_s: 60}\n"
    (tmp_path / "job.yaml").write_text(job)
    code, answer, err = rehearsed(tmp_path, "--only", "disk-full")
    assert (code, answer["ok"]) == (0, True) or levels(answer) == {"disk-full": "not here"}, err
    assert os.strerror(errno.ENOSPC) not in json.dumps(answer)


@pytest.mark.timeout(60)
def test_an_interrupt_leaves_nothing(tmp_path):
    saving_in(tmp_path, 0.2)
    with rehearsing(tmp_path) as process:
        for line in process.stderr:
            if "rank-killed: running" in line:
                break
        deadline = time.monotonic() + 20
        while len(started := psutil.Process(process.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline, "the run does not start"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=40)
    assert process.returncode == 130
    _, left = psutil.wait_procs(started, timeout=20)
    assert not left
    assert not (tmp_path / "rehearsal").exists()


@pytest.mark.timeout(60)
def test_a_job_that_does_not_run_here_says_why(tmp_path):
    (tmp_path / "saves.py").write_text("import no_such_module\n")
    (tmp_path / "job.yaml").write_text(SAVES.format(save_s=0))
    code, answer, _ = rehearsed(tmp_path, "--only", "hang")
    assert (code, [each["code"] for each in answer["problems"]]) == (2, ["HF698"])
    assert "no_such_module" in answer["problems"][0]["message"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name", ["llama3-8b", "llama3-70b", "llama3-405b", "tiny-cpu", "ddp_tutorial", "own_loop"]
)
def test_examples_survive_every_failure(tmp_path, name):
    job = ROOT / "examples" / f"{name}.yaml"
    command = [sys.executable, "-m", "launcher.cli.main", "rehearse", str(job), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=880
    )
    answer = json.loads(ended.stdout)
    assert ended.returncode == 0, answer
    assert set(levels(answer).values()) <= {"ok", "not here"}, answer
