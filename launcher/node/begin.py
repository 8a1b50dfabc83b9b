"""`begin`: asks, before anything starts, whether this attempt may. Pods ask the same."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record import script_steps
from launcher.node import board
from launcher.node.attempt import Attempt, lineage, pasts
from launcher.node.decide import Decision, may_begin
from launcher.node.say import note, say
from launcher.record import stop_request
from launcher.spec.errors import UserError


def begin(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Decide on the batch host, and note that the attempt begins when it may.

    Args:
        attempt: which.
        env: the batch script's; SLURM_JOB_NODELIST has the nodes that the job was given.

    Returns:
        0: continue. 90: the run is done. Else the code that the script ends with.

    Raises:
        UserError: HF502, job.json cannot be read.
        OSError: the run directory cannot be read or written.
    """
    # Late: pods do without it.
    from launcher.runs.submitting.environment import warn_if_changed

    config, state = read_config(attempt.run_dir), board.read(attempt.run_dir)
    decision = decide(attempt, config, state)
    if decision.code:
        return decision.code
    given = {"platform": "slurm", "job": attempt.slurm_id, "nodes": env.get("SLURM_JOB_NODELIST")}
    note_begin(attempt, config, state, given)
    for change in warn_if_changed(attempt.run_dir):
        say(f"warning: the environment is not the one recorded at submission: {change}")
    return 0


def decide(attempt: Attempt, config: TrainConfig, state: BoardState) -> Decision:
    """Say whether an attempt may start; takes some seconds where another job has a lease.

    Args:
        attempt: which.
        config: of the run.
        state: what is on its board.

    Raises:
        OSError: the run directory cannot be read.
    """
    run_dir = attempt.run_dir
    jobs, step = lineage(run_dir, attempt.job_id), newest_step(run_dir, config, state)
    lease = board.live_lease(run_dir, lambda job: job.partition(".")[0] in jobs)
    decision = may_begin(
        finished=state.finished,
        stop_asked=stop_request.asked(run_dir),
        live_job=None if lease is None else f"{lease.job} (coordinated by {lease.node})",
        past=[past for past in pasts(run_dir, jobs) if past.name != attempt.name],
        step=None if step < 0 and config.command is not None else step,
        now_unix=time.time(),
        budget=config.elastic,
        before=f"{attempt.job_id}.{attempt.restart - 1}",
    )
    if decision.code:
        say(f"{run_dir}: {decision.reason}")
    return decision


def note_begin(
    attempt: Attempt, config: TrainConfig, state: BoardState, given: Mapping[str, Any] | None = None
) -> None:
    """Make an attempt's folders and note that it begins.

    Args:
        attempt: which.
        config: of the run.
        state: what is on its board.
        given: by Slurm: job and nodes; None: any number of pods come, and the first one counts.

    Raises:
        OSError: the run directory cannot be written.
    """
    for folder in (attempt.dir, attempt.logs):
        folder.mkdir(parents=True, exist_ok=True)
    step = newest_step(attempt.run_dir, config, state)
    value = {"t_unix": time.time(), "step": step, **(given or {})}
    if attempt.keep("begin.json", value, first=given is None):
        nodes = config.ladder.rungs[0].num_nodes
        note(attempt, "run.started", attempt=attempt.name, nodes=nodes)
        say(f"attempt {attempt.name} of run {config.run_id} begins")


def newest_step(run_dir: Path, config: TrainConfig, state: BoardState) -> int:
    """Return the newest step that counts as progress; -1: none is known.

    Of a script also what it has shown: its own checkpoints are on no board.

    Raises:
        OSError: the record cannot be read.
    """
    shown = None if config.command is None else script_steps.newest_step(run_dir)
    return max(board.newest_step(state), -1 if shown is None else shown)


def read_config(run_dir: Path) -> TrainConfig:
    """Read RUN/job.json.

    Raises:
        UserError: HF502, it cannot be read.
    """
    path = run_dir / "job.json"
    try:
        return TrainConfig.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError("HF502", f"{path}: {error}; render the job again") from error
