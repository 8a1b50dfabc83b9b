"""The few words of the batch script and its stand-ins to Slurm's controller."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launcher.node.attempt import Attempt

TIMEOUT_S = 60.0
LONGEST_PAUSE_S = 60.0

Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True, slots=True)
class Standing:
    """A job as the controller has it."""

    state: str
    """As RUNNING; the empty text where it knows no such job."""
    restarts: int | None = None


def parse_job(text: str) -> Standing:
    """Read `scontrol --oneliner show job`; anything else is a job that is not known."""
    state = re.search(r"(?:^|\s)JobState=(\w+)", text)
    restarts = re.search(r"(?:^|\s)Restarts=(\d+)", text)
    return Standing(state[1] if state else "", int(restarts[1]) if restarts else None)


def call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands; its time is limited."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {TIMEOUT_S:g} s")


def carry_out(
    attempt: Attempt,
    acts: Sequence[str],
    *,
    run: Run = call,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Requeue or cancel the job of `attempt`; keep trying until the controller has answered.

    There is no last try: a controller may be away for hours, and without this the job is lost.
    The job's time limit ends it. Another attempt of the job, or one that somebody has cancelled,
    is left alone: a node that was cut off may come here late.

    Returns:
        Whether it was done; False: it was not ours to do any more.
    """
    commands = {
        "requeue": ["scontrol", "requeue", attempt.slurm_id],
        "cancel": ["scancel", attempt.slurm_id],
        "cancel-next": ["scancel", attempt.next_job() or ""],
    }
    for act in acts:
        pause_s = 2.0
        while True:
            shown = run(["scontrol", "--oneliner", "show", "job", attempt.slurm_id])
            if shown.returncode == 0:
                job = parse_job(shown.stdout)
                if job.state != "RUNNING" or job.restarts not in {attempt.restart, None}:
                    _say(f"job {attempt.job_id} is {job.state or 'gone'}: nothing to {act}")
                    return False
                done = run(commands[act])
                if done.returncode == 0:
                    break
                shown = done
            _say(f"{act} of job {attempt.job_id} fails: {shown.stderr.strip()}; tried again")
            sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    return True


def _say(text: str) -> None:
    sys.stderr.write(f"holdfast: {text}\n")
    sys.stderr.flush()
