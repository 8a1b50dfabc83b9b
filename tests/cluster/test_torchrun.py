"""Plain `torchrun --rdzv-backend holdfast`: our membership, secret included, behind torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0])
dist.all_reduce(total)
open(os.path.join(sys.argv[1], f"said-{dist.get_rank()}"), "w").write(f"{total.item():g}")
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(folder: Path, *, nodes: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    command += ["--nproc-per-node", "1", "--rdzv-backend", "holdfast", "--rdzv-id", "job1"]
    command += ["--rdzv-endpoint", str(folder / "board"), "--local-addr", "127.0.0.1"]
    return subprocess.Popen(
        [*command, str(folder / "script.py"), str(folder)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


def test_two_nodes_meet_by_the_board_and_its_secret(folder):
    agents = [torchrun(folder, nodes=2) for _ in range(2)]
    try:
        for agent in agents:
            out, _ = agent.communicate(timeout=100)
            assert agent.returncode == 0, out
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [(folder / f"said-{rank}").read_text() for rank in range(2)] == ["2", "2"]
    secret = folder / "board" / "job1" / "secret"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_a_secret_that_others_may_read_is_refused(folder):
    (folder / "board" / "job1").mkdir(parents=True)
    secret = folder / "board" / "job1" / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o644)
    with torchrun(folder, nodes=1) as agent:
        out, _ = agent.communicate(timeout=60)
    assert agent.returncode != 0
    assert "HF520" in out
    assert "mode 0644" in out
    assert "ab" * 32 not in out
