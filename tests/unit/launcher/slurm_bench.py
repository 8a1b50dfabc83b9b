"""Programs that stand in for Slurm's, a run submitted to them, and what its nodes write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, tree

from launcher.cli.main import run_cli
from launcher.record.files import LauncherLog

TINY = """\
name: a-job
model: tiny
layout: {dp: auto}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 128, global_batch: 24, micro_batch: 2, steps: 60, precision: fp32}
data: {path: corpus, format: text, tokenizer: bytes}
slurm: {partition: main, time: "60", save_s: 5}
"""


ASKED = """\
case "$*" in
  "show config") printf '%s\\n' 'ClusterName = c' 'AccountingStorageType = x/none' MORE; exit 0;;
  *partition) echo 'PartitionName=main Default=YES State=UP MaxNodes=1 MaxTime=10:00:00'; exit 0;;
esac
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Return a Slurm without jobs, in a folder with a job file."""
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("COLUMNS", "200")
    Path("corpus").write_text("some text\n" * 200)
    Path("job.yaml").write_text(TINY)
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def slurm(fresh):
    """Return one with the job of runs/one."""
    submit("--run-dir", "runs/one")
    return fresh


def submit(*options, code=0):
    assert run_cli(["submit", "job.yaml", "--to", "slurm", *options]) == code


def refused(capsys, *options, code=2):
    """Submit what leaves nothing behind; return what is said."""
    before = tree(".")
    submit(*options, code=code)
    assert tree(".") == before, "something was left behind"
    return capsys.readouterr().err


def asked(slurm, more="''"):
    """Let Slurm say that partition main gives a job one node; the job asks for two."""
    slurm.says("scontrol", then=ASKED.replace("MORE", more), code=1)


def cli(capsys, *words, code=0):
    capsys.readouterr()
    assert run_cli(list(words)) == code
    out, err = capsys.readouterr()
    return out, err


def as_json(capsys, *words, code=0):
    return json.loads(cli(capsys, *words, "--json", code=code)[0])


def trains(run="runs/one", *, attempt="17.0", steps=3, first=1, epoch=1, ends=None):
    """Write the record of an attempt that trains a few steps."""
    log = LauncherLog(Path(run), f"node-{attempt}")
    log.emit("run.started", attempt=attempt, nodes=2)
    members = [{"node": "n1"}, {"node": "n2"}]
    log.emit("epoch.formed", node="n1", epoch=epoch, members=members, spares=[], rung=2)
    log.emit("workers.started", node="n1", epoch=epoch, pids=[5], first_rank=0)
    for step in range(first, first + steps):
        log.emit(
            "step.completed", node="n1", rank=0, epoch=epoch, step=step, loss=2.5 - step / 10,
            tokens=3072, step_s=0.5,
        )  # fmt: skip
    log.emit("checkpoint.committed", node="n1", epoch=epoch, step=first + steps - 1, dir="x")
    if ends is not None:
        log.emit("job.stopped", node="n1", epoch=epoch, code=ends, reason="the test wants it")
    return log


def worker_fails(log, detail="RuntimeError: boom"):
    log.emit(
        "worker.exit", node="n2", epoch=1, worker_rank=1, local_rank=0, code=1, kind="crash",
        action="stop", detail=detail,
    )  # fmt: skip
    log.emit("job.stopped", node="n1", epoch=1, code=93, reason="it would fail again")
