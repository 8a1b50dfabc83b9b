"""What a platform must offer to run a job: the Backend protocol."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

JobId = NewType("JobId", str)
"""The platform's name for one submission: Slurm's job number, a Kubernetes name, local-…"""


class JobState(enum.StrEnum):
    """Where a submission stands."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SAVED = "saved"
    """Ended on a signal with its state saved (exit code 91): requeue or resume it."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The platform does not know the job, or not any more."""

    @property
    def is_final(self) -> bool:
        """Whether it will not change by itself any more."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One answer to "how is it?"."""

    state: JobState
    code: int | None = None
    """Exit code of the job as a whole; None while it runs, or where nobody knows."""
    reason: str = ""
    """The platform's own words: a pending reason, how it ended."""


class Backend(Protocol):
    """Submits what was rendered and watches it. Everything else is in the run directory.

    Calls may raise TemporaryError (try again later) or PermanentError.
    """

    @property
    def name(self) -> str:
        """Name of the target: slurm, kubernetes, local."""

    def submit(self, files: Mapping[str, str]) -> JobId:
        """Submit a rendered bundle (file name -> text) and return the job's id."""

    def status(self, job: JobId) -> JobStatus:
        """Return where `job` stands."""

    def cancel(self, job: JobId, *, save: bool = True) -> None:
        """End `job`: with `save` workers save first, else at once."""
