"""`end`: what came of an attempt, written down, and the run's summary. Pods write down the same."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Mapping

from elastic_trainer.board.state import BoardState
from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from launcher.node import board
from launcher.node.attempt import Attempt
from launcher.node.decide import (
    EXIT_LEFT,
    REQUEUES,
    AttemptOutcome,
    attempt_result,
    began,
    near_limit,
    within_restarts,
)
from launcher.node.say import note, say
from launcher.record import stop_request
from launcher.spec.errors import UserError

_OF_AGENTS = frozenset(
    {EXIT_DONE, EXIT_SAVED, EXIT_TOO_FEW_NODES, EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP, EXIT_LEFT}
)
"""Codes by which an agent says how it ends."""
SUMMARY_S = 60
"""So much of the time before the signal lead may go to the summary."""


def end(attempt: Attempt, env: Mapping[str, str], step_code: int | None) -> AttemptOutcome:
    """Find out what came of an attempt and write it down.

    Args:
        attempt: which.
        env: the batch script's HOLDFAST_ variables; HOLDFAST_SAVE_BY is Unix seconds.
        step_code: srun's exit code, for the message; 91 also where the script was asked to end
            before it had started anything; None: nobody knows.
    """
    try:
        state = board.read(attempt.run_dir)
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
    """Return what the nodes say where all agents have failed by errors that are not their own."""
    if not exits or any(code in _OF_AGENTS for code in exits.values()):
        return ""
    return attempt.last_words(sorted(exits)) or f"exit codes {sorted(set(exits.values()))}"


def note_end(
    attempt: Attempt, found: AttemptOutcome, *, first: bool = False, began: bool = True
) -> None:
    """Write down what came of an attempt; storage that fails must not change the code.

    Args:
        attempt: which.
        found: what came of it.
        first: what is there stays, since any number of pods write it.
        began: an agent of it got as far as the board, as far as is known.
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

    Of what is on record only, so it can be left out: near the time limit, where Slurm would call
    a job that is done a failure, or when it takes too long. `holdfast report` has it then.
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
        # It reads the whole record: what only begins does not import this.
        from launcher.runs.summary_file import current_summary, write_summary

        write_summary(attempt.run_dir, current_summary(attempt.run_dir)[0])
    except (UserError, OSError, ImportError) as error:
        say(f"summary.json is not written: {error}; `holdfast report RUN --json` has its content")
    finally:
        signal.alarm(0)


def _too_long(*_: object) -> None:
    raise TimeoutError(f"the record could not be read within {SUMMARY_S} s")


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None


def save_by(env: Mapping[str, str]) -> float | None:
    """Return when the job has to save at the latest, in Unix seconds; None: no limit."""
    try:
        return float(env.get("HOLDFAST_SAVE_BY", ""))
    except ValueError:
        return None
