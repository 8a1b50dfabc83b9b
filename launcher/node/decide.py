"""Decisions of the batch script and the watchdog. Pure: facts in, a decision out."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from elastic_trainer.board.state import BoardState, Ended
from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)
from launcher.node.attempt import Past

if TYPE_CHECKING:
    from elastic_trainer.plan.config import ElasticSection

EXIT_LEFT = 95
"""The code of a node whose agent has left the job, which goes on without it."""
REQUEUES = frozenset({EXIT_SAVED, EXIT_TOO_FEW_NODES})
"""Codes after which another start of the job may get further."""
NOTHING_TO_DO = 90
"""`begin`: the run has done its last step; the script ends with 0."""
STILL_READS = 3
"""Readings of an unchanged beat, each after the time of several beats, after which it is lost."""
LIMIT_SLACK_S = 90.0
"""Slurm's signal before the time limit may come a minute early; and a step must end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether the script may continue, or the code with which it ends."""

    code: int
    """0: continue."""
    reason: str = ""


GO = Decision(code=0)


def may_begin(
    *,
    finished: bool,
    stop_asked: bool,
    live_job: str | None,
    past: Sequence[Past],
    step: int | None,
    now_unix: float,
    budget: ElasticSection,
    before: str | None = None,
) -> Decision:
    """Say whether an attempt may start.

    `finished`: the run has done its last step; `stop_asked`: the user wants it to stay stopped;
    `live_job` trains this run right now. `past` has the attempts since the user submitted the run,
    oldest first. `step` is the newest that counts; -1: none; None: unknown, as of a script that
    shows none: then only the budget decides. The 93 or 94 of `before`, this job's attempt before
    this one, is final: a watchdog could only write it down and have the job started again, to end
    it here.
    """
    if finished:
        return Decision(code=NOTHING_TO_DO, reason="the run has done its last step")
    if stop_asked:
        return Decision(
            code=EXIT_SAVED, reason="it was cancelled; `holdfast submit --resume` resumes it"
        )
    if live_job is not None:
        return Decision(
            code=EXIT_DO_NOT_RESTART,
            reason=f"HF670 the run is live in job {live_job}: cancel that job, or wait for its end",
        )
    last = next((p for p in past if p.name == before), None)
    if last is not None and last.code in {EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP}:
        return Decision(code=last.code, reason=f"attempt {last.name}: {last.reason}")
    return _within(past, step=step, now_unix=now_unix, budget=budget)


def _within(
    past: Sequence[Past], *, step: int | None, now_unix: float, budget: ElasticSection
) -> Decision:
    bad = [
        p
        for p in past
        if p.code not in {EXIT_DONE, EXIT_SAVED} and p.begun_unix > now_unix - budget.window_s
    ]
    if len(bad) > budget.max_restarts:
        return Decision(
            code=EXIT_BUDGET_USED_UP,
            reason=f"HF671 {len(bad)} attempts have failed within {budget.window_s:g} s, "
            f"elastic.max_restarts is {budget.max_restarts}; the last, {bad[-1].name}: "
            f"{bad[-1].reason or 'no reason is known'}; fix that, then holdfast submit --resume",
        )
    # One that was asked to end before it had started anything says nothing.
    silent = list(
        itertools.takewhile(
            lambda each: not each.began and each.code == EXIT_TOO_FEW_NODES, reversed(past)
        )
    )
    if len(silent) >= budget.no_progress:
        return Decision(
            code=EXIT_DO_NOT_RESTART,
            reason=f"HF677 no agent could be started in {len(silent)} attempts in a row; the last, "
            f"{past[-1].name}: {past[-1].reason or 'no reason is known'}",
        )
    if step is None:
        return GO
    idle, newest = 0, step
    for p in reversed(past):
        if not p.failed or p.step < newest:
            break
        idle, newest = idle + 1, p.step
    if idle >= budget.no_progress:
        return Decision(
            code=EXIT_DO_NOT_RESTART,
            reason=f"HF672 {idle} attempts in a row have ended without a step beyond "
            f"{max(step, 0)} that counts (saved, or shown by a script); the last, "
            f"{past[-1].name}: {past[-1].reason or 'no reason is known'}; fix that, or save more "
            "often (checkpoint.every_s, or the script's own), then holdfast submit --resume",
        )
    return GO


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """The outcome of an attempt."""

    code: int
    """For the script: 0, 91, 92, 93 or 94."""
    failed: bool
    """Counts towards `elastic.no_progress`: see Past."""
    reason: str


def end_of(state: BoardState, name: str) -> Ended | None:
    """Return the end of attempt `name` that its coordinator left, if any."""
    return state.ended if state.ended is not None and state.ended.job == name else None


def began(state: BoardState, name: str) -> bool:
    """Return whether an agent of attempt `name` has got as far as the board."""
    coordinated = state.lease is not None and state.lease.job == name
    return state.finished or coordinated or end_of(state, name) is not None


def attempt_result(
    state: BoardState,
    name: str,
    *,
    exits: Mapping[str, int],
    at_limit: bool = False,
    step_code: int | None = None,
    refusal: str = "",
) -> AttemptOutcome:
    """Return the outcome of attempt `name`. srun's code decides nothing: it lies after a node loss.

    `state` is empty where the board cannot be read; `exits` has the codes of agents by node;
    `refusal` is in Slurm's words, or a node's, where no agent could be started.
    """
    if state.finished:
        return AttemptOutcome(code=EXIT_DONE, failed=False, reason="the last step is done")
    ended = end_of(state, name)
    if refusal and not began(state, name):
        reason = f"HF677 no agent could be started: {refusal}"
        return AttemptOutcome(code=EXIT_DO_NOT_RESTART, failed=True, reason=reason)
    code, reason = (ended.code, ended.reason) if ended else _of_exits(exits, step_code)
    if code == EXIT_FAILED:
        return AttemptOutcome(
            code=EXIT_TOO_FEW_NODES, failed=True, reason=f"agents failed: {reason}"
        )
    return AttemptOutcome(code=code, failed=code == EXIT_SAVED and at_limit, reason=reason)


def _of_exits(exits: Mapping[str, int], step_code: int | None) -> tuple[int, str]:
    """Return the common meaning of the agents' codes, where the board does not tell."""
    exits = {node: code for node, code in exits.items() if code != EXIT_LEFT}
    if not exits and step_code == EXIT_SAVED:  # the script had started nothing
        return EXIT_SAVED, "asked to end before an agent had begun"
    named = {code: [node for node in exits if exits[node] == code] for code in exits.values()}
    for code in (EXIT_DONE, EXIT_SAVED, EXIT_BUDGET_USED_UP):
        if code in named:  # all get these from the coordinator: one is enough
            return code, f"so say {a_few(named[code])}"
    if set(named) == {EXIT_DO_NOT_RESTART}:
        return EXIT_DO_NOT_RESTART, "all agents that ended say so; their logs have the error"
    listed = ", ".join(f"{code} on {a_few(nodes)}" for code, nodes in sorted(named.items()))
    if set(named) - {EXIT_DO_NOT_RESTART, EXIT_TOO_FEW_NODES}:
        return EXIT_FAILED, f"exit codes {listed}"
    return EXIT_TOO_FEW_NODES, f"exit codes {listed or f'none; srun says {step_code}'}"


def a_few(nodes: Sequence[str]) -> str:
    """Return the first names, and how many more."""
    named = sorted(nodes)
    return ", ".join(named[:3]) + (f" and {len(named) - 3} more" if len(named) > 3 else "")


def within_restarts(
    found: AttemptOutcome, *, restart: str, done: int, most: int | None, stop_asked: bool
) -> AttemptOutcome:
    """Return `found`, or 94 where the job would continue but may not once more.

    `done` counts its requeues, or the successors before it; `most` is `slurm.max_requeues`, if
    known.
    """
    continues = restart != "none" and found.code in REQUEUES and not stop_asked
    if not continues or most is None or done < most:
        return found
    reason = f"restarted {most} times, the most slurm.max_requeues allows; {found.reason}"
    return replace(found, code=EXIT_BUDGET_USED_UP, reason=reason)


def near_limit(save_by_unix: float | None, now_unix: float) -> bool:
    """Return whether a job is asked to save because its time is up."""
    return save_by_unix is not None and now_unix >= save_by_unix - LIMIT_SLACK_S


def pause_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Return the wait before a failed part is started again; it doubles each time.

    `failures` counts those in a row, this one included.
    """
    return min(first_s * 2.0 ** min(failures - 1, 16), longest_s) if failures > 0 else 0.0


@dataclass(frozen=True, slots=True)
class BeatWatch:
    """Readings of a beat. They are counted, not timed: a node that slept has missed none.

    The reader's clock and the writer's may differ, for only change counts.
    """

    value: str | None = None
    still: int = 0

    def read(self, value: str | None) -> BeatWatch:
        """Take a reading; None: it could not be read, which says nothing."""
        if value is None:
            return self
        return BeatWatch(value, self.still + 1 if value == self.value else 0)

    @property
    def lost(self) -> bool:
        """Whether it has stopped."""
        return self.still >= STILL_READS


def is_over(state: BoardState, name: str, *, lease_still: bool) -> bool | None:
    """Return whether attempt `name` has ended as a whole, for a node whose own agent has ended.

    True: somebody must end the job. False: it continues without this node, or a later job has taken
    its place. None: unknown yet. `lease_still`: the lease's beat has stopped for long.
    """
    if state.finished or end_of(state, name) is not None or state.lease is None:
        return True
    if state.lease.job != name:
        return False
    return True if lease_still else None


def what_now(code: int, *, restart: str, stop_asked: bool, has_next: bool) -> tuple[str, ...]:
    """Return a watchdog's acts for a job that has lost its batch host, in order.

    A requeued job runs its script again, and `begin` decides: continue, or end with the noted code.
    So a finished run also shows as COMPLETED. `restart` is `slurm.restart`: requeue, chain or none.
    `has_next`: a successor waits (chain).

    Returns:
        Of `requeue`, `cancel` (this job), `cancel-next`, and `keep-off`: of the successor.
    """
    if restart == "requeue" and not stop_asked:
        return ("requeue",)
    if not has_next:
        return ("cancel",)
    continues = code in REQUEUES and not stop_asked
    return ("keep-off" if continues else "cancel-next", "cancel")


# -- Pods -----------------------------------------------------------------------------------------
# A **generation** is what an attempt is under Slurm: from the pods' start until the job as a whole
# ends. When it ends saved, or with too few nodes, the controller starts the pods again, and the
# next generation begins. Its number is in the job's name, so nobody mistakes the end of the one
# before.


KINDS: Final = ("pytorchjob", "jobset", "trainjob")
AGAIN: Final = 143
"""As if SIGTERM had ended it: PyTorchJob starts a pod again after codes from 128 on only. The Job
of a JobSet does not charge it: `all_fail` ends a job that gets nowhere."""
AGAIN_CHARGED: Final = 144
"""The same from a pod that cannot count its failures on the claim, so the Job must."""
MOST_IN_A_ROW: Final = 10
"""Failures of each pod, all short-lived. With the pauses between them the first and the last are
half an hour apart (PyTorchJob) or an hour: storage that is away for less ends no job."""
_JOB = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MADE_UP = re.compile(r"-[a-z0-9]{5}\Z")


def job_id(name: str, submission: str) -> str:
    """Return the common part of a submission's generations: `<name>-<submission>`.

    Raises:
        ValueError: one of the two has another form.
    """
    if not _JOB.fullmatch(name) or not re.fullmatch(r"\d{1,9}", submission):
        raise ValueError(f"job {name!r}, submission {submission!r}")
    return f"{name}-{int(submission)}"


def generation(job: str, *, lease_job: str | None, ended_job: str | None) -> int:
    """Return the generation of `job` of a pod that starts now.

    All pods must come to the same answer, so it depends on the board alone: the one with the lease,
    else the one after the ended one. `lease_job` coordinates the run, or did when its agents died;
    `ended_job` ended last.
    """
    live, ended = _number(job, lease_job), _number(job, ended_job)
    return max(-1 if live is None else live, -1 if ended is None else ended + 1, 0)


def _number(job: str, name: str | None) -> int | None:
    base, dot, number = (name or "").rpartition(".")
    return int(number) if dot and base == job and number.isdecimal() else None


def exit_code(kind: str, code: int | None, *, stop_asked: bool) -> int:
    """Return the exit code of a pod.

    0 ends a job well and must not come from a pod whose run is not done. A code that ends it badly
    must not come from a pod whose job continues, whatever its own agent says. All else is tried
    again. A cancelled run stays down: a PyTorchJob ends with any code below 128, a JobSet with 93
    and 94 only.

    `code` is how this generation ended as a whole, 0 where the run is done; None: it continues.
    """
    assert kind in KINDS, kind
    if code in (EXIT_DONE, EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP):
        return code
    if code == EXIT_SAVED and stop_asked:
        return EXIT_SAVED if kind == "pytorchjob" else EXIT_DO_NOT_RESTART
    return AGAIN


def all_refuse(kind: str, exits: Mapping[str, int], num_nodes: int, live: bool) -> bool:
    """Return whether the job cannot start anywhere: every pod's agent says so, and none leads.

    `exits` has the codes of this generation's agents by pod; `live`: an agent coordinates, or has
    done.
    """
    places = {place(kind, pod) for pod in exits}
    refused = set(exits.values()) == {EXIT_DO_NOT_RESTART}
    return not live and len(places) >= num_nodes > 0 and refused


def all_fail(counts: Mapping[str, int], num_nodes: int) -> bool:
    """Return whether as many pods as the job needs fail again and again.

    `counts` has the failures in a row of this submission by place.
    """
    return sum(count >= MOST_IN_A_ROW for count in counts.values()) >= num_nodes > 0


def place(kind: str, pod: str) -> str:
    """Return what a pod and its replacements have in common.

    Only a PyTorchJob gives them the same name; a Job adds five characters, new each time.
    """
    assert kind in KINDS, kind
    return pod if kind == "pytorchjob" else _MADE_UP.sub("", pod)
