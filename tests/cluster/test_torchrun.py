"""Plain `torchrun --rdzv-backend holdfast`: our membership, secret included, behind torchrun."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
assert os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True"  # no port is chosen, then lost
dist.init_process_group("gloo")
total = torch.tensor([1.0])
dist.all_reduce(total)
open(os.path.join(sys.argv[1], f"said-{dist.get_rank()}"), "w").write(f"{total.item():g}")
dist.barrier()
dist.destroy_process_group()
"""


LOOP = """
import os, sys, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
with open(os.path.join(sys.argv[1], "started"), "a") as file:
    file.write(f"{dist.get_world_size()} {dist.get_rank()} {os.getpid()} {os.getppid()}\\n")
while True:
    stop = torch.tensor([float(os.path.exists(os.path.join(sys.argv[1], "stop")))])
    dist.all_reduce(stop)
    if stop.item():
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


def torchrun(folder: Path, *options: str, nodes: int | str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), *options]
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


@dataclass(frozen=True)
class Worker:
    world: int
    rank: int
    pid: int
    agent: int


def started(folder: Path) -> list[Worker]:
    """Return all workers that have started, oldest first."""
    file = folder / "started"
    lines = file.read_text().splitlines() if file.exists() else []
    return [Worker(*map(int, line.split())) for line in lines]


def wait_for_world(folder: Path, world: int, *, after: int) -> list[Worker]:
    """Return the workers of a whole world of that size, all started after the first `after`."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = [worker for worker in started(folder)[after:] if worker.world == world][-world:]
        if sorted(worker.rank for worker in found) == list(range(world)):
            return found
        time.sleep(0.05)
    raise AssertionError(f"no world of {world}: {started(folder)}")


@pytest.mark.slow
def test_a_job_outlives_a_worker_and_its_first_node_and_grows(folder):
    """The first node holds the store under torchrun's own back end: there, its death ends all."""
    (folder / "script.py").write_text(LOOP)
    options = ("--max-restarts", "9", "--monitor-interval", "0.2")
    options += ("--rdzv-conf", "join_timeout=5,heartbeat=0.5,dead_after=3")
    agents = [torchrun(folder, *options, nodes="1:2")]
    try:
        wait_for_world(folder, 1, after=0)
        agents.append(torchrun(folder, *options, nodes="1:2"))
        both = wait_for_world(folder, 2, after=1)

        seen = len(started(folder))
        os.kill(both[1].pid, signal.SIGKILL)
        both = wait_for_world(folder, 2, after=seen)

        seen = len(started(folder))
        agents[0].kill()  # a node dies with all that runs there
        [its] = [worker for worker in both if worker.agent == agents[0].pid]
        os.kill(its.pid, signal.SIGKILL)
        [left] = wait_for_world(folder, 1, after=seen)
        assert left.agent == agents[1].pid

        seen = len(started(folder))
        agents.append(torchrun(folder, *options, nodes="1:2"))
        wait_for_world(folder, 2, after=seen)
        (folder / "stop").touch()
        for agent in agents[1:]:
            out, _ = agent.communicate(timeout=60)
            assert agent.returncode == 0, out
    finally:
        for agent in agents:
            agent.kill()
        for worker in started(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        for agent in agents:
            agent.communicate()  # ends once no worker holds its pipe
