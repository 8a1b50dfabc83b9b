"""The trainer beside a device that copies its snapshots late."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from pathlib import Path

import harness
import pytest
import torch
from harness import Run, make_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.state.offload import HOST
from elastic_trainer.state.snapshots.peer import KeeperAddress, write_peers
from elastic_trainer.train import session
from elastic_trainer.worker.secret import make_secret

LATE_S = 0.5
"""What a device that nobody waits for takes for a copy; a step takes milliseconds."""
WAITS = "TEST_WAITS"


class LateCopies:
    """Copies parameters and moments when told to wait, or else long after the next step."""

    pin, unpin = HOST.pin, HOST.unpin

    def copy(self, targets, sources):
        host = [source.dtype != torch.float32 or source.dim() == 0 for source in sources]
        pairs = list(zip(targets, sources, host, strict=True))
        HOST.copy(*zip(*((t, s) for t, s, here in pairs if here), strict=True))
        return LateCopy(*zip(*((t, s) for t, s, here in pairs if not here), strict=True))


class LateCopy:
    def __init__(self, targets, sources):
        self._pairs = targets, sources
        self._then = [source.clone() for source in sources]
        self._lock, self._copied = threading.Lock(), threading.Event()

    def wait(self):
        with self._lock:
            if not self._copied.is_set():
                HOST.copy(*self._pairs)
                same = all(map(torch.equal, self._pairs[0], self._then))
                os.write(1, b"same\n" if same else b"another\n")
                self._copied.set()

    def synchronize(self):
        if not self._copied.wait(LATE_S):
            self.wait()


def work(env, log):
    session.offload_of = lambda _: LateCopies()
    if not env[WAITS]:
        session.CheckpointManager.before_update = lambda _: None
    harness._work(env, log)


@pytest.fixture
def memory():
    path = Path(tempfile.mkdtemp(prefix="holdfast-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def compared(run, memory, *, waits):
    """Train; return how each snapshot compares with the state when it was taken."""
    make_secret(run.path)
    write_peers(
        run.path / "peers.json", [KeeperAddress(node="n0", address="127.0.0.1", port=0)], *[()] * 3
    )
    _, (env,) = run.publish(1, 1)
    env |= {
        "HOLDFAST_SNAPSHOTS": str(memory),
        "HOLDFAST_SECRET_DIR": str(run.path),
        "HOLDFAST_PEERS": str(run.path / "peers.json"),
        WAITS: "yes" if waits else "",
    }
    log = run.path / "logs" / "worker"
    worker = harness._SERVER.Process(target=work, args=(env, log))
    worker.start()
    try:
        worker.join(harness.DEADLINE_S)
        assert worker.exitcode == 0, log.read_text()
    finally:
        worker.kill()
        worker.join()
    lines = log.read_text().splitlines()
    return [line for line in lines if line in ("same", "another")]


@pytest.mark.parametrize("waits", [True, False])
def test_the_optimizer_waits_for_a_copy_under_way(waits, tmp_path, memory):
    config = make_config(tmp_path, ParallelLayout(), checkpoint={"memory_every_steps": 1})
    found = compared(Run(tmp_path, config), memory, waits=waits)
    assert len(found) >= (3 if waits else 1), found
    assert ("another" in found) is not waits, found
