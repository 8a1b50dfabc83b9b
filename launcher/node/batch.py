"""The batch script's commands: `begin`, `end`, `again`.

`begin` asks, before anything starts, whether this attempt may; pods ask the same.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.record import script_steps
from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from elastic_trainer.storage.files import read_json
from launcher.fleet.node_ledger import node_ledger_at, place_for
from launcher.fleet.rules import kept_off, standings
from launcher.node.attempt import (
    Attempt,
    board_of,
    committed_step,
    lineage,
    live_lease,
    note,
    pasts,
    say,
)
from launcher.node.decide import (
    EXIT_LEFT,
    REQUEUES,
    AttemptOutcome,
    Decision,
    a_few,
    attempt_result,
    began,
    may_begin,
    near_limit,
    what_now,
    within_restarts,
)
from launcher.platforms.commands import Commands, SystemCommands
from launcher.platforms.retries import insist, retried
from launcher.platforms.slurm.parse import expand_nodes, of_scontrol, parse_scontrol
from launcher.platforms.slurm.queries import machines
from launcher.platforms.slurm.status_text import SCRIPT
from launcher.record import stop_request
from launcher.record.failures import EXCLUSIONS, excluded_machines
from launcher.record.files import events_named
from launcher.spec.errors import TemporaryError, UserError, advice


def begin(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Decide on the batch host, and note that the attempt begins when it may.

    SLURM_JOB_NODELIST in `env` has the job's nodes.

    Returns:
        0: continue. 90: the run is done. Else the exit code of the script.

    Raises:
        UserError: HF502, job.json cannot be read.
        OSError: the run directory cannot be read or written.
    """
    # Late: pods do without it.
    from launcher.runs.submitting.environment import warn_if_changed

    config, state = read_config(attempt.run_dir), board_of(attempt.run_dir)
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

    Raises:
        OSError: the run directory cannot be read.
    """
    run_dir = attempt.run_dir
    jobs, step = lineage(run_dir, attempt.job_id), newest_step(run_dir, config, state)
    lease = live_lease(run_dir, lambda job: job.partition(".")[0] in jobs)
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

    `given` has Slurm's job and nodes; None: any number of pods come, and the first one counts.

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

    A script's shown steps count too: its own checkpoints are on no board.

    Raises:
        OSError: the record cannot be read.
    """
    shown = None if config.command is None else script_steps.newest_step(run_dir)
    return max(committed_step(state), -1 if shown is None else shown)


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


# -- end ------------------------------------------------------------------------------------------


_OF_AGENTS = frozenset(
    {EXIT_DONE, EXIT_SAVED, EXIT_TOO_FEW_NODES, EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP, EXIT_LEFT}
)
"""Codes by which an agent says how it ends."""
SUMMARY_S = 60
"""For the summary, before the signal lead."""


def end(attempt: Attempt, env: Mapping[str, str], step_code: int | None) -> AttemptOutcome:
    """Find out the outcome of an attempt and write it down.

    `step_code` is srun's exit code, for the message; 91 also where the script was asked to end
    before it had started anything; None: unknown.
    """
    try:
        state = board_of(attempt.run_dir)
    except (OSError, ValueError) as error:
        say(f"the board cannot be read ({error}); using the agents' exit codes")
        state = BoardState()
    exits = attempt.exits()
    found = attempt_result(
        state,
        attempt.name,
        exits=exits,
        at_limit=near_limit(save_by(env), time.time()),
        step_code=step_code,
        refusal=attempt.refusal() or _failed_alike(attempt, exits),
    )
    restart = env.get("HOLDFAST_RESTART", "requeue")
    found = within_restarts(
        found,
        restart=restart,
        # A chain's jobs count their generations.
        done=_whole(env, "HOLDFAST_GENERATION") or 0 if restart == "chain" else attempt.restart,
        most=_whole(env, "HOLDFAST_MAX_REQUEUES"),
        stop_asked=stop_request.asked(attempt.run_dir),
    )
    note_end(attempt, found, began=bool(exits) or began(state, attempt.name))
    return found


def _failed_alike(attempt: Attempt, exits: Mapping[str, int]) -> str:
    """Return the nodes' words if all agents have failed by foreign errors."""
    if not exits or any(code in _OF_AGENTS for code in exits.values()):
        return ""
    return attempt.last_words(sorted(exits)) or f"exit codes {sorted(set(exits.values()))}"


def note_end(
    attempt: Attempt, found: AttemptOutcome, *, first: bool = False, began: bool = True
) -> None:
    """Write down the outcome of an attempt; failing storage must not change the code.

    With `first` an existing note stays, since any number of pods write it. `began`: an agent of it
    got as far as the board, as far as is known.
    """
    value = {**dataclasses.asdict(found), "t_unix": time.time(), "began": began}
    try:
        if not attempt.keep("end.json", value, first=first):
            return
    except OSError as error:
        say(f"{attempt.dir} cannot be written: {error}")
    note(attempt, "run.ended", code=found.code, reason=found.reason)
    say(f"attempt {attempt.name} ended with {found.code}: {found.reason}")


def put_summary(attempt: Attempt, env: Mapping[str, str], code: int) -> None:
    """Write RUN/summary.json, unless the run continues: its last attempt does it.

    It only repeats the record, so it can be left out: near the time limit, where Slurm would call a
    finished job a failure, or when it takes too long. `holdfast report` has it then.
    """
    stop_asked = stop_request.asked(attempt.run_dir)
    if code in REQUEUES and not stop_asked and env.get("HOLDFAST_RESTART") != "none":
        return
    limit = save_by(env)
    if limit is not None and time.time() > limit - SUMMARY_S:
        return
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SUMMARY_S)
    try:
        with advice(
            "summary.json is not written (`holdfast report RUN --json` has its content)", say
        ):
            # It reads the whole record: what only begins does not import this.
            from launcher.runs.reports.data import current_summary, write_summary

            write_summary(attempt.run_dir, current_summary(attempt.run_dir)[0])
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the record could not be read within {SUMMARY_S} s")


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def save_by(env: Mapping[str, str]) -> float | None:
    """Return the time by which the job has to save, in Unix seconds; None: no limit."""
    try:
        return float(env.get("HOLDFAST_SAVE_BY", ""))
    except ValueError:
        return None


# -- again, and the watchdog in the script's place ------------------------------------------------
# The next start, of the same job or its successor, is on no machine that the run has excluded.
# Slurm changes a job's excluded nodes (ExcNodeList) only while it waits. A requeued job does so at
# once, while its processes still end.


TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 60.0
KILLED_SOON_S = 300.0
"""A requeue ends the job's processes within this time."""
UPDATE_S = 20.0
"""Slurm kills a requeued job's processes after KillWait, 30 s by default."""
NOT_AVAILABLE = "node configuration is not available"
"""sbatch, where a partition does not have the nodes (ESLURM_REQUESTED_NODE_CONFIG_UNAVAILABLE)."""


def again(attempt: Attempt) -> int:
    """Put the job back into the queue, unless the user wants the run to stay stopped; return 0."""
    if stop_request.asked(attempt.run_dir):
        say("it was cancelled and is not requeued")
    elif carry_out(attempt, ["requeue"], SystemCommands()):
        time.sleep(KILLED_SOON_S)
    return 0


def keep_off(attempt: Attempt) -> int:
    """Keep excluded machines off the successor of this job (restart: chain); return 0."""
    carry_out(attempt, ["keep-off"], SystemCommands())
    return 0


def take_over(attempt: Attempt, env: Mapping[str, str]) -> None:
    """Do the batch script's work at its end: for the watchdog."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a requeue sends it before all is done
    found = end(attempt, env, None)
    acts = what_now(
        found.code,
        restart=env.get("HOLDFAST_RESTART", "requeue"),
        stop_asked=stop_request.asked(attempt.run_dir),
        has_next=attempt.next_job() is not None,
    )
    put_summary(attempt, env, found.code)
    say(f"the batch host is lost: {', '.join(acts)} job {attempt.job_id} in its place")
    if carry_out(attempt, acts, SystemCommands()):
        time.sleep(KILLED_SOON_S)


def carry_out(
    attempt: Attempt,
    acts: Sequence[str],
    commands: Commands,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeue or cancel the job of `attempt`, however long it takes; False: it is no longer ours.

    Tries never end: a controller may be away for hours, and without this the job is lost; its time
    limit ends it. Another attempt of the job, or a cancelled one, is left alone: a node that was
    cut off may come here late.

    Raises:
        UserError: HF650, Slurm's commands are not on the PATH.
    """
    argv = {
        "requeue": ["scontrol", "requeue", attempt.slurm_id],
        "cancel": ["scancel", attempt.slurm_id],
        "cancel-next": ["scancel", attempt.next_job() or ""],
    }

    def answer(act: str, words: Sequence[str]) -> str:
        found = commands.run(words, timeout_s=TIMEOUT_S)
        if found.code:
            raise TemporaryError(f"{act} of job {attempt.job_id} fails: {found.complaint}")
        return found.out

    def carry_out_one(act: str) -> bool:
        shown = answer(act, ["scontrol", "--oneliner", "show", "job", attempt.slurm_id])
        fields = next(iter(parse_scontrol(shown)), {})
        job = of_scontrol(fields)
        if job is None or job.state != "RUNNING" or job.restarts not in {attempt.restart, None}:
            say(f"job {attempt.job_id} is {job.state if job else 'gone'}: nothing to {act}")
            return False
        listed = expand_nodes(fields.get("ExcNodeList", "").replace("(null)", ""))
        off: Sequence[str] = ()
        if act in {"requeue", "keep-off"}:
            off = listed
            with advice("the next start may be on excluded nodes", say):
                off = (*listed, *_to_exclude(attempt, listed, commands))
        if act in argv:
            answer(act, argv[act])
        if off and (act, off) != ("requeue", listed):
            whom = attempt.slurm_id if act == "requeue" else attempt.next_job()
            update = ["scontrol", "update", f"JobId={whom}", f"ExcNodeList={','.join(off)}"]
            try:
                retried(partial(answer, "an update", update), for_s=UPDATE_S, sleep=sleep)
            except TemporaryError as error:
                say(f"job {whom} may start on excluded nodes ({a_few(off)}): {error}")
        return True

    return all(
        insist(
            partial(carry_out_one, act),
            first_wait_s=2.0,
            longest_wait_s=LONGEST_PAUSE_S,
            on_error=lambda error: say(f"{error}; retrying"),
            sleep=sleep,
        )
        for act in acts
    )


def _of_ledger(attempt: Attempt, since: float, commands: Commands) -> list[str]:
    """Return the nodes that the fleet's ledger, updated from the run, keeps this run off."""
    with advice("the fleet's ledger is not used", say):
        fleet = node_ledger_at(place_for(attempt.run_dir))
        with advice("the fleet's ledger misses what happened here", say):
            fleet.harvest(attempt.run_dir, since_unix=since)
        held = standings(fleet.entries(), time.time())
        for trouble in fleet.trouble:
            say(trouble)
        if any(each.is_out for each in held.values()):
            pool = [machine.name for machine in machines(commands)]
            given = str(read_json(attempt.dir / "begin.json").get("nodes") or "")
            return [each.machine for each in kept_off(held, pool, len(expand_nodes(given)))]
    return []


def _to_exclude(attempt: Attempt, listed: Sequence[str], commands: Commands) -> list[str]:
    """Return nodes that the job's next start avoids: excluded by the run, or fleet-wide."""
    begun = pasts(attempt.run_dir, lineage(attempt.run_dir, attempt.job_id))
    since = begun[0].begun_unix if begun else 0.0
    events = events_named(attempt.run_dir, EXCLUSIONS, since_unix=since)
    hosts = [each.host for each in excluded_machines(events, since_unix=since)]
    hosts += [host for host in _of_ledger(attempt, since, commands) if host not in hosts]
    new = [host for host in hosts if host not in listed]
    if not new:
        return []
    folder = attempt.run_dir.parent if attempt.array_task else attempt.run_dir
    asked = ["sbatch", "--test-only", f"--exclude={','.join([*listed, *new])}"]
    try:
        said = commands.run([*asked, str(folder / SCRIPT)], timeout_s=TIMEOUT_S).complaint
    except UserError:  # some sites have no sbatch on compute nodes
        said = ""
    if NOT_AVAILABLE in said:
        say(f"{a_few(new)}: excluded, but there are not enough other nodes for the next start")
        return []
    say(f"{a_few(new)}: excluded, and left out at the next start")
    return new
