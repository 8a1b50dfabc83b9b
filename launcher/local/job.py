"""`holdfast run` without the command line: prepare a run, execute it, sum it up."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
    Kind,
)
from launcher.doctor.why import Why, explain
from launcher.local.faults import Chaos, Fault, parse_chaos, parse_faults
from launcher.local.run import Interrupts, LocalRun
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.background import SUMMARY
from launcher.platforms.base import EXIT_INTERRUPTED, EXIT_LOST, JobId, JobRef, JobStatus, state_of
from launcher.platforms.installed import need
from launcher.platforms.local import LocalCluster
from launcher.record import stop_request
from launcher.record.files import LauncherLog, RunRecord
from launcher.record.status import TrainingStatus
from launcher.record.summary import summarise
from launcher.render.local import JOB_FILE, job_file, to_train_config
from launcher.runs import run_dir as run_dirs
from launcher.runs.checkpoints.commits import check_checkpoint_dir, refuse_foreign
from launcher.runs.checkpoints.start_from import base_of, corpus_pin, model_warnings, start_from
from launcher.runs.reports.data import audit_ledger, write_summary
from launcher.runs.run_dir import check_run_dir
from launcher.runs.runs import StoredRun
from launcher.runs.submitting.asking import check_live
from launcher.runs.watching.run_status import RunStatus
from launcher.runs.watching.screen import View
from launcher.spec.errors import Problem, UserError

MAX_NODES = 64
"""More emulated nodes than this would only fight over the cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start; its directory exists."""

    run_dir: Path
    rendered: TrainConfig
    """As rendered, with the whole ladder."""
    narrowed: TrainConfig
    """With the rungs that this attempt's nodes can run."""
    num_nodes: int
    faults: tuple[Fault, ...]
    chaos: Chaos | None = None
    warnings: tuple[Problem, ...] = ()
    """What data, tokenizer and imported model make doubtful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptResult:
    """How one attempt ended."""

    run_dir: Path
    config: TrainConfig
    code: int
    """The job's exit code; EXIT_INTERRUPTED: interrupted before the agents could save."""
    interrupted: bool
    """The user asked for the end, and it came before the last step was done."""
    why: Why
    summary: dict[str, Any]
    events: list[Event]

    @property
    def is_user_error(self) -> bool:
        """Whether it failed by a user error: the same run would fail again."""
        kind = self.why.failure["kind"] if self.why.failure else Kind.USER_ERROR
        if "HF523" in self.why.short:  # the run directory was lost
            return False
        return self.code == EXIT_DO_NOT_RESTART and kind == Kind.USER_ERROR


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
) -> PreparedRun:
    """Read, plan and render `job` into a new run directory.

    Args:
        job: path of the job file.
        nodes: number to emulate; None: those of the job, spares too.
        faults: arguments of `--fault`.
        chaos: argument of `--chaos`.
        sets: arguments of `--set`.
        run_dir: None: `./runs/<name>-<stamp>`.
        stamp: local time as text, for the run's name.
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
    found = check_live(spec, folder)
    spec.remember(base=base_of(spec))
    run_id = f"{spec.name}-{stamp}"
    directory = (run_dir or Path("runs") / run_id).absolute()
    planned = plan(spec)
    rendered = to_train_config(spec, planned, run_id=run_id, run_dir=directory, base_dir=folder)
    pin: dict[str, str] = {}
    if start is not None:
        rendered = start_from(rendered, start, spec)
        assert rendered.start_from is not None
        pin = corpus_pin(rendered.start_from)
        found += model_warnings(rendered, spec)
    bundle = {run_dirs.JOB_JSON: rendered.to_json(), JOB_FILE: job_file(spec, folder), **pin}
    nodes = nodes or rendered.ladder.max_nodes + spec.cluster.spares
    options: dict[str, Any] = {"nodes": nodes, "faults": faults, "chaos": chaos}
    prepared = _prepared(directory, rendered, **options, warnings=found)
    existed = directory.exists()
    refuse_foreign(rendered)
    try:
        run_dirs.create(directory, bundle)
        run_dirs.check_storage(directory)
        check_checkpoint_dir(rendered)
    except UserError:
        if not existed:  # it holds nothing but what was just rendered
            shutil.rmtree(directory, ignore_errors=True)
        raise
    return prepared


def prepare_resume(
    run_dir: Path, *, nodes: int | None, faults: Sequence[str], chaos: str | None = None
) -> PreparedRun | None:
    """Return the next attempt of an earlier run; None: it has done its last step.

    Without `nodes` it has as many as any attempt before, spares too.

    Raises:
        UserError: no run directory, a live job on it, too few nodes, a wrong fault.
    """
    directory = run_dir.absolute()
    rendered = run_dirs.load(directory)
    check_run_dir(directory)
    run_dirs.check_storage(directory)
    run_dirs.refuse_if_live(directory)
    most = rendered.ladder.max_nodes
    for event in RunRecord(directory).poll():
        if event.event == "run.started":
            most = max(most, event.fields.get("nodes", 0))
        done = event.event == "job.stopped" and event.fields.get("code") == EXIT_DONE
        if done or event.event == "trainer.finished":
            return None
    prepared = _prepared(directory, rendered, nodes=nodes or most, faults=faults, chaos=chaos)
    _check_data(rendered)
    check_checkpoint_dir(rendered)
    stop_request.withdraw(directory)
    return prepared


def _prepared(
    directory: Path,
    rendered: TrainConfig,
    *,
    nodes: int,
    faults: Sequence[str],
    chaos: str | None,
    warnings: Sequence[Problem] = (),
) -> PreparedRun:
    """Return the attempt that the options ask for; nothing is made."""
    need("a run on this machine", "torch", extra="train")
    if nodes > MAX_NODES:
        message = (
            f"{nodes} nodes, spares included: at most {MAX_NODES} are emulated on one machine; "
            f"give --nodes {MAX_NODES} or fewer"
        )
        raise UserError("HF614", message)
    narrowed = run_dirs.narrow(rendered, nodes)
    return PreparedRun(
        run_dir=directory,
        rendered=rendered,
        narrowed=narrowed,
        num_nodes=nodes,
        faults=parse_faults(
            faults,
            num_nodes=nodes,
            num_workers=narrowed.ladder.rungs[0].layout.world_size,
            steps=narrowed.train.steps,
            start_step=narrowed.start_from.step if narrowed.start_from else 0,
        ),
        chaos=None if chaos is None else parse_chaos(chaos),
        warnings=tuple(warnings),
    )


def execute(prepared: PreparedRun, *, interrupts: Interrupts, view: View) -> AttemptResult:
    """Run one attempt to its end, and write summary.json. Leaves no process behind.

    Raises:
        UserError: another launcher runs this run directory.
        PermanentError: agents cannot be started.
    """
    directory, config = prepared.run_dir, prepared.narrowed
    job_id = JobId(f"local-{os.getpid()}-{os.urandom(3).hex()}")
    with ExitStack() as stack:
        stack.enter_context(run_dirs.live_mark(directory, job_id))
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
        record, progress = RunRecord(directory), TrainingStatus(config)
        progress.num_nodes = prepared.num_nodes
        running = LocalRun(
            cluster=cluster,
            record=record,
            log=log,
            progress=progress,
            view=stack.enter_context(view),
            faults=prepared.faults,
            chaos=prepared.chaos,
            interrupts=interrupts,
        )
        running.run()
        codes = cluster.codes()
        code = job_code(codes, record.events)
        interrupted = interrupts.count > 0 and code != EXIT_DONE
        if interrupted and code == EXIT_LOST:  # agents were killed, or had not begun to listen
            code = EXIT_INTERRUPTED
        log.emit("run.ended", code=code)
        progress.apply(record.poll())
    summary = summarise(
        record.events, config=config, audit=audit_ledger(directory, config), code=code
    )
    write_summary(directory, summary)
    status = RunStatus(
        run=StoredRun(path=directory, submission=None, shown=str(directory)),
        target="local",
        job=JobRef(id=job_id),
        platform=JobStatus(state=state_of(code), code=code),
        training=progress,
    )
    logs = directory / "logs" / str(attempt)
    failed = [logs / node / "agent.log" for node, ended in sorted(codes.items()) if ended]
    return AttemptResult(
        run_dir=directory,
        config=config,
        code=code,
        interrupted=interrupted,
        why=explain(status, [path for path in failed if path.is_file()], now_unix=time.time()),
        summary=summary,
        events=record.events,
    )


def job_code(codes: Mapping[str, int], events: Sequence[Event]) -> int:
    """Return the job's exit code.

    One agent that ended with 0 has seen the last step done. Else the agents'
    word (`job.stopped`), else the gravest of their codes, else EXIT_LOST.

    Args:
        codes: exit codes of the agents that ended by themselves, by node.
        events: the record; the newest attempt counts.
    """
    if EXIT_DONE in codes.values():
        return EXIT_DONE
    for event in takewhile(lambda e: e.event != "run.started", reversed(events)):
        if event.event == "job.stopped" and isinstance(event.fields.get("code"), int):
            return int(event.fields["code"])
    known = (EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP, EXIT_TOO_FEW_NODES, EXIT_SAVED)
    return next((code for code in known if code in codes.values()), EXIT_LOST)


def _check_data(config: TrainConfig) -> None:
    places = {key: each.path or "" for key, each in config.data.corpora.items()}
    places["data.tokenizer"] = config.data.tokenizer
    if config.validation is not None:
        places["validation.path"] = config.validation.path
    for key, name in places.items():
        if name != "bytes" and not Path(name).exists():
            raise UserError("HF201", f"{key}: {name} does not exist any more; put it back")


def closing_lines(result: AttemptResult) -> str:
    """Return what a finished run says last."""
    summary = result.summary
    loss, goodput = summary["final_loss"], summary["goodput"]
    what = counted(summary["steps"], "step")
    if summary["start_step"]:
        what = f"steps {summary['start_step'] + 1} to {summary['steps']}"
    parts = [f"finished: {what} in {summary['wall_s']:.1f} s"]
    if loss is not None:
        parts.append(f"final loss {loss:.4f}")
    if goodput is not None:
        parts.append(f"goodput {goodput:.0%}")
    if failures := len(summary["failures"]):
        parts.append(f"{counted(failures, 'failure')} survived")
    redone, shown = summary["committed_steps_redone"], summary["steps_redone"]
    lines = [
        f"warning: epoch {fall['epoch']} had to go back from step {fall['committed']}, which was "
        f"committed, to step {fall['back_to']} ({fall['source']})"
        for fall in summary["fallbacks"]
    ]
    for each in summary["from_scratch"]:
        line = f"epoch {each['epoch']} began from scratch after step {each['newest']}"
        if result.config.elastic.from_scratch:
            lines.append(f"{line}, as the job allows")
        else:
            why = "the script does not resume from its checkpoint (docs/scripts.md)"
            lines.append(f"warning: {line}: {why}")
    if not summary["steps"]:
        lines.append("note: no step was shown")
    if redone:
        parts.append(f"{counted(redone, 'committed step')} redone")
    elif shown and redone is None:
        parts.append(f"{counted(shown, 'step')} redone")
    return (
        "".join(f"{line}\n" for line in lines)
        + ", ".join(parts)
        + f"\nsummary: {result.run_dir / SUMMARY}\npicture: holdfast report {result.run_dir}"
    )
