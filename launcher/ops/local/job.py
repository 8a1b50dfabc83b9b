"""`holdfast run` without the command line: prepare a run, execute it, sum it up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.command import UNKNOWN_STEPS
from elastic_trainer.config import TrainConfig
from elastic_trainer.events import Event
from elastic_trainer.ledger_audit import LedgerAudit, audit
from elastic_trainer.quantities import counted
from launcher import stop_request
from launcher.backends.base import JobId
from launcher.backends.local import LocalCluster
from launcher.errors import UserError
from launcher.installed import need
from launcher.jobspec.reading import load_spec
from launcher.live import live_problems
from launcher.ops import run_dir as run_dirs
from launcher.ops.checkpoints.commits import refuse_foreign
from launcher.ops.checkpoints.start_from import corpus_pin, start_from
from launcher.ops.local.chaos import Chaos, parse_chaos
from launcher.ops.local.faults import Fault, parse_faults
from launcher.ops.local.run import Interrupts, LocalRun
from launcher.ops.record.progress import Progress, View
from launcher.ops.record.record import LauncherLog, RunRecord
from launcher.ops.record.summary import summarise
from launcher.ops.record.timeline import layouts_of
from launcher.ops.record.verdict import CLI_DONE, Verdict, judge
from launcher.planning.search import plan
from launcher.render.local import render_local
from launcher.whole_file import write_json

SUMMARY = "summary.json"
MAX_NODES = 64
"""More emulated nodes than this would only fight over the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that is ready to start; its directory exists."""

    run_dir: Path
    rendered: TrainConfig
    """As rendered, with the whole ladder."""
    narrowed: TrainConfig
    """With the rungs that this attempt's nodes can run."""
    num_nodes: int
    faults: tuple[Fault, ...]
    chaos: Chaos | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one attempt."""

    run_dir: Path
    summary: dict[str, Any]
    verdict: Verdict
    events: list[Event]


def prepare_new(
    job: Path,
    *,
    nodes: int | None,
    faults: Sequence[str],
    chaos: str | None = None,
    sets: Sequence[str],
    run_dir: Path | None,
    stamp: str,
    start: str | None = None,
) -> Prepared:
    """Read, plan and render `job` into a new run directory.

    Args:
        job: path of the job file.
        nodes: nodes to emulate; None: those of the job.
        faults: arguments of `--fault`.
        chaos: argument of `--chaos`.
        sets: arguments of `--set`.
        run_dir: None: `./runs/<name>-<stamp>`.
        stamp: local time as text, to name the run.
        start: `RUN[@STEP]`, the checkpoint of another run to start from.

    Raises:
        UserError: anything wrong with the above; nothing is left behind.
    """
    spec = load_spec(job, sets)
    if spec.device != "cpu":
        raise UserError(
            "HF205",
            f"cluster.gpu: {spec.cluster.gpu} nodes cannot be emulated on this machine; "
            "use gpu: cpu (as in --set cluster.gpu=cpu), or submit the job to a real cluster",
        )
    folder = job.absolute().parent
    problems = live_problems(spec, folder)
    if problems:
        raise UserError.many(problems)
    run_id = f"{spec.name}-{stamp}"
    directory = (run_dir or Path("runs") / run_id).absolute()
    bundle = render_local(spec, plan(spec), run_id=run_id, run_dir=directory, base_dir=folder)
    rendered = TrainConfig.from_json(bundle[run_dirs.JOB_JSON])
    if start is not None:
        rendered = start_from(rendered, start, spec)
        assert rendered.start_from is not None
        pin = corpus_pin(rendered.start_from)
        bundle = {**bundle, run_dirs.JOB_JSON: rendered.to_json(), **pin}
    prepared = _prepared(directory, rendered, nodes=nodes, faults=faults, chaos=chaos)
    existed = directory.exists()
    refuse_foreign(rendered)
    run_dirs.create(directory, bundle)
    try:
        run_dirs.check_checkpoint_dir(rendered)
    except UserError:
        if not existed:
            shutil.rmtree(directory)  # it holds nothing but what was just rendered
        raise
    return prepared


def prepare_resume(
    run_dir: Path, *, nodes: int | None, faults: Sequence[str], chaos: str | None = None
) -> Prepared | None:
    """Return the next attempt of an earlier run; None: it has done its last step.

    Raises:
        UserError: no run directory, a live job on it, too few nodes, a wrong fault.
    """
    directory = run_dir.absolute()
    rendered = run_dirs.load(directory)
    run_dirs.refuse_if_live(directory)
    record = RunRecord(directory)
    if any(_is_end(event) for event in record.poll()):
        return None
    prepared = _prepared(directory, rendered, nodes=nodes, faults=faults, chaos=chaos)
    check_data(rendered)
    run_dirs.check_checkpoint_dir(rendered)
    stop_request.withdraw(directory)
    return prepared


def _prepared(
    directory: Path,
    rendered: TrainConfig,
    *,
    nodes: int | None,
    faults: Sequence[str],
    chaos: str | None,
) -> Prepared:
    """Return the attempt that the options ask for; nothing is made.

    Raises:
        UserError: HF632 torch is not here; too few nodes, a wrong fault.
    """
    need("a run on this machine", "torch", extra="train")
    num_nodes = nodes or rendered.ladder.max_nodes
    narrowed = _narrowed(rendered, num_nodes)
    return Prepared(
        run_dir=directory,
        rendered=rendered,
        narrowed=narrowed,
        num_nodes=num_nodes,
        faults=_faults(narrowed, num_nodes, faults),
        chaos=None if chaos is None else parse_chaos(chaos),
    )


def _is_end(event: Event) -> bool:
    """Return whether `event` says that the run has done all there is to do."""
    stopped = event.event == "job.stopped" and event.fields.get("code") == CLI_DONE
    return stopped or event.event == "trainer.finished"


def execute(prepared: Prepared, *, interrupts: Interrupts, view: View) -> Outcome:
    """Run one attempt to its end, and write summary.json. Leaves no process behind.

    Raises:
        UserError: another launcher runs this run directory.
        PermanentError: agents cannot be started.
    """
    directory, config = prepared.run_dir, prepared.narrowed
    job_id = JobId(f"local-{os.getpid()}-{os.urandom(3).hex()}")
    with ExitStack() as stack:
        stack.enter_context(run_dirs.LiveMark(directory, job_id))
        attempt = run_dirs.write_attempt(directory, prepared.rendered, config)
        cluster = stack.enter_context(
            LocalCluster(
                directory,
                run_id=config.run_id,
                job_id=job_id,
                attempt=attempt,
                num_nodes=prepared.num_nodes,
            )
        )
        log = LauncherLog(directory, f"launcher-{attempt}")
        record = RunRecord(directory)
        running = LocalRun(
            cluster=cluster,
            record=record,
            log=log,
            progress=Progress(
                name=config.run_id,
                start_step=start_step(config),
                total_steps=None if config.train.steps == UNKNOWN_STEPS else config.train.steps,
                num_nodes=prepared.num_nodes,
                layouts=layouts_of(config),
            ),
            view=stack.enter_context(view),
            faults=prepared.faults,
            chaos=prepared.chaos,
            interrupts=interrupts,
        )
        running.run()
        verdict = judge(
            directory,
            codes=cluster.codes(),
            events=record.events,
            interrupted=interrupts.count > 0,
        )
        log.emit("run.ended", code=verdict.code)
        record.poll()
    events = record.by_one_clock()
    summary = summarise(
        events,
        config=config,
        audit=audit_ledger(directory, config),
        code=verdict.code,
    )
    write_summary(directory, summary)
    return Outcome(run_dir=directory, summary=summary, verdict=verdict, events=events)


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> None:
    """Write summary.json, complete or not at all."""
    write_json(run_dir / SUMMARY, summary, indent=1)


def audit_ledger(run_dir: Path, config: TrainConfig) -> LedgerAudit | None:
    """Return the ledger's account of samples; None where no ledger was written.

    Complete lines only: a run that goes on may be writing its last one.
    """
    files = sorted((run_dir / "ledger").glob("*.jsonl"))
    if not files:
        return None
    lines = (
        [
            line
            for line in path.read_text(encoding="ascii").splitlines(keepends=True)
            if line[-1:] == "\n"
        ]
        for path in files
    )
    return audit(lines, global_batch=config.train.global_batch, start_step=start_step(config))


def start_step(config: TrainConfig) -> int:
    """Return the step whose state the run began with; 0 for initial values."""
    return config.start_from.step if config.start_from else 0


def check_data(config: TrainConfig) -> None:
    """Check that the corpus and the tokenizer of an earlier run are still there.

    Raises:
        UserError: HF201 one is not.
    """
    places = {"data.path": config.data.path, "data.tokenizer": config.data.tokenizer}
    for key, name in places.items():
        if name != "bytes" and not Path(name).exists():
            raise UserError("HF201", f"{key}: {name} does not exist any more; put it back")


def closing_lines(outcome: Outcome) -> str:
    """Return what a finished run says last."""
    summary = outcome.summary
    loss, goodput = summary["final_loss"], summary["goodput"]
    what = counted(summary["steps"], "step")
    if summary["start_step"]:
        what = f"steps {summary['start_step'] + 1} to {summary['steps']}"
    parts = [f"finished: {what} in {summary['wall_s']:.1f} s"]
    if loss is not None:
        parts.append(f"final loss {loss:.4f}")
    if goodput is not None:
        parts.append(f"goodput {goodput:.0%}")
    failures = len(summary["failures"])
    if failures:
        parts.append(f"{counted(failures, 'failure')} survived")
    redone = summary["committed_steps_redone"]
    lines = [
        f"warning: epoch {fall['epoch']} had to go back from step {fall['committed']}, which was "
        f"committed, to step {fall['back_to']} ({fall['source']})"
        for fall in summary["fallbacks"]
    ]
    if redone:
        parts.append(f"{counted(redone, 'committed step')} redone")
    return (
        "".join(f"{line}\n" for line in lines)
        + ", ".join(parts)
        + f"\nsummary: {outcome.run_dir / SUMMARY}\npicture: holdfast report {outcome.run_dir}"
    )


def _narrowed(rendered: TrainConfig, num_nodes: int) -> TrainConfig:
    if num_nodes > MAX_NODES:
        raise UserError(
            "HF614", f"--nodes {num_nodes}: at most {MAX_NODES} nodes are emulated on one machine"
        )
    return run_dirs.narrow(rendered, num_nodes)


def _faults(config: TrainConfig, num_nodes: int, texts: Sequence[str]) -> tuple[Fault, ...]:
    return parse_faults(
        texts,
        num_nodes=num_nodes,
        num_workers=config.ladder.rungs[0].layout.world_size,
        steps=config.train.steps,
        start_step=start_step(config),
    )
