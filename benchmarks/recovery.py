"""Kill -> first completed step of the next epoch, beside torchrun in the same run.

Four nodes with one worker each on this machine, the tiny model, fp32, a checkpoint every
10 steps; SIGKILL at step 25 of a node (not the first), of a worker, and of the node that
coordinates (for torchrun: that hosts its store).

    python benchmarks/recovery.py [--repeats 3] [--only holdfast|torchrun]

Prints a table, and last a JSON line with the medians in seconds (null: never recovered).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from common import machine, median, say, table

HERE = Path(__file__).parent
FAULTS = {
    "node": "kill-node:2@25",
    "worker": "kill-worker:1@25",
    "coordinator": "kill-coordinator@25",
}
FAULT_STEP, STEPS, NODES = 25, 40, 4
START_S, NEVER_S = 120.0, 120.0
JOB = """
name: recovery
model: tiny
layout: {{dp: auto}}
cluster: {{nodes: 4, gpus_per_node: 1, gpu: cpu}}
train: {{seq_len: 64, global_batch: 12, steps: {steps}, precision: fp32, recompute: none}}
data: {{path: "{corpus}", format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: 10}}
elastic: {{min_nodes: 1}}
"""
TUNED = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,"


def write_job(folder: Path, steps: int) -> Path:
    """Write the job file both systems train."""
    job = folder / "job.yaml"
    corpus = HERE.parent / "examples" / "corpus"
    job.write_text(JOB.format(steps=steps, corpus=corpus), encoding="utf-8")
    return job


def holdfast(fault: str, folder: Path) -> tuple[float | None, dict[str, float]]:
    """Run with one fault; return seconds to the first step after it, and the phases."""
    run_dir = folder / "run"
    command = [
        sys.executable,
        "-m",
        "launcher.cli.main",
        "run",
        str(write_job(folder, STEPS)),
        "--run-dir",
        str(run_dir),
        "--fault",
        FAULTS[fault],
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        say(done.stderr[-2000:])
        return None, {}
    failure = next(f for f in json.loads(done.stdout)["failures"] if f["injected"])
    return failure["recovered_s"], {**failure["phases"], "other": failure["other_s"]}


@contextlib.contextmanager
def torchrun_cluster(folder: Path, conf: str, interval: float) -> Iterator[list[psutil.Process]]:
    """Start four torchrun agents, each a session of its own; kill whatever is left after."""
    sys.path.insert(0, str(HERE.parent))
    from launcher.planning.search import plan
    from launcher.render.local import render_local
    from launcher.spec import load_spec

    job = write_job(folder, 100_000)
    spec = load_spec(job)
    files = render_local(spec, plan(spec), run_id="bench", run_dir=folder, base_dir=folder)
    (folder / "job.json").write_text(files["job.json"], encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONPATH": str(HERE.parent),
    }
    agents = []
    for node in range(NODES):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            f"1:{NODES}",
            "--nproc-per-node",
            "1",
            "--max-restarts",
            "100",
            "--rdzv-id",
            "bench",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            f"127.0.0.1:{port}",
            "--local-addr",
            "127.0.0.1",
            "--monitor-interval",
            str(interval),
            "--rdzv-conf",
            f"{conf}is_host={int(node == 0)}",
            str(HERE / "torchrun_worker.py"),
            str(folder / "job.json"),
            str(folder / "steps.log"),
            str(folder),
        ]
        log = (folder / f"agent{node}.log").open("w")
        agents.append(
            psutil.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        )
        log.close()
    try:
        yield agents
    finally:
        kill_trees(agents)
        for agent in agents:
            agent.wait(10)


def kill_trees(agents: list[psutil.Process]) -> None:
    """SIGKILL agents and all they started, at once: a node's power loss."""
    victims = []
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += [agent, *agent.children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)


def steps_of(log: Path) -> list[tuple[float, int, int]]:
    """Return (time, pid, step) of every completed step so far."""
    if not log.exists():
        return []
    lines = [line.split() for line in log.read_text(encoding="ascii").splitlines()]
    return [(float(t), int(pid), int(step)) for t, pid, step in (x for x in lines if len(x) == 3)]


def torchrun(fault: str, folder: Path, conf: str, interval: float) -> float | None:
    """Run torchrun with one fault; return seconds to the first step of restarted workers."""
    log = folder / "steps.log"
    with torchrun_cluster(folder, conf, interval) as agents:
        deadline = time.monotonic() + START_S
        while max((s for _, _, s in steps_of(log)), default=0) < FAULT_STEP:
            assert time.monotonic() < deadline, f"torchrun did not start: {folder}"
            time.sleep(0.02)
        before = {pid for _, pid, _ in steps_of(log)}
        struck = time.time()
        if fault == "worker":
            for child in agents[1].children(recursive=True):
                if child.pid in before:
                    child.send_signal(signal.SIGKILL)
        else:
            kill_trees([agents[0] if fault == "coordinator" else agents[2]])
        deadline = time.monotonic() + NEVER_S
        while time.monotonic() < deadline:
            after = [t for t, pid, _ in steps_of(log) if pid not in before]
            if after:
                return min(after) - struck
            if all(agent.poll() is not None for agent in agents):
                return None
            time.sleep(0.02)
    return None


def measure(system: str, fault: str) -> tuple[float | None, dict[str, float]]:
    """Run one system once, in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        if system == "holdfast":
            return holdfast(fault, folder)
        tuned = system == "torchrun_tuned"
        return torchrun(fault, folder, TUNED if tuned else "", 0.1), {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure everything and print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["holdfast", "torchrun"])
    args = parser.parse_args()
    systems = ["holdfast", "torchrun_tuned", "torchrun_default"]
    chosen = [s for s in systems if args.only is None or s.startswith(args.only)]
    print(f"recovery ({machine()})\n", flush=True)
    medians: dict[str, dict[str, float | None]] = {}
    rows, phase_rows = [], []
    for system in chosen:
        medians[system] = {}
        for fault in FAULTS:
            seconds: list[float | None] = []
            phases: list[dict[str, float]] = []
            for turn in range(args.repeats):
                took, parts = measure(system, fault)
                say(f"{system} {fault} {turn + 1}/{args.repeats}: {took}")
                seconds.append(took)
                phases.append(parts)
                if took is None and system != "holdfast":
                    break  # it never does: its agents leave when the store is gone
            medians[system][fault] = median(seconds)
            known = [round(s, 2) for s in seconds if s is not None]
            rows.append(
                [
                    system,
                    fault,
                    medians[system][fault] or "never",
                    min(known, default="-"),
                    max(known, default="-"),
                    len(seconds),
                ]
            )
            if system == "holdfast":
                names = dict.fromkeys(name for parts in phases for name in parts)
                phase_rows += [
                    [fault, name, median([p.get(name, 0.0) for p in phases])] for name in names
                ]
    print(table(["system", "killed", "median s", "min s", "max s", "runs"], rows))
    if phase_rows:
        print("\n" + table(["killed", "phase of holdfast", "median s"], phase_rows))
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
