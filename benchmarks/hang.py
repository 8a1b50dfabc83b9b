"""SIGSTOP -> first completed step of the next epoch, beside torchrun in the same run.

Four nodes with one worker each on this machine, the tiny model, fp32, holdfast with its default
settings. In steady state a worker is stopped, or all processes of a node, or a worker gets nowhere
by itself; nothing dies, so only missing progress tells. The clock runs from just before the signal
to the first step of the next epoch. torchrun has a group time-out of 20 s (the default is 30
minutes), tuned rendezvous and its own 30 s of grace before it kills what does not end.

    python benchmarks/hang.py [--repeats N] [--only holdfast|torchrun] [--out FILE]

holdfast runs three times; torchrun once, since its pause is that of its time-outs.

Prints a table, and last a JSON line with medians in seconds (null: never, within NEVER_S).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
from common import OUT, ROOT, environment, machine, median, say, table, write_out
from peers import PeerCluster, in_own_folder, trains_whole

FAULTS = {
    "sigstop": ("pause-worker:1@25",),
    "sigstop_node": ("pause-node:2@25", "resume-node:2@35"),  # a stopped node ends no run
    "spin": ("spin-worker:1@25",),
    "wedge": ("wedge-worker:1@25",),
    "starve": ("starve-worker:1@25",),
}
SAYS = {
    "sigstop": "a worker stopped",
    "sigstop_node": "a node stopped",
    "spin": "busy at 100 %",
    "wedge": "never in the all-reduce",
    "starve": "no more data",
}
OF_PEERS = ("sigstop", "sigstop_node")
"""The others need a worker that listens; to torchrun's time-outs they are all alike."""
NODES, FAULT_STEP, STEPS, ENDLESS = 4, 25, 45, 1_000_000
PEER_TIMEOUT_S = 20
NEVER_S, RUN_S = 150.0, 240.0
CLI_DONE = 0
REPEATS = {"holdfast": 3, "torchrun": 1}
JOB = """
name: hang
model: tiny
layout: {{dp: auto}}
cluster: {{nodes: 4, gpus_per_node: 1, gpu: cpu}}
train: {{seq_len: 64, global_batch: 12, steps: {steps}, precision: fp32, recompute: none}}
data: {{path: "{corpus}", format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: 10}}
elastic: {{min_nodes: 1}}
"""

Found = tuple[float | None, float | None]
"""Seconds to the first step, and to the detection; None: never, or not told."""


def write_job(folder: Path, steps: int) -> Path:
    """Write the job file that both systems train."""
    job = folder / "job.yaml"
    corpus = ROOT / "examples" / "corpus"
    job.write_text(JOB.format(steps=steps, corpus=corpus), encoding="utf-8")
    return job


def holdfast(name: str, folder: Path) -> Found:
    """Run with one fault."""
    command = [sys.executable, "-m", "launcher.cli.main", "run", str(write_job(folder, STEPS))]
    command += ["--run-dir", str(folder / "run"), "--json"]
    command += [part for fault in FAULTS[name] for part in ("--fault", fault)]
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"no end within {RUN_S:.0f} s")
        return None, None
    if done.returncode != CLI_DONE:
        say(done.stderr[-2000:])
        return None, None
    failure = next(f for f in json.loads(done.stdout)["failures"] if f["injected"])
    return failure["recovered_s"], failure["phases"].get("detect")


def torchrun(name: str, folder: Path) -> Found:
    """Run torchrun with one fault.

    Raises:
        NotStartedError: there was nothing to strike.
    """
    job = write_job(folder, ENDLESS)
    whole = partial(trains_whole, num_nodes=NODES, past_step=FAULT_STEP)
    with PeerCluster("torchrun_tuned", job, folder, NODES) as cluster:
        cluster.wait_until(lambda steps: whole(steps, psutil.pid_exists))
        before = {step.by for step in cluster.steps()}
        node = cluster.agents[1 if name == "sigstop" else 2]
        family = [node, *node.children(recursive=True)]
        victims = [p for p in family if p.pid in before] if name == "sigstop" else family
        struck = time.time()
        for victim in victims:
            victim.send_signal(signal.SIGSTOP)
        try:
            deadline = time.monotonic() + NEVER_S
            while time.monotonic() < deadline:
                after = [step.t for step in cluster.steps() if step.by not in before]
                if after:
                    return min(after) - struck, None
                if len(cluster.left()) == NODES:
                    break
                time.sleep(0.02)
        finally:
            for victim in victims:  # SIGKILL ends a stopped process too; its children may linger
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(signal.SIGCONT)
    return None, None


def measure(system: str, name: str) -> Found:
    """Run one system once."""
    run = holdfast if system == "holdfast" else torchrun
    return in_own_folder(f"{system} {name}", partial(run, name))


@click.command(help=__doc__.split("\n")[0])
@click.option("--repeats", type=int, help="Runs of every case.")
@click.option("--only", type=click.Choice(list(REPEATS)))
@OUT
def main(repeats: int | None, only: str | None, out: Path | None) -> None:
    """Measure everything and print the table and the JSON line."""
    os.environ["HOLDFAST_BENCH_PEER_TIMEOUT_S"] = str(PEER_TIMEOUT_S)
    where = machine()
    say(f"hang ({where})")
    results: dict[str, dict[str, Any]] = {}
    rows: list[list[object]] = []
    for system, usual in REPEATS.items():
        if only not in (None, system):
            continue
        results[system] = {}
        for name in FAULTS if system == "holdfast" else OF_PEERS:
            found = []
            for turn in range(repeats or usual):
                found.append(measure(system, name))
                say(f"{system} {name} {turn + 1}: {found[-1]}")
            steps, detected = (median([pair[i] for pair in found]) for i in (0, 1))
            results[system][f"{name}_s"] = steps
            results[system][f"{name}_detected_s"] = detected
            known = [round(s, 2) for s, _ in found if s is not None]
            rows.append(
                [
                    *(system, SAYS[name]),
                    "never" if steps is None else steps,
                    *(min(known, default="-"), max(known, default="-")),
                    *("-" if detected is None else detected, len(found)),
                ]
            )
    header = ["system", "fault", "median s", "min s", "max s", "of it detection", "runs"]
    text = f"hang ({where})\n\n{table(header, rows)}\n\n{json.dumps(results)}"
    write_out(text, out)


if __name__ == "__main__":
    main()
