"""`begin`: asks on the batch host, before anything starts, whether this attempt may."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer import script_steps
from elastic_trainer.config import TrainConfig
from launcher import stop_request
from launcher.node import board
from launcher.node.attempt import Attempt, NodeError, lineage, pasts
from launcher.node.decide import Budget, Decision, may_begin
from launcher.node.say import note, say
from launcher.ops.submitting.environment import warn_if_changed
from launcher.whole_file import write_json


def begin(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Decide, and make the attempt's folders when it may start.

    Args:
        attempt: which.
        env: the batch script's; SLURM_JOB_NODELIST has the nodes that the job was given.

    Returns:
        0: go on. 90: the run is done. Else the code that the script ends with.

    Raises:
        NodeError: HF502, job.json cannot be read.
        OSError: the run directory cannot be read or written.
    """
    run_dir = attempt.run_dir
    config, state = read_config(run_dir), board.read(run_dir)
    now = time.time()
    decision = decide(attempt, config, state, now_unix=now)
    if decision.code:
        return _refuse(attempt, decision)
    for folder in (attempt.dir, attempt.logs):
        folder.mkdir(parents=True, exist_ok=True)
    given = {"platform": "slurm", "job": attempt.slurm_id, "nodes": env.get("SLURM_JOB_NODELIST")}
    step = newest_step(run_dir, config, state)
    write_json(attempt.dir / "begin.json", {"t_unix": now, "step": step, **given})
    for change in warn_if_changed(run_dir):
        say(f"warning: the environment is not the one recorded at submission: {change}")
    nodes = config.ladder.rungs[0].num_nodes
    note(attempt, "run.started", attempt=attempt.name, nodes=nodes)
    say(f"attempt {attempt.name} of run {config.run_id} begins")
    return 0


def decide(
    attempt: Attempt, config: TrainConfig, state: board.State, *, now_unix: float
) -> Decision:
    """Say whether an attempt may start; takes some seconds where another job has a lease.

    Args:
        attempt: which.
        config: of the run.
        state: what is on its board.
        now_unix: the time.

    Raises:
        OSError: the run directory cannot be read.
    """
    run_dir = attempt.run_dir
    jobs, step = lineage(run_dir, attempt.job_id), newest_step(run_dir, config, state)
    lease = board.live_lease(run_dir, lambda job: job.partition(".")[0] in jobs)
    return may_begin(
        finished=state.finished,
        stop_asked=stop_request.asked(run_dir),
        live_job=None if lease is None else f"{lease.job} (coordinated by {lease.node})",
        past=[past for past in pasts(run_dir, jobs) if past.name != attempt.name],
        step=None if step < 0 and config.command is not None else step,
        now_unix=now_unix,
        budget=Budget(
            max_restarts=config.elastic.max_restarts,
            window_s=config.elastic.window_s,
            no_progress=config.elastic.no_progress,
        ),
        before=f"{attempt.job_id}.{attempt.restart - 1}",
    )


def newest_step(run_dir: Path, config: TrainConfig, state: board.State) -> int:
    """Return the newest step that counts as progress; -1: none is known.

    Of a script also what it has shown: its own checkpoints are on no board.

    Raises:
        OSError: the record cannot be read.
    """
    shown = None if config.command is None else script_steps.newest_step(run_dir)
    return max(board.newest_step(state), -1 if shown is None else shown)


def _refuse(attempt: Attempt, decision: Decision) -> int:
    say(f"{attempt.run_dir}: {decision.reason}")
    return decision.code


def read_config(run_dir: Path) -> TrainConfig:
    """Read RUN/job.json.

    Raises:
        NodeError: HF502, it cannot be read.
    """
    path = run_dir / "job.json"
    try:
        return TrainConfig.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NodeError("HF502", f"{path}: {error}; render the job again") from error
