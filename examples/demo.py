"""`make demo`: a training run loses nodes, reshards, continues, and learns the same.

1. Trains a small Llama on the standard library's sources over four emulated
   nodes of two workers, with data, pipeline and tensor parallelism. A node dies, then
   the coordinator's, then another, then one comes back; the layout follows.
2. Repeats, with one process from the same state, the steps after each of these.
3. Trains the same undisturbed three times, on 4, 2 and 1 nodes.
4. Says whether all agree (examples/agreement.py), and draws everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState, Commit
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout, layout_label
from elastic_trainer.record.events import Event
from examples.agreement import NEAR_STEPS, NEAR_TOLERANCE, Curve, Far, Near, far, near
from launcher.local.job import AttemptResult, PreparedRun, execute, prepare_new
from launcher.local.run import Interrupts
from launcher.record import timeline
from launcher.record.status import TrainingStatus
from launcher.runs.reports.data import report_data, seconds_or_dash
from launcher.runs.reports.report import write_report
from launcher.runs.run_dir import create
from launcher.runs.watching.screen import LiveView, PlainView, View
from launcher.spec.errors import HoldfastError

JOB = Path(__file__).with_name("demo.yaml")
CORPUS_BYTES = 4_000_000
FAULTS = ("kill-node:2@19", "kill-coordinator@35", "kill-coordinator@51", "return-node@61")
"""Whichever node coordinates, three are killed. The last fault is early enough that the node, which
must start first, joins well before the end."""
UNDISTURBED_NODES = (4, 2, 1)
"""Different layouts add the same numbers in different orders."""


class DemoError(Exception):
    """A part of the demonstration did not end as it should."""


@dataclass
class Stage:
    """Where the demonstration keeps its runs, and how it shows them."""

    folder: Path
    console: Console

    def view(self) -> View:
        """Return a fresh view: redrawn on a terminal, lines elsewhere."""
        if self.console.is_terminal:
            return LiveView(self.console)
        return PlainView(self.console.file, every_s=2.0)

    def say(self, text: str) -> None:
        """Print a heading."""
        self.console.print(f"\n[bold]{text}[/bold]")


class UntilStep(View):
    """Draws nothing, and asks for the end once `step` is done, twice: no need to save."""

    def __init__(self, step: int, interrupts: Interrupts) -> None:
        self._step, self._interrupts = step, interrupts

    def update(self, status: TrainingStatus, lines: list[str]) -> None:  # noqa: ARG002
        """Look whether it is enough."""
        if status.step >= self._step and status.state == "training":
            self._interrupts.count = 2


def write_corpus(path: Path) -> int:
    """Write the standard library's sources to `path`, the first CORPUS_BYTES; return the size."""
    text = bytearray()
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(text[:CORPUS_BYTES]))
    return min(len(text), CORPUS_BYTES)


def train(
    stage: Stage,
    name: str,
    corpus: Path,
    *,
    nodes: int,
    faults: Sequence[str] = (),
    sets: Sequence[str] = (),
) -> AttemptResult:
    """Run the demo's job on `nodes` nodes to its end.

    Raises:
        DemoError: it did not finish.
    """
    prepared = prepare_new(
        JOB,
        nodes=nodes,
        faults=faults,
        sets=[f"data.path={corpus}", *sets],
        run_dir=stage.folder / name,
        stamp=name,
    )
    outcome = execute(prepared, interrupts=Interrupts(), view=stage.view())
    if outcome.code != 0:
        why = "\n".join(outcome.why.lines())
        raise DemoError(f"the run {outcome.run_dir} did not finish:\n{why}")
    return outcome


def curve_of(events: Sequence[Event]) -> dict[int, float]:
    """Return step -> loss of the steps that count."""
    counted = timeline.lineage(timeline.epochs(events))
    return {done.step: done.loss for done in counted if done.loss is not None}


def transitions(outcome: AttemptResult) -> list[tuple[str, int]]:
    """Return (what changed, step whose state the new epoch started from)."""
    spans = timeline.epochs(outcome.events)
    found = []
    for before, after in itertools.pairwise(spans):
        if after.resume_step is None:
            continue  # it ended before it had begun
        nodes = f"{len(before.members)} → {len(after.members)} nodes"
        what = f"{nodes}, {layout_label(before.layout)} → {layout_label(after.layout)}"
        found.append((what, after.resume_step))
    return found


def newest_commit(run_dir: Path, step: int) -> Commit:
    """Return the newest checkpoint of at most `step`.

    Raises:
        DemoError: there is none.
    """
    state = FileBoard(run_dir / "board").get_state()
    commits = BoardState.decode(state[0]).commits if state else ()
    fitting = [commit for commit in commits if commit.step <= step]
    if not fitting:
        raise DemoError(f"{run_dir} has no checkpoint up to step {step}")
    return max(fitting, key=lambda commit: commit.step)


def one_process(stage: Stage, source: AttemptResult, step: int) -> dict[int, float]:
    """Return the losses of one process, without any parallelism, around `source`'s `step`.

    It starts from the checkpoint before: the transition itself went through memory.
    """
    commit = newest_commit(source.run_dir, step)
    text = (source.run_dir / "job.rendered.json").read_text(encoding="utf-8")
    config = TrainConfig.from_json(text)
    run_dir = stage.folder / f"one-process-past-{step}"
    checkpoints = run_dir / "checkpoints"
    train = config.train
    alone = Rung(
        num_nodes=1,
        layout=ParallelLayout(),
        micro_batches=train.global_batch // train.micro_batch,
    )
    config = dataclasses.replace(
        config,
        run_id=f"{config.run_id}-past-{step}",
        ladder=Ladder((alone,)),
        gpus_per_node=1,
        checkpoint=dataclasses.replace(config.checkpoint, dir=str(checkpoints), every_steps=None),
    )
    create(run_dir, {"job.json": config.to_json()})
    shutil.copytree(Path(source_checkpoints(text)) / commit.dir, checkpoints / commit.dir)
    state = BoardState(epoch=commit.epoch, commits=(commit,))
    FileBoard(run_dir / "board").set_state(state.encode(), None)
    interrupts = Interrupts()
    outcome = execute(
        PreparedRun(run_dir=run_dir, rendered=config, narrowed=config, num_nodes=1, faults=()),
        interrupts=interrupts,
        view=UntilStep(step + NEAR_STEPS, interrupts),
    )
    return curve_of(outcome.events)


def source_checkpoints(job_json: str) -> str:
    """Return the checkpoint directory that a job.json names."""
    return TrainConfig.from_json(job_json).checkpoint.dir


def show_what_happened(console: Console, outcome: AttemptResult) -> None:
    """Print failures and layouts of the disturbed run."""
    summary = outcome.summary
    table = Table("failure", "node", "after step", "detected", "recovered", "steps redone")
    for failure in summary["failures"]:
        table.add_row(
            failure["injected"] or failure["kind"],
            failure["node"],
            str(failure["step"]),
            seconds_or_dash(failure["detected_s"]),
            seconds_or_dash(failure["recovered_s"]),
            str(failure["steps_redone"]),
        )
    for growth in summary["growths"]:
        joined = " ".join(growth["joined"])
        pause = seconds_or_dash(growth["pause_s"])
        table.add_row("(node joined)", joined, str(growth["step"]), "", pause, "0")
    console.print(table)
    table = Table("steps", "layout", "nodes")
    for entry in summary["layouts"]:
        steps = f"{entry['from_step']} to {entry['to_step']}"
        table.add_row(steps, layout_label(entry["layout"]), " ".join(entry["nodes"]))
    console.print(table)
    console.print(
        f"samples lost {summary['samples_lost']}, repeated {summary['samples_repeated']}; "
        f"steps redone {summary['steps_redone']}; "
        f"final loss {summary['final_loss']:.4f}; goodput {summary['goodput']:.0%} "
        f"of {summary['wall_s']:.1f} s"
    )


def agreement_text(nears: Sequence[Near], whole: Far) -> str:
    """Return the agreement in words."""
    lines = [
        (
            f"{NEAR_STEPS} steps after each transition, against one process from the checkpoint "
            f"before (at most {NEAR_TOLERANCE:g} relative):"
        )
    ]
    for item in nears:
        verdict = "agrees" if item.ok else "DISAGREES"
        if item.num_steps < NEAR_STEPS:
            verdict = "too few steps followed, cannot be compared"
        lines.append(
            f"  {item.what}, from step {item.step}: {item.num_steps} steps, "
            f"largest difference {item.worst:.1e}: {verdict}"
        )
    listed = ", ".join(str(nodes) for nodes in UNDISTURBED_NODES)
    lines += [
        f"whole curve, {whole.num_steps} steps, against undisturbed runs on {listed} nodes:",
        f"  those differ from each other by up to {whole.spread:.1e}",
        f"  the disturbed run differs from the nearest of them by up to {whole.deviation:.1e}: "
        + ("agrees" if whole.ok else "DISAGREES"),
    ]
    return "\n".join(lines)


def demo(stage: Stage) -> bool:
    """Run everything; return whether all agrees.

    Raises:
        DemoError: a run did not end as it should.
    """
    began = time.monotonic()
    corpus = stage.folder / "corpus" / "stdlib.txt"
    size = write_corpus(corpus)
    stage.say(f"Training on 4 emulated nodes of 2 ({size / 1e6:.1f} MB of text), with faults:")
    stage.console.print("  " + "  ".join(FAULTS))
    disturbed = train(stage, "disturbed", corpus, nodes=4, faults=FAULTS)
    stage.say("What happened")
    show_what_happened(stage.console, disturbed)

    run = curve_of(disturbed.events)
    nears = []
    for what, step in transitions(disturbed):
        stage.say(f"One process from the checkpoint before step {step} ({what})")
        nears.append(near(what, step, run, one_process(stage, disturbed, step)))

    undisturbed: dict[str, Curve] = {}
    for nodes in UNDISTURBED_NODES:
        stage.say(f"The same training, undisturbed, on {nodes} nodes")
        name, rare = f"undisturbed-{nodes}", "checkpoint.every_steps=1000"
        outcome = train(stage, name, corpus, nodes=nodes, sets=[rare])
        undisturbed[f"undisturbed, {nodes} nodes"] = curve_of(outcome.events)
    whole = far(run, list(undisturbed.values()))

    stage.say("Agreement")
    text = agreement_text(nears, whole)
    stage.console.print(text, highlight=False)
    draw(stage, disturbed, undisturbed, text)
    stage.console.print(f"[dim]{time.monotonic() - began:.0f} s in all[/dim]")
    layouts = {layout_label(entry["layout"]) for entry in disturbed.summary["layouts"]}
    stage.console.print(f"{len(layouts)} layouts: {', '.join(sorted(layouts, reverse=True))}")
    complete = len(nears) >= len(FAULTS) and disturbed.summary["samples_lost"] in (0, None)
    complete = complete and len(layouts) >= 3
    redone = disturbed.summary["steps_redone"]
    stage.console.print(f"{redone} steps redone after {len(FAULTS)} faults")
    complete = complete and disturbed.summary["committed_steps_redone"] == 0
    return complete and whole.ok and all(item.ok for item in nears)


def draw(
    stage: Stage, disturbed: AttemptResult, undisturbed: dict[str, Curve], agreement: str
) -> None:
    """Write report.html and report.png, and say where they are."""
    data = report_data(
        disturbed.events,
        disturbed.summary,
        title="Holdfast demo: four nodes, three lost, one back",
        extra={label: sorted(curve.items()) for label, curve in undisturbed.items()},
        notes=[("Agreement with undisturbed training", agreement)],
    )
    for name in ("report.html", "report.png"):
        write_report(data, stage.folder / name)
        stage.console.print(f"picture: {stage.folder / name}", highlight=False, soft_wrap=True)


def main() -> int:
    """Run the demonstration in ./runs/demo/<time>; return 0 when everything agrees."""
    folder = Path("runs", "demo").absolute() / time.strftime("%Y%m%d-%H%M%S")
    stage = Stage(folder, Console())
    try:
        agrees = demo(stage)
    except (DemoError, HoldfastError) as error:
        stage.console.print(f"[red]the demo failed:[/red] {error}", highlight=False)
        return 1
    if not agrees:
        stage.console.print("[red]not all of this could be shown to agree, see above[/red]")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
