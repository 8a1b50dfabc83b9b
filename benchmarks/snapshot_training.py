"""The part of snapshot.py that trains: with a snapshot each step and with none, in turns."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, environment, say, table

from elastic_trainer.plan.models import ModelShape
from launcher.record.files import RunRecord

WARM_UP, WINDOW_S, START_S = 10, 20.0, 180.0
"""Steps, seconds measured, seconds until the warm-up is done at the latest."""
PAIRS, FIRST_BATCH, STEP_MS = 5, 24, 300.0
SHAPES = {
    "training": "num_layers: 4, dim: 160, num_heads: 4, num_kv_heads: 4, ffn_dim: 432",
    "stall": "num_layers: 4, dim: 1024, num_heads: 8, num_kv_heads: 8, ffn_dim: 3776",
    "reshard": "num_layers: 5, dim: 512, num_heads: 8, num_kv_heads: 4, ffn_dim: 1536",
    "small": "num_layers: 2, dim: 64, num_heads: 8, num_kv_heads: 4, ffn_dim: 192",
}
JOB = """
name: snapshot
model: {{{shape}, vocab_size: 512}}
layout: {{dp: auto}}
cluster: {{nodes: {nodes}, gpus_per_node: 1, gpu: cpu}}
train:
  {{seq_len: 128, global_batch: {batch}, micro_batch: {micro_batch}, steps: 1000000,
   precision: fp32, recompute: none}}
data: {{path: "{corpus}", format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, memory_every_steps: {every}}}
elastic: {{min_nodes: 1}}
"""


def write_job(folder: Path, shape: str, nodes: int, *, batch: int, every: int = 1) -> Path:
    """Write a job file."""
    job = folder / "job.yaml"
    corpus = ROOT / "examples" / "corpus"
    micro_batch = next(size for size in (4, 1) if batch % (size * nodes) == 0)
    text = JOB.format(
        shape=SHAPES[shape],
        nodes=nodes,
        batch=batch,
        micro_batch=micro_batch,
        corpus=corpus,
        every=every,
    )
    job.write_text(text, encoding="utf-8")
    return job


def middle(values: list[float], digits: int) -> float:
    """Return the median, rounded."""
    return round(statistics.median(values), digits)


def training(small: bool) -> tuple[str, dict[str, Any]]:
    """Train with and without snapshots, in turns."""
    batch = FIRST_BATCH
    if not small:  # the batch that makes steps of about STEP_MS here
        tried = one_training(0, batch, window_s=WINDOW_S / 2)
        batch = scaled_batch(batch, tried["step_ms"])
        say(f"training: {tried['step_ms']} ms a step, now with a batch of {batch}")
    runs: dict[int, list[dict[str, float]]] = {0: [], 1: []}
    for turn in range(1 if small else PAIRS):
        for every in (0, 1) if turn % 2 == 0 else (1, 0):
            runs[every].append(one_training(every, batch, small=small))
            say(f"training, memory_every_steps {every}: {runs[every][-1]}")
    rows, result = [], {}
    for key, unit in (("step_ms", "wall ms a step"), ("cpu_ms", "CPU ms a step, all nodes")):
        off, on = ([run[key] for run in runs[every]] for every in (0, 1))
        pairs = [b / a - 1.0 for a, b in zip(off, on, strict=True)]
        slower = round(statistics.median(pairs), 4)
        rows.append([unit, middle(off, 2), middle(on, 2), f"{slower:.1%}"])
        rows[-1] += [f"{min(pairs):.1%} to {max(pairs):.1%}"]
        result |= {f"{key}_off": middle(off, 2), f"{key}_on": middle(on, 2)}
        result["slowdown" if key == "step_ms" else "more_cpu"] = slower
    result["batch"] = batch
    result["state_mib"] = runs[1][0]["state_mib"]
    result["steps_committed"] = round(min(run["committed"] for run in runs[1]), 3)
    header = ["", "no snapshots", "one a step", "more (median of pairs)", "pairs"]
    text = table(header, rows) + (
        f"\n\n{result['state_mib']} MiB of state a worker; of the steps measured "
        f"{result['steps_committed']:.0%} or more were committed in memory."
    )
    return text, {"training": result}


def scaled_batch(batch: int, step_ms: float) -> int:
    """Return the batch, in whole micro-batches of both nodes, that takes about STEP_MS."""
    return max(8, round(batch * STEP_MS / step_ms / 8) * 8)


def one_training(
    every: int, batch: int, *, small: bool = False, window_s: float = WINDOW_S
) -> dict[str, float]:
    """Train for `window_s` past the warm-up; return wall and CPU time of a step."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    run_dir = folder / "run"
    shape = "small" if small else "training"
    command = [sys.executable, "-m", "launcher.cli.main", "run", "--quiet"]
    command += [
        str(write_job(folder, shape, 2, batch=batch, every=every)),
        "--run-dir",
        str(run_dir),
    ]
    window_s = 2.0 if small else window_s
    with subprocess.Popen(command, cwd=ROOT, env=environment()) as running:
        try:
            record = RunRecord(run_dir)
            first = wait_for_step(record, WARM_UP, running)
            begun, used_s = time.monotonic(), -tree_cpu_s(running.pid)
            begun_step = newest(record)
            time.sleep(window_s)
            used_s += tree_cpu_s(running.pid)
            record.poll()
            took_s, ended_step = time.monotonic() - begun, newest(record)
            running.send_signal(signal.SIGINT)
            running.wait(60)
        finally:
            if running.poll() is None:
                running.kill()
    done = {e.step: e.t_mono for e in record.events if e.event == "step.completed"}
    steps = sorted(step for step in done if begun_step <= step <= ended_step)
    between = [done[b] - done[a] for a, b in itertools.pairwise(steps)]
    committed = {e.step for e in record.events if e.event == "step.committed"}
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "step_ms": round(statistics.median(between) * 1e3, 2),
        "cpu_ms": round(used_s / max(1, ended_step - begun_step) * 1e3, 2),
        "mean_ms": round(took_s / max(1, ended_step - begun_step) * 1e3, 2),
        "committed": len(committed & set(steps[:-2])) / max(1, len(steps) - 2),
        "state_mib": round(first * 12 / 2 / 2**20, 2),
    }


def wait_for_step(record: RunRecord, step: int, running: subprocess.Popen[bytes]) -> int:
    """Wait until `step` is completed; return the model's number of parameters."""
    deadline = time.monotonic() + START_S
    while newest(record) < step:
        record.poll()
        assert running.poll() is None, f"the run ended with {running.returncode}"
        assert time.monotonic() < deadline, f"no step {step} within {START_S:.0f} s"
        time.sleep(0.05)
    config = json.loads((record.run_dir / "job.json").read_text(encoding="utf-8"))
    return ModelShape(**config["model"]).num_params()


def newest(record: RunRecord) -> int:
    """Return the newest completed step."""
    return max((e.step or 0 for e in record.events if e.event == "step.completed"), default=0)


def tree_cpu_s(pid: int) -> float:
    """Return the CPU time of all agents, zygotes and workers below `pid`, seconds."""
    times = [child.cpu_times() for child in psutil.Process(pid).children(recursive=True)]
    return float(sum(t.user + t.system for t in times))
