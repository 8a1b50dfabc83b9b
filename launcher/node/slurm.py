"""`again`, and what a watchdog does in the script's place: the job is put back, or cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from launcher import stop_request
from launcher.backends.commands import Commands, SystemCommands
from launcher.backends.slurm.parse import of_scontrol, parse_scontrol
from launcher.errors import TemporaryError
from launcher.node.attempt import Attempt
from launcher.node.decide import what_now
from launcher.node.end import end, put_summary
from launcher.node.say import say
from launcher.retries import insist

TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 60.0
KILLED_SOON_S = 300.0
"""A requeue ends the job's processes within this time."""


def again(attempt: Attempt) -> int:
    """Put the job back into the queue, unless the user wants the run to stay stopped.

    Returns:
        0; Slurm ends the job's processes meanwhile.
    """
    if stop_request.asked(attempt.run_dir):
        say("it was cancelled and is not requeued")
    elif carry_out(attempt, ["requeue"], SystemCommands()):
        time.sleep(KILLED_SOON_S)
    return 0


def take_over(attempt: Attempt, env: Mapping[str, str]) -> None:
    """Do what the batch script would have done at its end: for the watchdog."""
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
    """Requeue or cancel the job of `attempt`; keep trying until the controller has answered.

    There is no last try: a controller may be away for hours, and without this the job is lost.
    The job's time limit ends it. Another attempt of the job, or one that somebody has cancelled,
    is left alone: a node that was cut off may come here late.

    Returns:
        Whether it was done; False: it was not ours to do any more.

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
        job = next(map(of_scontrol, parse_scontrol(shown)), None)
        if job is None or job.state != "RUNNING" or job.restarts not in {attempt.restart, None}:
            say(f"job {attempt.job_id} is {job.state if job else 'gone'}: nothing to {act}")
            return False
        answer(act, argv[act])
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
