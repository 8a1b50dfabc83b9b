"""`submit --to local`: a run in the background of this machine, seen by the same commands."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli.main import run_cli
from launcher.platforms.background import read_mark

ROOT = Path(__file__).parents[2]
JOB = """\
name: small
model: {num_layers: 1, dim: 32, num_heads: 2, num_kv_heads: 1, ffn_dim: 64, vocab_size: 256}
layout: {dp: auto}
cluster: {nodes: 1, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 2, steps: 100000, precision: fp32, recompute: none}
data: {path: corpus}
checkpoint: {every_s: null}
elastic: {start_ceiling_s: 120}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("corpus").write_text("some text for a small model\n" * 400)
    Path("job.yaml").write_text(JOB)
    path = tmp_path / "runs" / "one"
    yield path
    mark = read_mark(path)
    if mark is not None and mark.lives:
        os.kill(mark.pid, signal.SIGKILL)  # agents die with their launcher


def status(capsys):
    capsys.readouterr()
    assert run_cli(["status", "one", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def until(condition, what, timeout_s=150.0):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.2)
    return found


@pytest.mark.timeout(300)
def test_a_run_in_the_background_is_watched_looked_into_saved_and_continued(run, capsys):
    assert run_cli(["submit", "job.yaml", "--to", "local", "--run-dir", str(run)]) == 0
    until(lambda: status(capsys)["training"]["step"] >= 3, "three steps")
    now = status(capsys)
    assert (now["state"], now["target"]) == ("running", "local")
    assert run_cli(["submit", "--resume", "one"]) == 2
    assert "HF615" in capsys.readouterr().err
    assert run_cli(["stacks", "one", "--rank", "0", "--json"]) == 0
    (worker,) = json.loads(capsys.readouterr().out)["workers"]
    assert (worker["rank"], worker["node"]) == (0, "node0")
    assert "trainer.py" in worker["text"]
    said = "echo $HOLDFAST_RUN_DIR $HOLDFAST_WORKER_PID; exit 7"
    shell = [sys.executable, "-m", "launcher.cli.main", "shell", "one", "--rank", "0"]
    done = subprocess.run(
        [*shell, "--", "sh", "-c", said],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (7, [str(run), str(worker["pid"])])
    assert run_cli(["stacks", "one", "--rank", "5"]) == 2
    assert "HF662" in capsys.readouterr().err
    assert run_cli(["cancel", "one", "--save"]) == 0
    out, err = capsys.readouterr()
    assert "asking job local-" in err
    saved = status(capsys)
    assert f"step {saved['training']['saved_step']}" in out
    assert (saved["state"], saved["platform"]["code"]) == ("saved", 91)
    assert run_cli(["stacks", "one"]) == 2
    assert "HF662" in capsys.readouterr().err
    assert run_cli(["why", "one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "saved"

    assert run_cli(["submit", "--resume", "one"]) == 0
    step = saved["training"]["saved_step"]
    until(lambda: status(capsys)["training"]["step"] > step, "a step after the saved one")
    assert run_cli(["restart", "one", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["requeued"], again["done"]) == (False, False)
    assert again["job_id"] not in {now["job_id"], None}
    assert again["saved_step"] > step
    until(lambda: status(capsys)["training"]["step"] > again["saved_step"], "a step after that")
    assert run_cli(["cancel", "one"]) == 0
    assert run_cli(["restart", "one"]) == 2
    assert "HF662" in capsys.readouterr().err
    assert run_cli(["logs", "one"]) == 0
    out = capsys.readouterr().out
    assert f"from step {step} " in out
    assert "node0/0: -- step 1, loss " in out


@pytest.fixture
def small_disk(tmp_path):
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_full_disk_is_told_everywhere(run, capsys, small_disk):
    sets = ("checkpoint.every_steps=5", f"checkpoint.dir={small_disk}/ck")
    options = [word for text in sets for word in ("--set", text)]
    assert run_cli(["submit", "job.yaml", "--to", "local", *options, "--run-dir", str(run)]) == 0

    def told():
        return {finding["kind"]: finding["text"] for finding in status(capsys)["findings"]}

    text = until(lambda: told().get("saves_fail"), "a failed save is told")
    no_space = os.strerror(errno.ENOSPC)
    assert no_space in text
    assert "disk_full" in told()
    assert run_cli(["why", "one"]) == 0
    assert no_space in capsys.readouterr().out
    assert run_cli(["logs", "one"]) == 0
    assert no_space in capsys.readouterr().err
    assert run_cli(["list"]) == 0
    assert no_space in capsys.readouterr().out

    remount = ["mount", "-o", "remount,size=64m", str(small_disk)]
    subprocess.run(remount, check=True)
    until(lambda: not told(), "there is room again, and the next save is good")
    assert status(capsys)["training"]["saved_step"] >= 5
    assert run_cli(["cancel", "one"]) == 0


def test_what_cannot_run_here_is_refused_and_leaves_nothing(run, capsys):
    options = ["--set", "cluster.gpu=H100-80GB-SXM", "--run-dir", str(run)]
    assert run_cli(["submit", "job.yaml", "--to", "local", *options]) == 2
    assert "HF205" in capsys.readouterr().err
    sweep = ["--sweep", "train.seed=1,2", "--run-dir", str(run)]
    assert run_cli(["submit", "job.yaml", "--to", "local", *sweep]) == 2
    assert "HF205 --sweep" in capsys.readouterr().err
    assert not run.parent.exists()
