"""An agent's directory in memory is its own, and a dead agent's memory comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from elastic_trainer.agent.workers.environment import Scratch

HOLD = """
import sys, pathlib
from elastic_trainer.agent.workers.environment import Scratch
scratch = Scratch("other", "node9", root=pathlib.Path(sys.argv[1]))
print(scratch.path, flush=True)
sys.stdin.read()
"""


def test_a_scratch_is_private_and_removed(tmp_path: Path) -> None:
    scratch = Scratch("run", "node", root=tmp_path)
    assert scratch.path.parent == tmp_path
    assert scratch.path.name.startswith("holdfast-run-node-")
    for path in (scratch.path, scratch.snapshots):
        assert path.stat().st_mode & 0o777 == 0o700
    scratch.remove()
    assert list(tmp_path.iterdir()) == []


def test_only_dead_agents_directories_are_removed(tmp_path: Path) -> None:
    stranger = tmp_path / "holdfast-of-somebody"
    stranger.mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert holder.stdout is not None
        theirs = Path(holder.stdout.readline().strip())
        first = Scratch("run", "node", root=tmp_path)
        assert theirs.exists(), "its owner lives"
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        second = Scratch("run", "node", root=tmp_path)
        assert not theirs.exists(), "its owner is dead"
        assert first.path.exists()
        assert stranger.exists()
        first.remove()
        second.remove()
    finally:
        holder.kill()
        holder.communicate()


def test_a_root_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    scratch = Scratch("run", "node", root=tmp_path / "missing")
    try:
        assert scratch.path.is_dir()
    finally:
        scratch.remove()
