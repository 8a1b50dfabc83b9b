"""Kill -> first completed step without what was killed, beside torchrun, ft_launcher and torchft.

Four nodes on this machine, the tiny model, fp32, a checkpoint every 10 steps (torchft: none) and
(holdfast) a snapshot every step; SIGKILL at step 15. All clocks run from just before the signal.

    python benchmarks/recovery.py [--repeats N] [--only holdfast,torchft_1s,...]
                                  [--cases node,growth] [--out FILE]

Cases: a node (not the first), a worker, the node that coordinates (for the peers: that hosts the
store), one worker a node; `growth`, a killed node returns: its seconds are the longest time without
a step, of ours that at the change (`longest gap` has what preparing it slows). Holdfast alone:
`drain`, `drain_two` and `drain_coordinator`, one node, two neighbours or the node that coordinates
are asked to leave, and `swap`, a slow node gives its place to a spare: their seconds are those
between the last step before and the first after; `tp`, two workers a node, dp4-tp2 -> dp3-tp2;
`compile`, torch.compile on; `standby`, `standby_worker`, `standby_coordinator`, `standby_tp` and
`standby_compile`, as `node` and the others with `elastic.standby` (`standby_compile` later, once
they have warmed up); `trainer`, a worker of Hugging Face's Trainer with its modules preloaded, and
`trainer_imports`, without.

`pair`, `pair_worker` and `pair_coordinator` (with standbys), `pair_growth` and `pair_drain`: the
same where two ranks are left, a core each of this machine's two; above, four ranks share them, and
what each computes for itself takes up to twice as long.

Columns: `plain step`, the median time between two steps before the kill, of a pair after it, in the
layout that comes; `longest gap`, between two steps of the job, from the kill (growth: the return)
until the case is over; `rejoin`, from the death of a worker, or the start of a returning node's
agent, to the first step of all; `steps redone`, that had been completed before.

Each case of ours and of torchft at its fastest runs five times, others' three times; torchrun with
its default settings once, since its pause is that of its time-outs (`--repeats` holds for all).

Prints tables, and last a JSON line with the medians in seconds (null: never recovered: the
peer's agents had all left, or no step came within NEVER_S).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import psutil
from common import OUT, ROOT, environment, machine, median, say, table, write_out
from peers import (
    SYSTEMS,
    PeerCluster,
    Steps,
    completed,
    in_own_folder,
    trains_whole,
    why_not,
)

from elastic_trainer.agent.stop_signals import LEAVE
from elastic_trainer.record.events import Event
from launcher.record.files import RunRecord

FAULT_STEP, STEPS, NODES = 15, 22, 4
AFTER = 6
"""Steps of the new epoch that a planned change is followed for."""
ENDLESS = 100_000
REPEATS = {"holdfast": 5, "torchft_1s": 5, "torchrun_default": 1}
"""3 otherwise."""
NEVER_S, RUN_S = 90.0, 300.0
CLI_INTERRUPTED = 130
JOB = """
name: recovery
model: tiny
layout: {{dp: auto, tp: {workers}}}
cluster: {{nodes: {nodes}, spares: {spares}, gpus_per_node: {workers}, gpu: cpu}}
train:
  {{seq_len: 64, global_batch: 12, steps: {steps}, precision: fp32, recompute: none,
   compile: {compiled}}}
data: {{path: "{corpus}", format: text, tokenizer: bytes}}
checkpoint: {{every_s: null, every_steps: 10}}
elastic: {{min_nodes: 1, standby: {standby}, straggler: {straggler}}}
"""
TRAINER = """
name: recovery
command: hf_trainer.py --max_steps {steps} --output_dir {{run_dir}}
code: {{dir: "{examples}"}}
cluster: {{nodes: 4, gpus_per_node: 1, gpu: cpu}}
elastic: {{min_nodes: 4, preload: "{preload}"}}
"""
PRELOAD = "transformers.trainer,transformers.models.llama.modeling_llama"


@dataclass(frozen=True, slots=True)
class Case:
    """What is struck, and what is trained."""

    faults: tuple[str, ...]
    nodes: int = NODES
    workers: int = 1
    """Per node, tensor-parallel."""
    compiled: bool = False
    standby: bool = False
    """Each worker has one."""
    steps: int = STEPS
    trainer: bool = False
    """Hugging Face's Trainer, in place of the tiny model."""
    preload: str = "torch"
    """Of a Trainer; torch is anyway."""
    drained: int = 0
    """So many neighbours are asked to leave after FAULT_STEP, none of them the coordinator."""
    drains_coordinator: bool = False
    spares: int = 0
    planned: bool = False
    """Whether the epoch that ends the case is formed though nothing failed."""
    pair: bool = False
    """Whether two ranks are left, whose own plain step counts."""

    @property
    def drains(self) -> int:
        """How many nodes are asked to leave."""
        return self.drained or int(self.drains_coordinator)


CASES = {
    "node": Case(("kill-node:2@15",)),
    "worker": Case(("kill-worker:1@15",)),
    "coordinator": Case(("kill-coordinator@15",)),
    "tp": Case(("kill-node:2@15",), workers=2),
    "compile": Case(("kill-node:2@15",), compiled=True),
    "standby": Case(("kill-node:2@15",), standby=True),
    "standby_worker": Case(("kill-worker:1@15",), standby=True),
    "standby_coordinator": Case(("kill-coordinator@15",), standby=True),
    "standby_tp": Case(("kill-node:2@15",), workers=2, standby=True),
    "standby_compile": Case(("kill-node:2@45",), compiled=True, standby=True, steps=52),
    "growth": Case(("kill-node:2@15", "return-node@20"), steps=ENDLESS, planned=True),
    "drain": Case((), steps=ENDLESS, drained=1, planned=True),
    "drain_two": Case((), steps=ENDLESS, drained=2, planned=True),
    "drain_coordinator": Case((), steps=ENDLESS, drains_coordinator=True, planned=True),
    "swap": Case(("slow-worker:1@15",), steps=ENDLESS, spares=1, planned=True),
    "pair": Case(("kill-node:2@15",), nodes=3, standby=True, steps=30, pair=True),
    "pair_worker": Case(("kill-worker:1@15",), nodes=2, standby=True, steps=30, pair=True),
    "pair_coordinator": Case(("kill-coordinator@15",), nodes=3, standby=True, steps=30, pair=True),
    "pair_growth": Case(
        ("kill-node:1@15", "return-node@20"), nodes=2, steps=ENDLESS, planned=True, pair=True
    ),
    "pair_drain": Case((), nodes=3, steps=ENDLESS, drained=1, planned=True, pair=True),
    "trainer": Case(("kill-worker:1@15",), trainer=True, preload=PRELOAD),
    "trainer_imports": Case(("kill-worker:1@15",), trainer=True),
}


@dataclass(slots=True)
class Run:
    """One run of one case."""

    seconds: float | None
    """None: it never recovered."""
    phases: dict[str, float] = field(default_factory=dict)
    step: float | None = None
    """Between two steps before the fault; None: not measured."""
    gap: float | None = None
    """The longest time between two steps."""
    rejoin: float | None = None
    """To the first step of all nodes; None: the case has none."""
    redone: int | None = None
    committed_redone: int | None = None

    @property
    def beyond_a_step(self) -> float | None:
        """What came on top of a step that was due anyway."""
        if self.seconds is None or self.step is None:
            return None
        return self.seconds - self.step

    @property
    def explained(self) -> float | None:
        """Part of the pause that the phases explain, 0 to 1."""
        if not self.seconds or not self.phases:
            return None
        return round(1.0 - self.phases["other"] / self.seconds, 4)


def write_job(folder: Path, case: Case) -> Path:
    """Write the job file that all systems train, or that of a Trainer."""
    job = folder / "job.yaml"
    text = (TRAINER if case.trainer else JOB).format(
        steps=case.steps,
        corpus=ROOT / "examples" / "corpus",
        nodes=case.nodes,
        workers=case.workers,
        compiled=str(case.compiled).lower(),
        standby=str(case.standby).lower(),
        spares=case.spares,
        straggler="swap" if case.spares else "report",
        examples=ROOT / "examples",
        preload=case.preload,
    )
    job.write_text(text, encoding="utf-8")
    return job


def holdfast(name: str, folder: Path) -> Run:
    """Run with one fault; return seconds to the first step after it, and the phases."""
    case = CASES[name]
    faults = [part for fault in case.faults for part in ("--fault", fault)]
    command = [sys.executable, "-m", "launcher.cli.main", "run", str(write_job(folder, case))]
    command += ["--run-dir", str(folder / "run"), *faults, "--json"]
    # As a node keeps it: empty at the start of a run, filled by the first epoch.
    env = {**environment(), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            if case.planned:
                stop_once_changed(running, folder / "run", case)
            out, said = running.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            running.kill()  # its agents die with it
            say(f"no end within {RUN_S:.0f} s")
            return Run(None)
    if running.returncode not in (0, CLI_INTERRUPTED):
        say(said[-2000:])
        return Run(None)
    record = RunRecord(folder / "run")
    record.poll()
    return run_of(name, json.loads(out), record.events)


def stop_once_changed(running: subprocess.Popen[str], run_dir: Path, case: Case) -> None:
    """Ask nodes to leave, if the case says so; end `running` some steps into the new epoch."""
    record, deadline = RunRecord(run_dir), time.monotonic() + RUN_S
    asked = False
    while running.poll() is None:
        record.poll()
        steps = [e for e in record.events if e.event == "step.completed"]
        if case.drains and not asked and len(steps) >= FAULT_STEP:
            asked = True
            for node in drained(record.events, case):
                os.kill(agent_of(run_dir, node), signal.Signals[LEAVE])
        change = planned_change(record.events, case)
        if change is not None and sum(e.epoch == change[2].epoch for e in steps) >= AFTER:
            running.send_signal(signal.SIGINT)
            return
        if time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(running.args, RUN_S)
        time.sleep(0.05)


def drained(events: Sequence[Event], case: Case) -> list[str]:
    """Return the nodes that are asked to leave."""
    first = next(e.node for e in events if e.event == "coordinator.elected")
    if case.drains_coordinator:
        return [first]
    nodes = [f"node{number}" for number in range(case.nodes)]
    at = nodes.index(first)
    return max(nodes[:at], nodes[at + 1 :], key=len)[-case.drained :]


def agent_of(run_dir: Path, node: str) -> int:
    """Return the process of a node's agent."""
    lines = (run_dir / "nodes" / f"{node}.jsonl").read_text(encoding="utf-8").splitlines()
    events = filter(None, map(Event.decode, lines))
    return int([e for e in events if e.event == "agent.started"][-1].fields["pid"])


def planned_change(events: Sequence[Event], case: Case) -> tuple[Event, Event, Event] | None:
    """Return what began a change that was known beforehand, the step before it and that after it.

    None: it is not over.
    """
    begin = "member.leaving" if case.drains else "fault.injected"
    ordered = sorted(events, key=lambda e: e.t_unix)
    begun = [e for e in ordered if e.event == begin]
    if len(begun) < (case.drains or len(case.faults)):
        return None
    formed = [e for e in ordered if e.event == "epoch.formed" and e.t_unix > begun[-1].t_unix]
    if not formed:
        return None
    steps = [e for e in ordered if e.event == "step.completed"]
    after = [e for e in steps if e.epoch == formed[0].epoch]
    before = [e for e in steps if e.epoch is not None and e.epoch < (formed[0].epoch or 0)]
    return (begun[-1], before[-1], after[0]) if after else None


def run_of(name: str, summary: Mapping[str, Any], events: Sequence[Event]) -> Run:
    """Read a run's summary, and what its events say that is compared."""
    case, steps = CASES[name], completed(events)
    injected = [e.t_unix for e in events if e.event == "fault.injected"]
    run = Run(None)
    if injected and name != "swap":
        run = account(name, steps, injected[-1]) or run
    change = planned_change(events, case) if case.planned else None
    if case.planned:
        begun = None if change is None else change[0].t_unix
        run.seconds = None if change is None else change[2].t_unix - change[1].t_unix
        run.gap = run.gap or run.seconds
    else:
        begun = injected[-1] if injected else None
        failure = next(f for f in summary["failures"] if f["injected"])
        run.seconds = failure["recovered_s"]
        run.phases = {**failure["phases"], "other": failure["other_s"]}
    if begun is not None:
        run.step = plain_step([s for s in steps if s.t <= begun])
    if case.pair and begun is not None and run.seconds is not None:
        first = begun + run.seconds if change is None else change[2].t_unix
        run.step = plain_step([s for s in steps if s.t >= first])
    run.redone = summary["steps_redone"]
    run.committed_redone = summary["committed_steps_redone"]
    return run


def plain_step(steps: Steps) -> float | None:
    """Return the median time between two of the last steps; None: there are too few."""
    first: dict[int, float] = {}
    for step in sorted(steps):  # several ranks may tell of one
        first.setdefault(step.step, step.t)
    times = list(first.values())[-10:]
    return median([later - earlier for earlier, later in pairwise(times)])


def account(name: str, steps: Steps, since: float) -> Run | None:
    """Return what a kill, or in case `growth` a return, at `since` cost; None: it is not over.

    Whoever completes a step afterwards is another process, or as many as before no longer.
    """
    steps = sorted(steps)
    before = [step for step in steps if step.t <= since]
    old, newest = {step.by for step in before}, before[-1]
    fresh = [s for s in steps[len(before) :] if s.by not in old or s.ranks != newest.ranks]
    rejoins = name.endswith(("worker", "growth"))
    nodes = CASES[name].nodes
    end = next((s for s in fresh if s.ranks == nodes or not rejoins), None)
    if end is None:
        return None
    times = [newest.t, *(s.t for s in steps[len(before) :] if s.t <= end.t)]
    gap = max(later - earlier for earlier, later in pairwise(times))
    return Run(
        gap if name.endswith("growth") else fresh[0].t - since,
        gap=gap,
        step=plain_step(before),
        rejoin=end.t - since if rejoins else None,
        redone=max(newest.step + 1 - fresh[0].step, 0),
    )


def peer(system: str, name: str, folder: Path) -> Run:
    """Run a peer with one fault.

    Raises:
        NotStartedError: there was nothing to strike.
    """
    job = write_job(folder, Case((), steps=ENDLESS))
    whole = partial(trains_whole, num_nodes=NODES, past_step=FAULT_STEP)
    with PeerCluster(system, job, folder, NODES) as cluster:
        cluster.wait_until(lambda steps: whole(steps, psutil.pid_exists))
        nodes, struck = cluster.training(), time.time()
        if name == "worker":
            cluster.kill_worker(nodes[1])
        else:
            cluster.kill_node(0 if name == "coordinator" else nodes[2])
        if name == "growth":
            if recovery_from(cluster, "node", struck).seconds is None:
                return Run(None)
            struck = time.time()
            cluster.start_node(nodes[2])
        return recovery_from(cluster, name, struck)


def recovery_from(cluster: PeerCluster, name: str, since: float) -> Run:
    """Wait for the end of a case, or of the agents."""
    deadline = time.monotonic() + NEVER_S
    while time.monotonic() < deadline:
        if (run := account(name, cluster.steps(), since)) is not None:
            return run
        if len(cluster.left()) == len(cluster.agents):
            return Run(None)
        time.sleep(0.02)
    say(cluster.tail())
    return Run(None)


def measure(system: str, name: str) -> Run:
    """Run one system once."""
    run = partial(holdfast, name) if system == "holdfast" else partial(peer, system, name)
    return in_own_folder(f"{system} {name}", run)


def repeat(system: str, name: str, repeats: int) -> list[Run]:
    """Run a case `repeats` times; once only when a peer never recovers from it."""
    runs: list[Run] = []
    for turn in range(repeats):
        runs.append(measure(system, name))
        say(f"{system} {name} {turn + 1}/{repeats}: {runs[-1]}")
        if runs[-1].seconds is None and system != "holdfast":
            break  # its agents leave when the store is gone
    return runs


def row(system: str, name: str, runs: Sequence[Run]) -> list[object]:
    """Return the table's row of a case."""
    middle = median([run.seconds for run in runs])
    known = [round(run.seconds, 2) for run in runs if run.seconds is not None]
    out: list[object] = [system, name, "never" if middle is None else middle]
    out += [min(known, default="-"), max(known, default="-"), len(runs)]
    steps = [run.step for run in runs if run.step is not None]
    out += [median(steps) or "-"]
    extra = [run.gap for run in runs], [run.rejoin for run in runs]
    out += [shown if (shown := median(x)) is not None else "-" for x in extra]
    redone = [run.redone for run in runs if run.redone is not None]
    committed = [run.committed_redone for run in runs if run.committed_redone is not None]
    explained = [run.explained for run in runs if run.explained is not None]
    out += [max(redone, default="-"), max(committed, default="-")]
    return [*out, f"{min(explained):.1%}" if explained else "-"]


HEADER = ["system", "killed", "median s", "min s", "max s", "runs"]
HEADER += [
    "plain step s",
    "longest gap s",
    "rejoin s",
    "steps redone",
    "of them committed",
    "explained by the phases",
]


def result(system: str, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return what the JSON line says of one system."""
    out: dict[str, Any] = {name: median([r.seconds for r in rs]) for name, rs in runs.items()}
    for name in {"growth", "pair_growth"} & runs.keys():
        out[name.replace("growth", "rejoin")] = median([run.rejoin for run in runs[name]])
    out["beyond_a_step"] = {n: median([r.beyond_a_step for r in rs]) for n, rs in runs.items()}
    if system == "holdfast":
        every = [run for rs in runs.values() for run in rs]
        out["committed_steps_redone"] = max((r.committed_redone or 0 for r in every), default=0)
        out["steps_redone"] = max((r.redone or 0 for r in every), default=0)
        explained = [r.explained for r in every if r.explained is not None]
        out["explained"] = min(explained, default=None)
    return out


def phase_rows(runs: Mapping[str, Sequence[Run]]) -> list[list[object]]:
    """Return the medians of holdfast's phases."""
    rows: list[list[object]] = []
    for name, rs in runs.items():
        names = dict.fromkeys(phase for run in rs for phase in run.phases)
        rows += [[name, p, median([run.phases.get(p, 0.0) for run in rs])] for p in names]
    return rows


def own_cases() -> tuple[str, ...]:
    """Return holdfast's cases, those of a Trainer only where it is installed."""
    installed = importlib.util.find_spec("accelerate") is not None
    return tuple(name for name, case in CASES.items() if installed or not case.trainer)


@click.command(help=__doc__.split("\n")[0])
@click.option("--repeats", type=int, help="Runs of every case.")
@click.option("--only", default=",".join(("holdfast", *SYSTEMS)), help="Some of them, or families.")
@click.option("--cases", default=",".join(CASES), show_default=True, help="Some of them.")
@OUT
def main(repeats: int | None, only: str, cases: str, out: Path | None) -> None:
    """Measure everything and print the tables and the JSON line."""
    where = machine()
    say(f"recovery ({where})")
    results: dict[str, Any] = {}
    rows, phases, notes = [], [], []
    for system in ("holdfast", *SYSTEMS):
        if not system.startswith(tuple(only.split(","))):
            continue
        if reason := why_not(system):
            notes.append(f"{system} was left out: {reason}")
            continue
        known = SYSTEMS[system].cases if system in SYSTEMS else own_cases()
        runs = {
            name: repeat(system, name, repeats or REPEATS.get(system, 3))
            for name in CASES
            if name in cases.split(",") and name in known
        }
        results[system] = result(system, runs)
        rows += [row(system, name, rs) for name, rs in runs.items()]
        if system == "holdfast":
            phases = phase_rows(runs)
    text = "\n\n".join([f"recovery ({where})", table(HEADER, rows), *notes])
    if phases:
        text += "\n\n" + table(["killed", "phase of holdfast", "median s"], phases)
    write_out(text + "\n\n" + json.dumps(results), out)


if __name__ == "__main__":
    main()
