"""A live `holdfast run` that a test strikes by hand, and what its record says meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tiny_run import event_files, pids_of

from elastic_trainer.record.events import Event

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
STEADY_STEP = 40


class LiveRun:
    """A live `holdfast run`, of three nodes unless `sets` says otherwise.

    Args:
        folder: where the job file and the run directory go.
        sets: arguments of `--set`.
        options: more arguments of the command.
        env: variables on top of the test's own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sets: Sequence[str] = (),
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.path = folder / "run"
        (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
        (folder / "job.yaml").write_text(JOB)
        command = [sys.executable, "-m", "launcher.cli.main", "run", str(folder / "job.yaml")]
        command += [part for each in sets for part in ("--set", each)]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, "--run-dir", str(self.path), "--json", *options],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdout=self.log,
            stderr=self.log,
        )

    def events(self, name: str | None = None, epoch: int | None = None) -> list[Event]:
        found = []
        for path in event_files(self.path):
            found += [e for line in path.read_text().splitlines() if (e := Event.decode(line))]
        found.sort(key=lambda event: event.t_unix)
        return [e for e in found if name in (None, e.event) and epoch in (None, e.epoch)]

    def until(self, true: Callable[[], object], what: str, within_s: float = 220.0) -> float:
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
        started = self.events("workers.started", epoch)
        (pid,) = (pid for e in started for one, pid in pids_of(e.fields).items() if one == rank)
        return pid

    def agents(self) -> dict[str, int]:
        return {str(e.node): int(e.fields["pid"]) for e in self.events("agent.started")}

    def stepped_after(self, epoch: int) -> Callable[[], bool]:
        return lambda: any((e.epoch or 0) > epoch for e in self.events("step.completed"))

    def finish(self) -> dict[str, Any]:
        """Have the run save and end, as Ctrl-C does; return its summary."""
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)
        return json.loads((self.path / "summary.json").read_text())

    def close(self) -> None:
        """Leave no process of it."""
        for agent in self.agents().values():
            with contextlib.suppress(FileNotFoundError):
                signal_all(family(agent), signal.SIGKILL)
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


@contextlib.contextmanager
def live_run(folder: Path, **settings: Any) -> Iterator[LiveRun]:
    """Start a run; whatever is left of it at the end is killed."""
    run = LiveRun(folder, **settings)
    try:
        yield run
    finally:
        run.close()


def family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(FileNotFoundError):  # it has ended
            for task in list(Path(f"/proc/{parent}/task").iterdir()):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # so has this
                    found += map(int, (task / "children").read_text().split())
    return found


def alive(pid: int) -> bool:
    """Whether a process has not ended. Of one that has, its new parent may take note late."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
