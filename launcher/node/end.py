"""`end` and `again`: what came of an attempt, and putting the job back into the queue."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping

from launcher import stop_request
from launcher.errors import UserError
from launcher.node import board
from launcher.node.attempt import Attempt
from launcher.node.decide import GOES_ON, Verdict, near_limit, verdict, what_now, within_restarts
from launcher.node.say import note, say
from launcher.node.slurm import carry_out
from launcher.whole_file import write_json

KILLED_SOON_S = 300.0
"""A requeue ends the job's processes within this time."""
SUMMARY_S = 60
"""So much of the time before the signal lead may go to the summary."""


def end(attempt: Attempt, env: Mapping[str, str], step_code: int | None) -> Verdict:
    """Find out what came of an attempt and write it down.

    Args:
        attempt: which.
        env: the batch script's HOLDFAST_ variables; HOLDFAST_SAVE_BY is Unix seconds.
        step_code: srun's exit code, for the message; 91 also where the script was asked to end
            before it had started anything; None: nobody knows.
    """
    finished, ended = False, None
    try:
        state = board.read(attempt.run_dir)
    except (OSError, ValueError) as error:
        say(f"the board cannot be read ({error}); the agents' exit codes have to do")
    else:
        finished = state.finished
        if state.ended is not None and state.ended.job == attempt.name:
            ended = (state.ended.code, state.ended.reason)
    found = verdict(
        finished=finished,
        ended=ended,
        exits=attempt.exits(),
        at_limit=near_limit(save_by(env), time.time()),
        step_code=step_code,
    )
    found = within_restarts(
        found,
        restart=env.get("HOLDFAST_RESTART", "requeue"),
        done=_restarts(attempt, env),
        most=_whole(env, "HOLDFAST_MAX_REQUEUES"),
        stop_asked=stop_request.asked(attempt.run_dir),
    )
    value = {"code": found.code, "failed": found.failed, "reason": found.reason}
    try:
        write_json(attempt.dir / "end.json", {**value, "t_unix": time.time()})
    except OSError as error:
        say(f"{attempt.dir} cannot be written: {error}")
    note(attempt, "run.ended", code=found.code, reason=found.reason)
    say(f"attempt {attempt.name} ended with {found.code}: {found.reason}")
    return found


def put_summary(attempt: Attempt, env: Mapping[str, str], code: int) -> None:
    """Write RUN/summary.json, unless the run goes on: its last attempt does it.

    Of what is on record only, so it can be left out: near the time limit, where Slurm would call
    a job that is done a failure, or when it takes too long. `holdfast report` has it then.
    """
    stop_asked = stop_request.asked(attempt.run_dir)
    if code in GOES_ON and not stop_asked and env.get("HOLDFAST_RESTART") != "none":
        return
    limit = save_by(env)
    if limit is not None and time.time() > limit - SUMMARY_S:
        return
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SUMMARY_S)
    try:
        # It reads the whole record: what only begins does not import this.
        from launcher.ops.local.job import write_summary
        from launcher.ops.reports.files import current_summary

        write_summary(attempt.run_dir, current_summary(attempt.run_dir)[0])
    except (UserError, OSError, ImportError) as error:
        say(f"summary.json is not written: {error}; `holdfast report RUN --json` has its content")
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the record could not be read within {SUMMARY_S} s")


def again(attempt: Attempt) -> int:
    """Put the job back into the queue, unless the user wants the run to stay stopped.

    Returns:
        0; Slurm ends the job's processes meanwhile.
    """
    if stop_request.asked(attempt.run_dir):
        say("it was cancelled: it is not put back into the queue")
    elif carry_out(attempt, ["requeue"]):
        time.sleep(KILLED_SOON_S)
    return 0


def take_over(attempt: Attempt, env: Mapping[str, str]) -> None:
    """Do what the batch script would have done at its end: for the caretaker."""
    found = end(attempt, env, None)
    acts = what_now(
        found.code,
        restart=env.get("HOLDFAST_RESTART", "requeue"),
        stop_asked=stop_request.asked(attempt.run_dir),
        has_next=attempt.next_job() is not None,
    )
    put_summary(attempt, env, found.code)
    say(f"the batch host is lost: {', '.join(acts)} job {attempt.job_id} in its place")
    if carry_out(attempt, acts):
        time.sleep(KILLED_SOON_S)


def _restarts(attempt: Attempt, env: Mapping[str, str]) -> int:
    """Return how often the run has been started again: a chain's jobs count their generations."""
    if env.get("HOLDFAST_RESTART") == "chain":
        return _whole(env, "HOLDFAST_GENERATION") or 0
    return attempt.restart


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def save_by(env: Mapping[str, str]) -> float | None:
    """Return when the job has to save at the latest, in Unix seconds; None: no limit."""
    try:
        return float(env.get("HOLDFAST_SAVE_BY", ""))
    except ValueError:
        return None
