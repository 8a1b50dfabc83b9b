"""What a pod decides: which generation of the job it is part of, and how it ends. Pure.

A **generation** is what an attempt is under Slurm: from the pods' start until the job as a whole
ends. When it ends saved, or with too few nodes, the controller starts the pods again, and the next
generation begins. Its number is in the job's name, so that nobody takes the end of the one before
for its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
)

KINDS: Final = ("pytorchjob", "jobset", "trainjob")
AGAIN: Final = 143
"""As if SIGTERM had ended it: PyTorchJob starts a pod again after codes from 128 on only. The Job
of a JobSet does not charge it: `all_fail` ends what does not get anywhere."""
AGAIN_CHARGED: Final = 144
"""The same of a pod that cannot count its failures on the claim, so that the Job must."""
MOST_IN_A_ROW: Final = 10
"""Failures of each pod, none of which lived long. With the pauses between them the first and the
last are half an hour apart (PyTorchJob) or an hour: storage that is away for less ends no job."""
_JOB = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MADE_UP = re.compile(r"-[a-z0-9]{5}\Z")


def job_id(name: str, submission: str) -> str:
    """Return what the generations of one submission share: `<name>-<submission>`.

    Raises:
        ValueError: one of the two is of another form.
    """
    if not _JOB.fullmatch(name) or not re.fullmatch(r"\d{1,9}", submission):
        raise ValueError(f"job {name!r}, submission {submission!r}")
    return f"{name}-{int(submission)}"


def generation(job: str, *, lease_job: str | None, ended_job: str | None) -> int:
    """Return the generation of `job` that a pod which starts now is part of.

    All pods must come to the same answer, so it depends on the board alone: the one that holds
    the lease, else the one after that which has ended.

    Args:
        job: see `job_id`.
        lease_job: name of the job that coordinates the run, or did when its agents died.
        ended_job: name of the job that ended last.
    """
    live, ended = _number(job, lease_job), _number(job, ended_job)
    return max(-1 if live is None else live, -1 if ended is None else ended + 1, 0)


def _number(job: str, name: str | None) -> int | None:
    base, dot, number = (name or "").rpartition(".")
    return int(number) if dot and base == job and number.isdecimal() else None


def exit_code(kind: str, code: int | None, *, stop_asked: bool) -> int:
    """Return the code that a pod ends with.

    0 ends a job well and must not come from a pod whose run is not done. A code that ends it
    badly must not come from a pod whose job continues, whatever its own agent says. All else is
    tried again. A cancelled run stays down: a PyTorchJob ends with any code below 128, a JobSet
    with 93 and 94 only.

    Args:
        kind: of the job: one of KINDS.
        code: how this generation has ended as a whole, 0 where the run is done; None: it continues.
        stop_asked: the user wants the run to stay stopped.
    """
    assert kind in KINDS, kind
    if code in (EXIT_DONE, EXIT_DO_NOT_RESTART, EXIT_BUDGET_USED_UP):
        return code
    if code == EXIT_SAVED and stop_asked:
        return EXIT_SAVED if kind == "pytorchjob" else EXIT_DO_NOT_RESTART
    return AGAIN


def all_refuse(kind: str, exits: Mapping[str, int], num_nodes: int, live: bool) -> bool:
    """Return whether the job cannot start anywhere: every pod's agent says so, and none leads.

    Args:
        kind: of the job: one of KINDS.
        exits: pod -> code of its agent, of this generation.
        num_nodes: pods of the job.
        live: an agent coordinates, or has done.
    """
    places = {place(kind, pod) for pod in exits}
    refused = set(exits.values()) == {EXIT_DO_NOT_RESTART}
    return not live and len(places) >= num_nodes > 0 and refused


def all_fail(counts: Mapping[str, int], num_nodes: int) -> bool:
    """Return whether as many pods as the job needs fail again and again.

    Args:
        counts: place -> failures in a row, of this submission.
        num_nodes: pods of the job.
    """
    return sum(count >= MOST_IN_A_ROW for count in counts.values()) >= num_nodes > 0


def place(kind: str, pod: str) -> str:
    """Return what a pod and those that are made in its place have in common.

    Only a PyTorchJob gives them the same name; a Job adds five characters, new each time.

    Args:
        kind: of the job: one of KINDS.
        pod: its name.
    """
    assert kind in KINDS, kind
    return pod if kind == "pytorchjob" else _MADE_UP.sub("", pod)
