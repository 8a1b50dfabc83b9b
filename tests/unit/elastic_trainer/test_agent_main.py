"""Whole agents as processes: board, membership, zygote, torch process groups. No trainer."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_zygote as t
from tiny_run import event_files

from elastic_trainer.record.events import Event

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
START_DEADLINE_S = 240.0
"""Three agents and three zygotes import torch: 6 s on two idle cores, 45 s measured at load 15."""

SCRIPT = """
import os, resource, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
assert "OMP_NUM_THREADS" not in os.environ  # as under torchrun with one worker a node
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
assert soft == 512 < hard  # as it was started, though its agent has raised its own
here, epoch = Path(sys.argv[1]), os.environ["HOLDFAST_EPOCH"]
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
Path(here / f"{epoch}.{dist.get_rank()}").write_text(f"{dist.get_world_size()} {total.item():g}")
while not (here / "stop").exists():
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""


class Cluster:
    """Agents of emulated nodes, one process each."""

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.shared = tmp_path / "shared" / tmp_path.name
        (tmp_path / "script.py").write_text(SCRIPT)

    def start(self, num: int) -> None:
        env = t.base_env()
        del env["OMP_NUM_THREADS"]
        for index in range(1, num + 1):
            node = f"n{index}"
            argv = ["--nnodes", f"1:{num}", "--rdzv-endpoint", str(self.tmp_path / "shared")]
            argv += ["--rdzv-id", self.tmp_path.name, "--node", node]
            argv += ["--local-addr", f"127.0.1.{index}"]
            command = ["/bin/sh", "-c", 'ulimit -Sn 512; exec "$0" "$@"']
            command += [sys.executable, "-P", "-m", "elastic_trainer.agent", *argv]
            self.agents[node] = subprocess.Popen(
                [*command, str(self.tmp_path / "script.py"), str(self.tmp_path)],
                env=env,
                cwd=self.tmp_path,
            )

    def events(self) -> list[Event]:
        found = []
        for path in event_files(self.shared):
            lines = path.read_text().splitlines()
            found += [event for line in lines if (event := Event.decode(line))]
        return sorted(found, key=lambda event: event.t_mono)

    def said(self, epoch: int) -> list[str]:
        return sorted(path.read_text() for path in self.tmp_path.glob(f"{epoch}.*"))

    def until_said(self, epoch: int, what: list[str], *, deadline_s: float = t.DEADLINE_S) -> None:
        t.until(
            lambda: self.said(epoch) == what,
            f"epoch {epoch} never said {what}",
            deadline_s=deadline_s,
        )

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        for scratch in Path("/dev/shm").glob(f"holdfast-{self.tmp_path.name}-*"):
            shutil.rmtree(scratch)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_a_script_lives_through_the_loss_of_a_worker_and_of_the_coordinator(
    cluster: Cluster,
) -> None:
    cluster.start(3)
    cluster.until_said(1, ["3 3"] * 3, deadline_s=START_DEADLINE_S)
    started = [event for event in cluster.events() if event.event == "workers.started"]
    assert {event.fields["how"] for event in started} == {"zygote"}
    os.kill(started[0].fields["pids"][0], signal.SIGKILL)
    cluster.until_said(2, ["3 3"] * 3)
    elected = [event for event in cluster.events() if event.event == "coordinator.elected"]
    assert len(elected) == 1
    workers = {
        pid
        for event in cluster.events()
        if event.event == "workers.started" and event.node == elected[0].node
        for pid in event.fields["pids"]
    }
    assert elected[0].node is not None
    cluster.agents[elected[0].node].kill()
    cluster.until_said(3, ["2 1"] * 2)
    t.until(lambda: all(t.gone(pid) for pid in workers), "workers outlived their agent")
    (cluster.tmp_path / "stop").touch()
    codes = {node: agent.wait(t.DEADLINE_S) for node, agent in cluster.agents.items()}
    assert codes.pop(elected[0].node) == -signal.SIGKILL
    assert list(codes.values()) == [0, 0]
    log = cluster.shared / "logs" / "0"
    assert sum(text.read_text().count("epoch 3 rank") for text in log.glob("*/*.log")) == 2


def test_a_broken_script_ends_the_job_with_93(cluster: Cluster) -> None:
    (cluster.tmp_path / "script.py").write_text("import no_such_module\n")
    cluster.start(2)
    codes = [agent.wait(START_DEADLINE_S) for agent in cluster.agents.values()]
    assert codes == [93, 93]
    exits = [event.fields for event in cluster.events() if event.event == "worker.exit"]
    details = [fields["detail"] for fields in exits]
    assert "ModuleNotFoundError: No module named 'no_such_module'" in details
