"""What it costs to ask a large run that has failed many times how it is.

    python benchmarks/record.py [--nodes 2048,12500] [--failures 0,20,419] [--folder DIR]

Writes the record of a run of `--nodes` nodes with eight workers each, by the writers that agents
and workers use, as it is after so many lost nodes, each after `--steps` steps. Then it starts each
command that a person or a daemon would, and prints a table, and last a JSON line: seconds of
processor time and MiB of memory of each, and MiB that a failure adds to the record.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from common import OUT, ROOT, environment, machine, say, table, write_out

from elastic_trainer.record.event_log import NODE_BYTES, EventLog
from elastic_trainer.record.hostlist import folded
from launcher.record.files import LauncherLog
from launcher.runs.runs import find_run
from launcher.runs.watching.screen import Page, screen
from launcher.runs.watching.watch import Following

HOLDFAST = (sys.executable, "-P", "-m", "launcher.cli.main")
WORKERS = 8
LAYOUT = "dp8-pp16-cp16-tp8"
STEP_S, START_S = 10.0, 30.0
KEPT_STARTS = 300
"""Older ones are no longer in a node's own file."""
BEGAN_UNIX = 1795000000.0
MONTH_FAILURES = 30 * 24 * 60 // 18
PICTURE_S = 5.0
"""A picture is due by then."""
COMMANDS = {
    "status": ("status", "{run}"),
    "list": ("list", "--runs", "{folder}"),
    "why": ("why", "{run}"),
    "metrics": ("metrics", "--runs", "{folder}", "--once"),
    "report": ("report", "{run}", "-o", "{folder}/report.html"),
}


@dataclass
class Clock:
    """The time that writers put into events."""

    t: float = BEGAN_UNIX

    def __call__(self) -> float:
        """Return seconds since 1970."""
        return self.t


def name(index: int) -> str:
    """Return a node's name."""
    return f"gpu-r{index // 16:03d}-n{index % 16:02d}"


def write_record(run: Path, nodes: int, failures: int, steps: int) -> None:
    """Write what a run with so many lost nodes, `steps` steps apart, has on record."""
    clock = Clock()
    members = [name(index) for index in range(nodes)]
    LauncherLog(run, "launcher-1", wall=clock).emit("run.started", attempt=1, nodes=nodes)
    lead = EventLog(run, f"agent-{members[0]}", node=members[0], wall=clock, mono=clock)
    first = EventLog(run, f"worker-{members[0]}-0", node=members[0], rank=0, wall=clock, mono=clock)
    lead.emit("coordinator.elected", term=1, previous=None, host=members[0], address="10.0.0.1")
    for index, member in enumerate(members[1:], 1):
        about = {"member": member, "host": member, "address": f"10.0.{index >> 8}.{index & 255}"}
        lead.emit("member.joined", **about)
    reason, step, starts = "start", 0, []
    for epoch in range(1, failures + 2):
        lead.epoch = first.epoch = epoch
        starts.append(clock.t)
        lead.emit(
            "epoch.formed", members=folded(members), spares=[], rung=nodes, layout=LAYOUT,
            coordinator=members[0], reason=reason,
        )  # fmt: skip
        clock.t += START_S
        first.emit("recovery.phase", phase="process_group", seconds=9.0)
        first.emit("recovery.phase", phase="restore", seconds=4.0)
        first.emit(
            "trainer.started", step=step, layout=LAYOUT, resume_step=step, restored_from="memory"
        )
        for _ in range(steps):
            step += 1
            clock.t += STEP_S
            first.emit("step.committed", step=step - 1, source="memory")
            first.emit(
                "step.completed", step=step, loss=2.1, grad_norm=0.5, tokens=1 << 24, step_s=STEP_S,
                lr=8e-5, loss_tokens=1 << 24,
            )  # fmt: skip
        lead.emit("recovery.phase", phase="fork", seconds=0.1, member=members[-1])
        if epoch <= failures:
            victim = members[1 + 7 * epoch % (nodes - 1)]
            ended = "its connection ended and its address refuses another"
            lead.emit("member.lost", member=victim, host=victim, reason=ended)
            reason = f"node lost: {victim}: {ended}"
            lead.emit("epoch.aborted", reason=reason, victims=[victim], kind=None)
            lead.emit("member.joined", member=victim, host=victim, address="10.0.0.2")
    lead.close(60.0)
    first.close(60.0)
    for index, member in enumerate(members):
        own = EventLog(run, f"agent-{member}", node=member, wall=clock, mono=clock)
        clock.t = BEGAN_UNIX
        own.emit_here("agent.started", pid=4000, host=member, address="10.0.0.1", port=29400)
        for epoch, began in list(enumerate(starts, 1))[-KEPT_STARTS:]:
            clock.t, own.epoch = began + 1.0, epoch
            pids = [1_000_000 + epoch * WORKERS + rank for rank in range(WORKERS)]
            own.emit_here(
                "workers.started", first_rank=index * WORKERS, pids=pids, how="zygote", why=None
            )
        own.close(60.0)


def size_mib(folder: Path) -> float:
    """Return the size of a part of a run's record."""
    return sum(path.stat().st_size for path in folder.iterdir()) / 2**20


def cost(words: list[str]) -> dict[str, float]:
    """Return processor seconds and MiB of a command of ours."""
    command = [*HOLDFAST, *words]
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            command, env={**environment(), "PYTHONPATH": str(ROOT)}, stdout=out, stderr=out
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        said = out.read().decode(errors="replace")
    if process.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}:\n{said}")
    return {
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "mib": round(usage.ru_maxrss / 1024),
    }


def measured(folder: Path, nodes: int, failures: int, steps: int) -> dict[str, Any]:
    """Make a run, and return what each command costs."""
    run = folder / f"n{nodes}-f{failures}" / "run"
    if not run.exists():
        run.parent.mkdir(parents=True)
        job = str(ROOT / "examples" / "llama3-405b.yaml")
        subprocess.run(
            [*HOLDFAST, "render", job, "--to", "slurm", "-o", str(run)],
            env={**environment(), "PYTHONPATH": str(ROOT)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        begun = time.monotonic()
        write_record(run, nodes, failures, steps)
        say(f"{run}: written in {time.monotonic() - begun:.0f} s")
    where = {"run": str(run), "folder": str(run.parent)}
    costs = {}
    for command, words in COMMANDS.items():
        costs[command] = cost([word.format(**where) for word in words])
        say(f"{nodes} nodes, {failures} failures: {command} {costs[command]}")
    mib = {f"{part}_mib": round(size_mib(run / part), 2) for part in ("events", "nodes")}
    return {**mib, **costs, "redraw_s": redraw_s(run)}


def redraw_s(run: Path) -> float:
    """Return the processor seconds in which `watch` takes a step in and draws its slowest page.

    With the picture of the run, which is made anew every other look or more seldom.
    """
    following = Following(find_run(str(run), run.parent))
    following.look()
    screen(following.known, Page.OVERVIEW, width=200, height=60)
    taken = []
    for page in Page:
        LauncherLog(run, "worker-last", wall=time.time).emit("step.completed", step=1, tokens=1)
        time.sleep(PICTURE_S)
        begun = time.process_time()
        following.look()
        screen(following.known, page, width=200, height=60)
        taken.append(time.process_time() - begun)
    return round(max(taken), 3)


def per_failure(found: dict[int, dict[str, Any]]) -> float | None:
    """Return the MiB that one of the first failures adds; None: fewer than two were measured."""
    fewest, *others = sorted(found)
    if not others:
        return None
    grown = [found[lost]["events_mib"] + found[lost]["nodes_mib"] for lost in (others[0], fewest)]
    return round((grown[0] - grown[1]) / (others[0] - fewest), 3)


def month_gb(found: dict[int, dict[str, Any]], nodes: int) -> float:
    """Return the size of a month's record, a failure every 18 minutes, the nodes' files full."""
    most = max(found)
    events = found[most]["events_mib"] * 2**20 / max(1, most) * MONTH_FAILURES
    return round((events + 2 * NODE_BYTES * nodes) / 1e9, 2)


@click.command()
@click.option("--nodes", default="2048,12500", show_default=True)
@click.option("--failures", default="0,20,419", show_default=True)
@click.option("--steps", default=108, show_default=True, help="Steps of 10 s between two.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the records here.")
@OUT
def main(nodes: str, failures: str, steps: int, folder: Path | None, out: Path | None) -> None:
    """Measure what questions about large runs cost."""
    where, result, rows = machine(), {}, []
    with tempfile.TemporaryDirectory() as temporary:
        for each in map(int, nodes.split(",")):
            found = {
                lost: measured(folder or Path(temporary), each, lost, steps)
                for lost in map(int, failures.split(","))
            }
            costs = {f"f{lost}": row for lost, row in found.items()}
            sizes = {"mib_per_failure": per_failure(found), "month_gb": month_gb(found, each)}
            result[f"n{each}"] = {**sizes, **costs}
            for lost, row in found.items():
                cells = [f"{row[key]['cpu_s']} s, {row[key]['mib']} MiB" for key in COMMANDS]
                rows.append(
                    [
                        each,
                        lost,
                        row["events_mib"],
                        row["nodes_mib"],
                        *cells,
                        f"{row['redraw_s']} s",
                    ]
                )
    text = table(
        ["nodes", "failures", "events, MiB", "nodes, MiB", *COMMANDS, "redraw of watch"], rows
    )
    write_out(f"{where}\n\n{text}\n\n{json.dumps(result)}", out)


if __name__ == "__main__":
    main()
