"""Nodes killed at random times and returning: the part of the undisturbed steps that is done.

Four nodes with one worker each on this machine, the tiny model, a checkpoint every 50 steps and
(holdfast) a snapshot every step. Kills come as a Poisson process from the first step on; a
killed node returns some seconds later. Each system is first measured undisturbed, then struck;
the times of the kills are those of the seed, the same for all, and the node is drawn from
those alive.

    python benchmarks/chaos.py [--seconds S] [--mean S] [--return-after S] [--seed N]
                               [--only holdfast|torchrun] [--out FILE]

torchrun alone would end with the first death of the node that hosts its store. Here somebody
stands by: agents that leave by themselves are started again as killed nodes are, after the
same seconds, and each returning agent restarts all. Its steps count from the checkpoint that it
went back to.

Prints a table, and last a JSON line.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil
from common import OUT, ROOT, environment, machine, say, table, write_out
from peers import PeerCluster, Steps, completed, trains_whole

from launcher.local.faults import Chaos, ChaosSchedule, FaultAction
from launcher.record.files import RunRecord

NODES = 4
UNDISTURBED_S = 120.0
"""At most: its rate hardly changes."""
START_S, END_S, TICK_S = 180.0, 60.0, 0.02
CLI_DONE, CLI_INTERRUPTED = 0, 130
JOB = """
name: chaos
model: tiny
layout: {{dp: auto}}
cluster: {{nodes: 4, gpus_per_node: 1, gpu: cpu}}
train: {{seq_len: 64, global_batch: 12, steps: 1000000, precision: fp32, recompute: none}}
data: {{path: "{corpus}", format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: 50}}
elastic: {{min_nodes: 1, max_restarts: 1000000, node_failures: 1000000}}
"""


@contextmanager
def job_folder() -> Iterator[tuple[Path, Path]]:
    """Yield a fresh folder and the job file in it."""
    folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    job = folder / "job.yaml"
    job.write_text(JOB.format(corpus=ROOT / "examples" / "corpus"), encoding="utf-8")
    try:
        yield folder, job
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def steps_done(steps: Steps, begun_t: float, seconds: float) -> int:
    """Return how far training came in the `seconds` after `begun_t`.

    The newest step at the end, not the largest: who went back has not done what came after.

    Args:
        steps: in order of time.
        begun_t: when the first gap between kills began.
        seconds: from then on.
    """
    until = [done.step for done in steps if done.t <= begun_t + seconds]
    before = [done.step for done in steps if done.t <= begun_t]
    return (until[-1] if until else 0) - (before[-1] if before else 0)


def holdfast(seconds: float, chaos: Chaos | None) -> dict[str, Any]:
    """Run for `seconds` from the first step on; return the steps done, and the ledger's account."""
    with job_folder() as (folder, job):
        command = [sys.executable, "-m", "launcher.cli.main", "run", str(job)]
        command += ["--run-dir", str(folder / "run"), "--json", "--quiet"]
        if chaos is not None:
            command += ["--chaos", f"{chaos.seed},{chaos.mean_s},{chaos.return_s}"]
        record = RunRecord(folder / "run")
        out, said = folder / "summary.json", folder / "said.txt"
        with out.open("w") as output, said.open("w") as errors:
            running = subprocess.Popen(
                command, env=environment(), cwd=ROOT, stdout=output, stderr=errors
            )
        try:
            begun_t = first_step(record, running)
            while time.time() < begun_t + seconds:
                assert running.poll() is None, said.read_text(encoding="utf-8")[-2000:]
                time.sleep(TICK_S)
            running.send_signal(signal.SIGINT)
            code = running.wait(END_S)
        finally:
            if running.poll() is None:
                running.kill()  # its agents die with it
                running.wait()
        assert code in (CLI_DONE, CLI_INTERRUPTED), said.read_text(encoding="utf-8")[-2000:]
        record.poll()
        summary = json.loads(out.read_text(encoding="utf-8"))
        kills = [e for e in record.events if e.event == "fault.injected"]
        keys = ("steps_redone", "committed_steps_redone", "samples_lost", "samples_repeated")
        return {
            "steps": steps_done(completed(record.events), begun_t, seconds),
            "kills": sum(e.fields.get("action") == "kill-node" for e in kills),
            "restarts": summary["restarts"],
            **{key: summary[key] for key in keys},
        }


def first_step(record: RunRecord, running: subprocess.Popen[bytes]) -> float:
    """Wait for the first step; return when it was completed."""
    deadline = time.monotonic() + START_S
    while not (steps := completed(record.events)):
        assert running.poll() is None, f"the run ended with {running.returncode}"
        assert time.monotonic() < deadline, f"no step within {START_S:.0f} s"
        time.sleep(TICK_S)
        record.poll()
    return steps[0].t


def torchrun(seconds: float, chaos: Chaos | None) -> dict[str, Any]:
    """The same with torchrun, tuned, and with somebody who starts what has left."""
    whole = partial(trains_whole, num_nodes=NODES, past_step=1)
    kills = left = 0
    back: dict[int, float] = {}
    with (
        job_folder() as (folder, job),
        PeerCluster("torchrun_tuned", job, folder, NODES) as cluster,
    ):
        cluster.wait_until(lambda steps: whole(steps, psutil.pid_exists))
        begun_t, begun = time.time(), time.monotonic()
        schedule = None if chaos is None else ChaosSchedule(chaos, begun)
        while (now := time.monotonic()) < begun + seconds:
            for node in cluster.left():
                if node not in back:
                    left += 1
                    back[node] = now + (0.0 if chaos is None else chaos.return_s or 0.0)
            for node in [node for node, t in back.items() if t <= now]:
                del back[node]
                cluster.start_node(node)
            alive = [f"node{node}" for node in range(NODES) if node not in back]
            for action, name in schedule.due(now, alive) if schedule else ():
                node = int(name.removeprefix("node"))
                if action is FaultAction.KILL_NODE:  # it is we who return nodes
                    kills += 1
                    cluster.kill_node(node)
                    back[node] = now + (chaos.return_s or 0.0 if chaos else 0.0)
            time.sleep(TICK_S)
        steps = cluster.steps()
        restarts = len({step.by for step in steps}) - NODES
    return {
        "steps": steps_done(steps, begun_t, seconds),
        "kills": kills,
        "agents_left": left,
        "workers_restarted": restarts,
    }


SYSTEMS: dict[str, Callable[[float, Chaos | None], dict[str, Any]]] = {
    "holdfast": holdfast,
    "torchrun_tuned": torchrun,
}


@click.command(help=__doc__.split("\n")[0])
@click.option("--seconds", default=600.0, show_default=True)
@click.option("--mean", default=15.0, show_default=True, help="Seconds between kills.")
@click.option("--return-after", default=5.0, show_default=True, help="Seconds.")
@click.option("--seed", default=1, show_default=True)
@click.option("--only", type=click.Choice(["holdfast", "torchrun"]))
@OUT
def main(
    *,
    seconds: float,
    mean: float,
    return_after: float,
    seed: int,
    only: str | None,
    out: Path | None,
) -> None:
    """Measure and print."""
    where = machine()
    chaos = Chaos(seed, mean, return_after)
    calm_s = min(seconds, UNDISTURBED_S)
    results: dict[str, Any] = {"seconds": seconds, "mean_s": mean, "seed": seed}
    rows: list[list[object]] = []
    for name, run in SYSTEMS.items():
        if only is not None and not name.startswith(only):
            continue
        rate = run(calm_s, None)["steps"] / calm_s
        say(f"{name} undisturbed: {rate:.2f} steps/s")
        found = run(seconds, chaos)
        found = {"fraction": round(found["steps"] / (rate * seconds), 4), **found}
        say(f"{name}: {found}")
        results[name] = {"undisturbed_steps_per_s": round(rate, 3), **found}
        account = [found.get(key, "-") for key in ACCOUNT]
        rows.append([name, round(rate, 2), found["steps"], f"{found['fraction']:.1%}", *account])
    header = ["system", "undisturbed steps/s", "steps under kills", "of the undisturbed", "kills"]
    header += ["steps redone", "of them committed", "samples lost", "samples repeated"]
    text = f"chaos: kills every {mean:g} s on average for {seconds:g} s, back after "
    text += f"{return_after:g} s, seed {seed} ({where})\n\n{table(header, rows)}"
    write_out(f"{text}\n\n{json.dumps(results)}", out)


ACCOUNT = ("kills", "steps_redone", "committed_steps_redone", "samples_lost", "samples_repeated")


if __name__ == "__main__":
    main()
