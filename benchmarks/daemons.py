"""What the programs that follow runs for weeks hold and take.

    python benchmarks/daemons.py [--days 30] [--out FILE]

A month is played for each of `metrics`, `notify`, `track` and `watch`, in a process of its own: a
folder in which ten runs of 64 nodes train, a hundred in 30 days, and each loses a node every six
hours, after which the program looks. Events are written by the writers that agents use. Prints
memory and processor time of a look, of the third lives of runs and of the last ones, and last a
JSON line.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import click
from common import OUT, ROOT, environment, machine, say, table, write_out
from record import BEGAN_UNIX, HOLDFAST, Clock, name

from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.hostlist import folded
from launcher.cli.notify import RunFollower
from launcher.record.files import LauncherLog
from launcher.record.notices import KINDS
from launcher.runs.reports.metrics import RunsCollector
from launcher.runs.reports.tracking import TrackedRun
from launcher.runs.runs import StoredRun, find_run
from launcher.runs.watching.screen import Page, screen
from launcher.runs.watching.watch import Following

NODES, ALIVE, LIFE_DAYS, LOOKS = 64, 10, 3, 4
"""Nodes of a run, runs at a time, days of a run, looks and failures a day."""
STEPS, STEP_S = 100, 200.0


class Nowhere:
    """A tracker that keeps nothing: it is the daemon that is measured."""

    step = 0

    def write(self, points: list[Any]) -> None:
        """Take the points."""
        self.step = points[-1].step

    def close(self, *, finished: bool) -> None:
        """Do nothing."""


class Played:
    """A run that trains."""

    def __init__(self, run: Path, clock: Clock) -> None:
        self.run, self.clock, self.epoch, self.step = run, clock, 0, 0
        self.members = [name(index) for index in range(NODES)]
        first = self.members[0]
        log: dict[str, Any] = {"wall": clock, "mono": clock}
        self.lead = EventLog(run, f"agent-{first}", node=first, **log)
        self.first = EventLog(run, f"worker-{first}-0", node=first, rank=0, **log)
        self.launcher = LauncherLog(run, "launcher-1", wall=clock)
        self.launcher.emit("run.started", attempt=1, nodes=NODES)

    def go_on(self) -> None:
        """Form an epoch, train, and lose a node."""
        self.epoch += 1
        self.lead.epoch = self.first.epoch = self.epoch
        lead, first, step = self.lead, self.first, self.step
        about = {"layout": "dp64", "coordinator": self.members[0], "reason": "start"}
        lead.emit("epoch.formed", members=folded(self.members), spares=[], rung=NODES, **about)
        first.emit("trainer.started", step=step, layout="dp64", resume_step=step)
        for _ in range(STEPS):
            self.step += 1
            self.clock.t += STEP_S / ALIVE
            first.emit("step.committed", step=self.step - 1, source="memory")
            figures = {"loss": 2.1, "grad_norm": 0.5, "tokens": 1 << 20, "step_s": STEP_S}
            first.emit("step.completed", step=self.step, lr=8e-5, **figures)
        victim = self.members[1 + self.epoch % (NODES - 1)]
        lead.emit("member.lost", member=victim, host=victim, reason="its connection ended")
        lead.emit("epoch.aborted", reason=f"node lost: {victim}", victims=[victim], kind=None)
        self.lead.close(60.0)
        self.first.close(60.0)

    def end(self) -> None:
        """Write that it has done its last step."""
        self.launcher.emit("run.ended", code=0, reason="done")


def looks_of(daemon: str, folder: Path, clock: Clock) -> Callable[[], object]:
    """Return what the daemon does at each look."""
    if daemon == "metrics":
        from prometheus_client import generate_latest

        collector = RunsCollector(folder, wall=clock)
        registry = collector.registry()
        return lambda: (collector.poll(), generate_latest(registry))
    if daemon == "notify":
        follower = RunFollower(folder, KINDS)
        return follower.poll
    tracked: dict[Path, TrackedRun | None] = {}
    following: dict[Path, Following] = {}

    def track() -> None:
        for path in sorted(folder.iterdir()):
            if path not in tracked:
                tracked[path] = TrackedRun(
                    path, run_id=path.name, trackers=["csv"], writer="w", wall=clock, say=say,
                    opened=lambda *_: Nowhere(),
                )  # fmt: skip
        for path, each in tracked.items():
            if each is not None:
                each.poll()
                tracked[path] = None if each.is_over else each

    def watch() -> None:
        first = min(folder.iterdir())
        followed = following.setdefault(first, Following(found(first)))
        followed.look()
        screen(followed.known, Page.OVERVIEW, width=160, height=50)

    return {"track": track, "watch": watch}[daemon]


def found(run: Path) -> StoredRun:
    """Return the run of a folder."""
    return find_run(str(run), run.parent)


def rss_mib() -> float:
    """Return the memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def play(daemon: str, days: int) -> dict[str, float]:
    """Play the month; return memory and processor seconds of a look, to day 9 and to the last."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, clock = Path(temporary) / "runs", Clock()
        model = Path(temporary) / "model"
        job = str(ROOT / "examples" / "llama3-405b.yaml")
        command = [*HOLDFAST, "render", job, "--to", "slurm", "-o", str(model)]
        subprocess.run(command, env={**environment(), "PYTHONPATH": str(ROOT)}, check=True,
                       stdout=subprocess.DEVNULL)  # fmt: skip
        folder.mkdir()
        look: Callable[[], object] | None = None
        alive: list[Played] = []
        taken: dict[int, list[float]] = {}
        held: dict[int, float] = {}
        started = 0
        lives = days if daemon == "watch" else LIFE_DAYS
        for day in range(1, days + 1):
            for part in range(LOOKS):
                for old in [each for each in alive if each.epoch >= lives * LOOKS]:
                    old.end()
                    alive.remove(old)
                while len(alive) < (1 if daemon == "watch" else ALIVE):
                    shutil.copytree(model, folder / f"run-{started:03}")
                    alive.append(Played(folder / f"run-{started:03}", clock))
                    started += 1
                for each in alive:
                    each.go_on()
                clock.t = max(clock.t, BEGAN_UNIX + (day - 1 + (part + 1) / LOOKS) * 86400.0)
                look = look or looks_of(daemon, folder, clock)
                begun = time.process_time()
                look()
                taken.setdefault(day, []).append(time.process_time() - begun)
            held[day] = rss_mib()
        mib, cpu_s = {}, {}
        for last in (LIFE_DAYS * 3, days):
            lived = range(max(1, last - LIFE_DAYS + 1), min(last, days) + 1)
            mib[last] = max(held[day] for day in lived)
            cpu_s[last] = mean(second for day in lived for second in taken[day])
        return {
            "runs": started,
            "mib_day9": round(mib[9], 1),
            "mib_last": round(mib[days], 1),
            "cpu_s_day9": round(cpu_s[9], 3),
            "cpu_s_last": round(cpu_s[days], 3),
            "mib_ratio": round(mib[days] / mib[9], 3),
            "cpu_ratio": round(cpu_s[days] / cpu_s[9], 3),
        }


@click.command()
@click.option("--days", type=click.IntRange(9), default=30, show_default=True)
@click.option("--daemon", hidden=True, help="Play this one here.")
@OUT
def main(days: int, daemon: str | None, out: Path | None) -> None:
    """Measure what daemons hold after a month."""
    if daemon is not None:
        click.echo(json.dumps(play(daemon, days)))
        return
    where, result = machine(), {}
    for each in ("metrics", "notify", "track", "watch"):
        command = [sys.executable, __file__, "--daemon", each, "--days", str(days)]
        done = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE)
        result[each] = json.loads(done.stdout)
        say(f"{each}: {result[each]}")
    rows = [[each, *found.values()] for each, found in result.items()]
    header = ["daemon", "runs", "MiB to day 9", "last", "CPU s a look to day 9", "last", "x", "x"]
    write_out(f"{where}\n\n{table(header, rows)}\n\n{json.dumps(result)}", out)


if __name__ == "__main__":
    main()
