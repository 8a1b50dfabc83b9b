"""Hangs of real workers and nodes under `holdfast run`: found in seconds, the culprit named."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_trainer.events import Event

ROOT = Path(__file__).parents[2]
JOB = """\
name: hangs
model: {num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 1, ffn_dim: 64, vocab_size: 256}
layout: {dp: auto}
cluster: {nodes: 3, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 6, steps: 100000, precision: fp32, recompute: none}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 50, keep: 2}
elastic: {min_nodes: 1, hang_ceiling_s: 30, start_ceiling_s: 50, join_timeout_s: 40}
"""
pytestmark = pytest.mark.timeout(240)
STEADY_STEP = 40
FOUND_S = 6.0
"""What a loaded machine may take; benchmarks/hang.py measures the 3 s of a quiet one."""


class Run:
    """A live `holdfast run` of three nodes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        (folder / "job.yaml").write_text(JOB)
        command = [sys.executable, "-m", "launcher.cli.main", "run", str(folder / "job.yaml")]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(self.path), "--json"],
            cwd=ROOT,
            stdout=self.log,
            stderr=self.log,
        )

    def events(self, name: str | None = None, epoch: int | None = None) -> list[Event]:
        found = []
        for path in sorted((self.path / "events").glob("*.jsonl")):
            found += [e for line in path.read_text().splitlines() if (e := Event.decode(line))]
        found.sort(key=lambda event: event.t_unix)
        return [e for e in found if name in (None, e.event) and epoch in (None, e.epoch)]

    def until(self, true: Callable[[], object], what: str, within_s: float = 100.0) -> float:
        begin = time.monotonic()
        while not true():
            assert self.process.poll() is None, "the run has ended"
            assert time.monotonic() - begin < within_s, f"{what}: not within {within_s} s"
            time.sleep(0.02)
        return time.monotonic() - begin

    def until_steady(self, nodes: int = 3) -> int:
        """Wait for some steps of the newest epoch, of `nodes` nodes; return the epoch."""

        def steady() -> int:
            formed = self.events("epoch.formed")
            if not formed or len(formed[-1].fields["members"]) != nodes:
                return 0
            epoch = formed[-1].epoch or 0
            return epoch if len(self.events("step.completed", epoch)) >= STEADY_STEP else 0

        self.until(steady, f"no {STEADY_STEP} steps of {nodes} nodes")
        return steady()

    def pid_of(self, rank: int, epoch: int) -> int:
        (pid,) = (
            e.fields["pid"]
            for e in self.events("worker.started", epoch)
            if e.fields["worker_rank"] == rank
        )
        return int(pid)

    def agents(self) -> dict[str, int]:
        return {str(e.node): int(e.fields["pid"]) for e in self.events("agent.started")}

    def stepped_after(self, epoch: int) -> Callable[[], bool]:
        return lambda: any((e.epoch or 0) > epoch for e in self.events("step.completed"))


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    try:
        yield run
    finally:
        for agent in run.agents().values():
            with contextlib.suppress(FileNotFoundError):
                signal_all(family(agent), signal.SIGKILL)
        run.process.terminate()
        try:
            run.process.wait(10)
        except subprocess.TimeoutExpired:
            run.process.kill()
            run.process.wait()
        run.log.close()


def culprit(run: Run, epoch: int) -> Event:
    (hung,) = run.events("worker.hung", epoch)
    return hung


def test_a_stopped_worker_is_found_named_and_replaced(run: Run) -> None:
    epoch = run.until_steady()
    struck = time.time()
    os.kill(run.pid_of(1, epoch), signal.SIGSTOP)
    took = run.until(run.stepped_after(epoch), "no step after the hang")
    hung = culprit(run, epoch)
    assert (hung.fields["worker_rank"], hung.fields["state"]) == (1, "T")
    assert "its process is stopped" in hung.fields["detail"]
    assert hung.t_unix - struck < FOUND_S
    assert took < FOUND_S + 6
    (formed,) = run.events("epoch.formed", epoch + 1)
    assert len(formed.fields["members"]) == 3  # the node is as good as before
    run.until(lambda: len(run.events("stacks.dumped", epoch)) == 3, "no stacks")
    texts = {
        path.name: path.read_text() for path in (run.path / "stacks" / str(epoch)).glob("*.txt")
    }
    assert sorted(texts) == ["rank0.txt", "rank1.txt", "rank2.txt"]
    assert "State T (stopped)" in texts["rank1.txt"]
    for rank in (0, 2):
        assert "trainer.py" in texts[f"rank{rank}.txt"]
        flight = json.loads(
            (run.path / "stacks" / str(epoch) / f"rank{rank}.flight.json").read_text()
        )
        assert flight["entries"]
    for dumped in run.events("stacks.dumped", epoch):
        assert dumped.fields["seconds"] < 1.5


def test_a_stopped_node_is_left_out_and_rejoins_when_it_goes_on(run: Run) -> None:
    epoch = run.until_steady()
    (formed,) = run.events("epoch.formed", epoch)
    coordinator = formed.fields["coordinator"]
    node = next(name for name in sorted(run.agents()) if name != coordinator)
    pids = family(run.agents()[node])
    signal_all(pids, signal.SIGSTOP)
    took = run.until(run.stepped_after(epoch), "no step without the node")
    assert took < FOUND_S + 6
    (lost,) = run.events("member.lost")
    assert lost.fields["member"] == node
    run.until_steady(2)
    before = len(run.events("member.joined"))
    signal_all(pids, signal.SIGCONT)
    assert run.until(lambda: len(run.events("member.joined")) > before, "not back") < 8
    run.until_steady(3)
