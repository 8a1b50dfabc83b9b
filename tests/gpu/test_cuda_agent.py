"""A whole node with one GPU: agent, zygote, worker; and a worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness import SHAPE, Run, make_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.events import Event

ROOT = Path(__file__).parents[2]
DEVICE = "cuda"
DEADLINE_S = 90.0


def make_run(path, steps):
    """A job that saves every twentieth step; its rate does not depend on the last one."""
    path.mkdir()
    rate = {"lr": 1e-3, "warmup_steps": 0, "min_lr_ratio": 1.0}
    saves = {"every_steps": 20}
    sizes = {"global_batch": 8, "micro_batch": 2, "steps": steps}
    layout = ParallelLayout()
    config = make_config(
        path, layout, model=SHAPE, optimizer=rate, checkpoint=saves, device=DEVICE, **sizes
    )
    return Run(path, config)


@contextmanager
def agent(run):
    """The node's agent on `run`; killed at the end, and zygote and worker with it."""
    command = [sys.executable, "-P", "-m", "elastic_trainer.agent", "--run-dir", str(run.path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--node", "n1", "--local-addr", "127.0.0.1", "--job", run.path.name], env=env
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def events(run, name):
    """Events by now; a line that is being written comes another time."""
    found = []
    for path in (run.path / "events").glob("*.jsonl"):
        found += [Event.decode(line) for line in path.read_text().splitlines()]
    return [event for event in found if event is not None and event.event == name]


def until(what, condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {DEADLINE_S} s"
        time.sleep(0.01)
    return found


def children(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def has_context(pid):
    """Whether the process has a CUDA context; counting devices does not open this one."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(str(link.readlink()) == "/dev/nvidia-uvm" for link in links if link.is_symlink())


@pytest.mark.timeout(240)
def test_a_killed_worker_comes_back_bit_for_bit_and_only_workers_hold_the_gpu(tmp_path):
    steps = 300  # enough for the kill to come in time
    with agent(plain := make_run(tmp_path / "plain", steps)) as process:
        assert process.wait(DEADLINE_S) == 0
    with agent(run := make_run(tmp_path / "killed", steps)) as process:
        until("a save", lambda: len(run.commits()) >= 1)
        (zygote,) = (pid for pid in children(process.pid) if children(pid))
        (worker,) = children(zygote)
        holders = {pid: has_context(pid) for pid in (process.pid, zygote, worker)}
        os.kill(worker, signal.SIGKILL)
        assert process.wait(DEADLINE_S) == 0
    assert holders == {process.pid: False, zygote: False, worker: DEVICE == "cuda"}
    epochs = [event.epoch for event in events(run, "trainer.started")]
    assert epochs == [1, 2]
    (resumed,) = (e for e in events(run, "trainer.started") if e.epoch == 2)
    assert resumed.fields["restored_from"] == "storage"
    assert run.curve() == plain.curve()
    ours, theirs = run.tensors(), plain.tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (steps, 0, 0)
