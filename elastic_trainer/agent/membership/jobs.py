"""Names of jobs: which of two is the same job of a scheduler, started again. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAMES = re.compile(r"(\d+|[a-z][-a-z0-9]*-\d+)\.(\d+)")
"""Slurm's `<job>.<restart>`, and `<job>-<submission>.<generation>` of pods."""


def slurm_job(env: Mapping[str, str]) -> str | None:
    """Return `<job>.<restart>` inside a Slurm job; None elsewhere.

    A requeued job keeps its id. It must not find the end of its former attempt on the board
    and take it for its own, so the restart is part of the name.
    """
    job = env.get("SLURM_JOB_ID")
    return f"{job}.{env.get('SLURM_RESTART_COUNT') or 0}" if job else None


def is_of(job: str, other: str) -> bool:
    """Return whether an agent of `job` may have been started for `other`, and comes late."""
    return job == other or supersedes(job, other)


def supersedes(job: str, other: str) -> bool:
    """Return whether `job` is a later attempt of the same job as `other`.

    Then whatever still runs of `other` is stale: the scheduler has started the job again, and
    has only not been able to end everything of before, as on a node whose slurmd died.
    """
    ours, theirs = _NAMES.fullmatch(job), _NAMES.fullmatch(other)
    return (
        ours is not None
        and theirs is not None
        and ours[1] == theirs[1]
        and int(ours[2]) > int(theirs[2])
    )
