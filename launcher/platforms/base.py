"""The Backend protocol: what a platform must offer to run a job.

Commands (`submit`, `status`, `list`, `logs`, `why`, `cancel`, `describe`) use platforms only
through it, so they mean the same on each. Everything about the training itself (steps, losses,
checkpoints) is in the run directory.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NewType, Protocol, runtime_checkable

from elastic_trainer.record.failures import (
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
)

if TYPE_CHECKING:
    import threading
    from contextlib import AbstractContextManager

    from elastic_trainer.board.kubernetes_board import Server
    from launcher.platforms.commands import CommandResult
    from launcher.spec.errors import Problem

JobId = NewType("JobId", str)
"""The platform's name for one submission: Slurm's job number, a Kubernetes name, local-…"""

NO_SUCH_JOB = "no such job"
"""`JobStatus.reason` where the platform answers, and does not know the job (any more)."""


class JobState(enum.StrEnum):
    """The state of a submission."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    SAVED = "saved"
    """Ended on a signal with its state saved (exit code 91): requeue or resume it."""
    STOPPED = "stopped"
    """The same, but by the run's record nothing was saved; no platform says so by itself."""
    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    """The platform does not answer, or does not know the job (any more)."""

    @property
    def is_final(self) -> bool:
        """Whether it stays as it is."""
        return self not in (JobState.PENDING, JobState.RUNNING, JobState.UNKNOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRef:
    """One submission, unmistakably: platforms reuse ids."""

    id: JobId
    submit_time: float | None = None
    """Unix seconds on the platform's clock; None: unknown when it was recorded."""
    run_dir: str = ""
    """Its run, which the platform's record of the job names."""
    cluster: str = ""
    """One of several clusters of the platform; empty: the default."""
    own_script: bool = False
    """Its batch script is the user's (`holdfast wrap`), which may be anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One answer to "how is it?". Times are Unix seconds; None: unknown, or not yet."""

    state: JobState
    code: int | None = None
    """Exit code of the job as a whole; None: it runs, or unknown."""
    reason: str = ""
    """The platform's words: a pending reason, how it ended, why its state is unknown."""
    words: str = ""
    """The same for people, with a fix if known."""
    expected_start: float | None = None
    """When the scheduler plans to start a pending job."""
    submitted: float | None = None
    started: float | None = None
    ended: float | None = None
    ends_by: float | None = None
    """When a running job's time is up."""
    nodes: tuple[str, ...] = ()
    nodes_lost: tuple[str, ...] = ()
    """Its nodes that the platform holds for dead or cannot reach."""
    broke: float | None = None
    """When the platform last ended a node of it, or found that it cannot start: `words` say how.
    None: never, or the node has been well for long since."""
    suspended: bool = False
    """Its processes are stopped; the platform can let them continue."""
    failed_starts: Mapping[str, str] = field(default_factory=dict)
    """Node -> id of the container that could not be started there, where the platform tries again
    without limit. The next try has another id."""
    num_nodes: int = 0
    """Nodes that it is to have; 0: unknown."""
    batch_host: str = ""
    """The node that runs the batch script, lost or not."""
    restarts: int | None = None
    """Requeues by the platform; None: it does not say."""
    source: str = ""
    """Who said so, such as squeue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformEvent:
    """Something the platform did with a job."""

    t_unix: float
    text: str


class Backend(Protocol):
    """Submits rendered bundles and watches them. Everything else is in the run directory.

    Calls may raise UserError (the request cannot be met), TemporaryError (try again later; calls
    have tried again themselves) or PermanentError. Methods with a body suit a platform with this
    machine's storage and without arrays.
    """

    def check(self, files: Mapping[str, str]) -> list[str]:
        """Ask the platform whether it would take this bundle; return the lines of its answer."""
        del files
        return []

    def find_problems(
        self, files: Mapping[str, str], *, without: Sequence[str] = ()
    ) -> list[Problem]:
        """Ask the platform, read-only and for seconds, what keeps this bundle from ever running.

        What the platform itself would refuse at once in clear words is left out, and so are unknown
        facts: nothing is raised. Mere waiting makes warnings. `without` names nodes to avoid
        besides the bundle's.
        """
        del files, without
        return []

    def submit(
        self,
        run_dir: Path,
        files: Mapping[str, str],
        *,
        tasks: Sequence[int] | None = None,
        without: Sequence[str] = (),
    ) -> JobRef:
        """Submit the bundle in `run_dir`; when this raises, nothing was submitted.

        `run_dir` is absolute, on storage the nodes share, and has the `files`. `tasks` limits an
        array to these. `without` names nodes to avoid besides the bundle's.
        """

    def nodes_run_dir(self, run_dir: Path, files: Mapping[str, str]) -> str:
        """Return where the nodes see `run_dir`; the same path where storage is shared."""
        del files
        return str(run_dir)

    def only_data_is_shared(self, files: Mapping[str, str]) -> bool:
        """Return whether a run's board and secret are outside its directory."""
        del files
        return False

    def task_of(self, job: JobRef, index: int, run_dir: Path) -> JobRef:
        """Return the submission of task `index` of the array `job`, whose run is `run_dir`."""
        del index, run_dir
        return job

    def status(self, jobs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """Return the status of each job, by one batched query.

        Jobs are UNKNOWN, with the reason, where the platform is away or does not know them.
        """

    def ask_to_save(self, job: JobRef) -> bool:
        """Ask a running `job` to save and end; return False if it does not run."""

    def cancel(self, job: JobRef) -> None:
        """End `job` at once, if it has not ended already."""

    def output_files(self, job: JobRef) -> list[Path]:
        """Return the files of the platform's own output of `job`, oldest first."""

    def describe(self, job: JobRef) -> dict[str, str]:
        """Return the platform's record of `job`, in its own names."""

    def events(self, job: JobRef) -> list[PlatformEvent]:
        """Return what the platform did with `job`, in order of time."""
        del job
        return []

    def fetch(self, job: JobRef) -> None:
        """Bring the run's new files into `job.run_dir`, where storage is not shared.

        Everything that reads a run directory calls this first.
        """


@runtime_checkable
class RemoteExec(Protocol):
    """Commands on a platform's nodes, where ssh and srun do not reach."""

    def remote_paths(self, job: JobRef) -> tuple[str, str]:
        """Return the interpreter with holdfast and the run directory, as on the nodes."""

    def run_on(
        self, job: JobRef, node: str, argv: Sequence[str], *, timeout_s: float
    ) -> CommandResult:
        """Run a command beside the agent of `node`, to its end."""

    def terminal_on(self, job: JobRef, node: str, argv: Sequence[str]) -> int:
        """Run a command there with this terminal; return its exit code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine of a platform."""

    name: str
    closed: str = ""
    """Why the platform begins no job there, in its own words; empty: it does."""
    rack: str = ""
    """The platform's name for machines that share power or a switch; empty: unknown."""


@runtime_checkable
class Machines(Protocol):
    """Machines of a platform, by name."""

    def machines(self, files: Mapping[str, str] | None = None) -> list[Machine]:
        """Return all machines of the cluster that `files` names, or of the current one."""

    def register_server(self, of: Mapping[str, str] | JobRef) -> Server:
        """Return a client of the cluster of a bundle or a job, for the ledger in a ConfigMap.

        Raises:
            UserError: HF690 this platform has none; HF632, HF750 to HF752 no way to it.
        """

    def drain_machines(self, names: Sequence[str], reason: str) -> None:
        """Let no job begin on these, and ask ours there to leave at a step boundary.

        Raises:
            UserError: HF693 the platform refuses.
        """

    def still_on(self, names: Sequence[str]) -> dict[str, str]:
        """Return the machines on which something of a job still is, and what, for people."""


@runtime_checkable
class ChangeFeed(Protocol):
    """Notifications of a platform about changes."""

    def noticing(self, job: JobRef) -> AbstractContextManager[threading.Event]:
        """Set the event, until the end of the context, whenever something of `job` changes."""


# -- Exit codes of a job --------------------------------------------------------------------------


EXIT_LOST: Final = 1
"""No agent is left that could say why."""
EXIT_INTERRUPTED: Final = 130
"""Ctrl-C, before the agents could save or a second time: as shells count it."""

EXIT_TEXTS: Final[dict[int, str]] = {
    EXIT_SAVED: "saved, and left the queue",
    EXIT_TOO_FEW_NODES: "too few healthy nodes were left",
    EXIT_DO_NOT_RESTART: "it would fail again, so it was not restarted",
    EXIT_BUDGET_USED_UP: "a restart budget is used up",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C",
}


def state_of(code: int) -> JobState:
    """Return how a job ended that the platform has forgotten, by the code in its record."""
    known = {
        EXIT_DONE: JobState.DONE,
        EXIT_SAVED: JobState.SAVED,
        EXIT_INTERRUPTED: JobState.CANCELLED,
    }
    return known.get(code, JobState.FAILED)
