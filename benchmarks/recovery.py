"""Kill -> first completed step of the next epoch, beside torchrun in the same run.

Four nodes with one worker each on this machine, the tiny model, fp32, a checkpoint every
10 steps; SIGKILL at step 15 of a node (not the first), of a worker, and of the node that
coordinates (for torchrun: that hosts its store). Both clocks run from just before the
signal to the first step that all ranks of the next epoch have completed.

    python benchmarks/recovery.py [--repeats N] [--only holdfast|torchrun] [--out FILE]

Each case runs three times; torchrun with its default settings once, since its pause is that
of its time-outs and three times would double the whole (`--repeats` holds for all).

Prints a table, and last a JSON line with the medians in seconds (null: never recovered:
torchrun's agents had all left, or no step came within NEVER_S).
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
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from common import environment, machine, median, say, table, write_out

HERE = Path(__file__).parent
FAULTS = {
    "node": "kill-node:2@15",
    "worker": "kill-worker:1@15",
    "coordinator": "kill-coordinator@15",
}
FAULT_STEP, STEPS, NODES = 15, 22, 4
REPEATS = {"holdfast": 3, "torchrun_tuned": 3, "torchrun_default": 1}
START_S, NEVER_S, RUN_S = 120.0, 90.0, 300.0
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
MONITOR_INTERVAL_S = 0.1  # torchrun's own default in 2.13, said for older ones

Steps = list[tuple[float, int, int]]
"""(time, pid, step) of every completed step."""


class NotStartedError(RuntimeError):
    """torchrun's nodes did not train together in time: nothing was measured."""


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
    try:
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=RUN_S, check=False
        )
    except subprocess.TimeoutExpired:
        say(f"no end within {RUN_S:.0f} s")
        return None, {}
    if done.returncode != 0:
        say(done.stderr[-2000:])
        return None, {}
    failure = next(f for f in json.loads(done.stdout)["failures"] if f["injected"])
    return failure["recovered_s"], {**failure["phases"], "other": failure["other_s"]}


@contextlib.contextmanager
def torchrun_cluster(folder: Path, conf: str) -> Iterator[list[psutil.Process]]:
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
        **environment(),
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
            str(MONITOR_INTERVAL_S),
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
        kill_strays(folder)


def kill_trees(agents: list[psutil.Process]) -> None:
    """SIGKILL agents and all they started, at once: a node's power loss."""
    victims = []
    for agent in agents:
        with contextlib.suppress(psutil.NoSuchProcess):
            victims += [agent, *agent.children(recursive=True)]
    for victim in victims:
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)


def kill_strays(folder: Path) -> None:
    """SIGKILL workers whose agent left without them: they have `folder` in their arguments."""
    for process in psutil.process_iter(["cmdline"]):
        if process.pid != os.getpid() and str(folder) in " ".join(process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def parse_steps(text: str) -> Steps:
    """Read what the workers append; a line that is not whole (yet) is left out."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(float(t), int(pid), int(step)) for t, pid, step in (x for x in lines if len(x) == 3)]


def steps_of(log: Path) -> Steps:
    """Return the steps completed so far."""
    return parse_steps(log.read_text(encoding="ascii")) if log.exists() else []


def trains_whole(steps: Steps, alive: Callable[[int], bool]) -> bool:
    """Whether every node has a live worker past the fault's step.

    A node that joined late has restarted all others: the old workers do not count.
    """
    return len({pid for _, pid, s in steps if s >= FAULT_STEP and alive(pid)}) == NODES


def torchrun(fault: str, folder: Path, conf: str) -> float | None:
    """Run torchrun with one fault; return seconds to the first step of restarted workers.

    Raises:
        NotStartedError: there was nothing to strike.
    """
    log = folder / "steps.log"
    with torchrun_cluster(folder, conf) as agents:
        deadline = time.monotonic() + START_S
        while not trains_whole(steps_of(log), psutil.pid_exists):
            if time.monotonic() > deadline:
                tail = (folder / "agent0.log").read_text(encoding="utf-8")[-1000:]
                raise NotStartedError(f"no step of four nodes within {START_S:.0f} s: {tail}")
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


def measure(system: str, fault: str, again: int = 1) -> tuple[float | None, dict[str, float]]:
    """Run one system once, in a folder of its own; `again` more times if it does not start."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        if system == "holdfast":
            return holdfast(fault, folder)
        return torchrun(fault, folder, TUNED if system == "torchrun_tuned" else ""), {}
    except NotStartedError as error:
        say(f"{system} {fault} did not start: {error}")
        if again <= 0:
            raise
        return measure(system, fault, again=again - 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Measure everything and print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, help="runs of every case")
    parser.add_argument("--only", choices=["holdfast", "torchrun"])
    parser.add_argument("--out", type=Path, help="also write what is printed to FILE")
    args = parser.parse_args()
    chosen = [s for s in REPEATS if args.only is None or s.startswith(args.only)]
    where = machine()
    say(f"recovery ({where})")
    medians: dict[str, dict[str, float | None]] = {}
    rows, phase_rows = [], []
    for system in chosen:
        medians[system] = {}
        repeats = args.repeats or REPEATS[system]
        for fault in FAULTS:
            seconds: list[float | None] = []
            phases: list[dict[str, float]] = []
            for turn in range(repeats):
                took, parts = measure(system, fault)
                say(f"{system} {fault} {turn + 1}/{repeats}: {took}")
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
                    "never" if medians[system][fault] is None else medians[system][fault],
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
    text = f"recovery ({where})\n\n"
    text += table(["system", "killed", "median s", "min s", "max s", "runs"], rows)
    if phase_rows:
        text += "\n\n" + table(["killed", "phase of holdfast", "median s"], phase_rows)
    write_out(text + "\n\n" + json.dumps(medians), args.out)


if __name__ == "__main__":
    main()
