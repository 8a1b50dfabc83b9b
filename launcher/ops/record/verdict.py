"""How a run ended, in words: exit codes of agents and events -> Verdict. Reads log tails only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_trainer.events import Event
from elastic_trainer.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
    Kind,
)
from launcher.ops.record.timeline import worker_rank
from launcher.run_files import ATTEMPT, attempt_order

EXIT_LOST = 1
"""No agent is left that could say why."""

CLI_DONE, CLI_FAILED, CLI_USER, CLI_INTERRUPTED = 0, 1, 2, 130

_TAIL_LINES = 12

RUN_AGAIN = "holdfast run --resume {run}"
SUBMIT_AGAIN = "holdfast submit --resume {run}"
"""What goes on with a run that this machine ran, and with one that was submitted."""

_WAY_OUT = {
    EXIT_SAVED: "continue with: {again}",
    EXIT_TOO_FEW_NODES: (
        "too few healthy nodes were left for the last rung; "
        "continue on more with: {again}, or lower elastic.min_nodes"
    ),
    EXIT_DO_NOT_RESTART: ("it would fail again: mend the cause, then continue with: {again}"),
    EXIT_BUDGET_USED_UP: (
        "a restart budget (elastic.max_restarts, max_crashes or max_hangs within "
        "elastic.window_s) is used up: look at the failures "
        "(holdfast report {run}), then continue with: {again}"
    ),
    EXIT_LOST: "every agent is gone; continue with: {again}",
    CLI_INTERRUPTED: "continue with: {again}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How it ended. `code` is the job's exit code, `cli_code` the command's.

    A run that was interrupted and whose agents could not save has the code 130.
    """

    code: int
    cli_code: int
    text: str
    """What to tell the user: what failed first, the evidence, the way out."""


def job_code(codes: Mapping[str, int], events: Sequence[Event]) -> int:
    """Return the job's exit code.

    One agent that ended with 0 has seen the last step done. Else the agents'
    word (`job.stopped`), else the gravest of their codes, else EXIT_LOST.
    """
    if EXIT_DONE in codes.values():
        return EXIT_DONE
    attempt = this_attempt(events)
    for event in reversed(attempt):
        if event.event == "job.stopped" and isinstance(event.fields.get("code"), int):
            return int(event.fields["code"])
    known = (EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP, EXIT_TOO_FEW_NODES, EXIT_SAVED)
    return next((code for code in known if code in codes.values()), EXIT_LOST)


def this_attempt(events: Sequence[Event]) -> Sequence[Event]:
    """Return the events since the newest `run.started`."""
    for index in range(len(events) - 1, -1, -1):
        if events[index].event == "run.started":
            return events[index:]
    return events


def judge(
    run_dir: Path,
    *,
    codes: Mapping[str, int],
    events: Sequence[Event],
    interrupted: bool,
    again: str = RUN_AGAIN,
) -> Verdict:
    """Return how the run in `run_dir` ended.

    Args:
        run_dir: for the way out and the log tails.
        codes: exit codes of the agents that ended by themselves, by node.
        events: the whole record.
        interrupted: the user asked for the end.
        again: the command that goes on with it; `{run}` is filled in.
    """
    code = job_code(codes, events)
    if code == EXIT_DONE:
        return Verdict(code=code, cli_code=CLI_DONE, text="finished")
    if interrupted:
        if code == EXIT_LOST:  # the agents were killed, or had not begun to listen
            code = CLI_INTERRUPTED
        return Verdict(code=code, cli_code=CLI_INTERRUPTED, text=_interrupted(run_dir, events))
    attempt = this_attempt(events)
    failed = first_failure(attempt)
    reason = _reason(attempt)
    lines = [f"the job failed with code {code}" + (f": {reason}" if reason else "")]
    user = code == EXIT_DO_NOT_RESTART and (
        failed is None or failed.fields.get("kind") == Kind.USER_ERROR
    )
    if failed is not None:
        rank = "" if worker_rank(failed) is None else f" (rank {worker_rank(failed)})"
        lines.append(
            f"first failure: {failed.node}{rank}, epoch {failed.epoch}: "
            f"{failed.fields.get('kind')}: {failed.fields.get('detail')}"
        )
    log = evidence(run_dir, failed, codes)
    if log is not None:
        lines += [f"evidence: {log}", *(f"  | {line}" for line in tail(log))]
    lines.append(way_out(code, run_dir, again))
    return Verdict(code=code, cli_code=CLI_USER if user else CLI_FAILED, text="\n".join(lines))


def way_out(code: int, run_dir: Path, again: str = RUN_AGAIN) -> str:
    """Return what to do after a job that ended with `code`, which is not 0."""
    known = _WAY_OUT.get(code, _WAY_OUT[EXIT_LOST])
    return known.format(run=run_dir, again=again.format(run=run_dir))


def saved_step(events: Sequence[Event]) -> int | None:
    """Return the newest step on storage; None: nothing was saved."""
    steps = [event.step for event in events if event.event == "checkpoint.committed"]
    return max((step for step in steps if step is not None), default=None)


def _interrupted(run_dir: Path, events: Sequence[Event]) -> str:
    step = saved_step(events)
    if step is None and (shown := _shown_step(events)) is not None:
        return (
            f"stopped at step {shown}; continue from the script's own newest checkpoint with: "
            f"holdfast run --resume {run_dir}"
        )
    if step is None:
        return (
            f"stopped before anything was saved; start again with: holdfast run --resume {run_dir}"
        )
    return f"saved at step {step}; continue with: holdfast run --resume {run_dir}"


def _shown_step(events: Sequence[Event]) -> int | None:
    """Return the step that a script has shown last; None: it has shown none."""
    steps = (event.step for event in reversed(events) if event.event == "script.progress")
    return next(steps, None)


def first_failure(attempt: Sequence[Event]) -> Event | None:
    """Return the first worker's end of the last epoch that was no consequence of another's."""
    failed = [
        event
        for event in attempt
        if event.event == "worker.exit"
        and event.fields.get("kind") not in (None, "", Kind.COLLATERAL)
    ]
    last = max((event.epoch or 0 for event in failed), default=0)
    return next((event for event in failed if (event.epoch or 0) == last), None)


def _reason(attempt: Sequence[Event]) -> str:
    for event in reversed(attempt):
        if event.event in ("job.stopped", "agent.exit") and event.fields.get("reason"):
            return str(event.fields["reason"])
    return ""


def evidence(run_dir: Path, failed: Event | None, codes: Mapping[str, int]) -> Path | None:
    """Return the log that shows why: the failed rank's, else that of an agent that failed."""
    attempts = sorted(
        (path for path in (run_dir / "logs").glob("*") if ATTEMPT.fullmatch(path.name)),
        key=lambda path: attempt_order(path.name),
    )
    if not attempts:
        return None
    candidates = []
    if failed is not None and failed.node is not None:
        candidates.append(attempts[-1] / failed.node / f"{worker_rank(failed)}.log")
        candidates.append(attempts[-1] / failed.node / "agent.log")
        candidates.append(attempts[-1] / f"{failed.node}.log")
    candidates += [
        attempts[-1] / node / "agent.log" for node, code in sorted(codes.items()) if code != 0
    ]
    return next((path for path in candidates if path.is_file() and path.stat().st_size), None)


def tail(path: Path, num_lines: int = _TAIL_LINES) -> list[str]:
    """Return the last lines of a log, read from its end."""
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - 200 * num_lines))
        text = file.read().decode("utf-8", errors="replace")
    return text.splitlines()[-num_lines:]
