"""Nobody is taken to hang while processors are scarce."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_run import live_run

SMALL = (
    "cluster.nodes=2",
    "train.seq_len=8",
    "train.global_batch=2",
    "model.num_layers=1",
    "model.dim=16",
    "model.ffn_dim=16",
    "elastic.hang_ceiling_s=300",
    "elastic.start_ceiling_s=300",
)
BUSY = "import os\nwhile os.getppid() == {parent}: sum(range(100_000))"


@contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep processors busy, at the same priority as whoever calls."""
    command = [sys.executable, "-c", BUSY.format(parent=os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(2_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)]),
        pytest.param(10_000, marks=[pytest.mark.exhaustive, pytest.mark.timeout(3600)]),
    ],
)
def test_no_false_alarm_in_real_steps_with_all_cores_oversubscribed(
    steps: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    sets = (*SMALL, f"train.steps={steps}", f"checkpoint.every_steps={steps // 5}")
    with busy_loops(6), live_run(tmp_path, sets=sets) as run:
        begin = time.monotonic()
        run.process.wait(3500)
        record_property("seconds", round(time.monotonic() - begin))
        record_property("nearly", len(run.events("worker.stalled")))
        assert run.process.returncode == 0
        assert len(run.events("step.completed")) == steps
        for name in ("worker.hung", "member.lost", "epoch.aborted"):
            assert not run.events(name), name
        assert len(run.events("epoch.formed")) == 1
