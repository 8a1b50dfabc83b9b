"""What workers are to do, and what becomes of them. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_trainer.worker.heartbeat import Beat

SCRIPT_PRELOAD = "elastic_trainer.worker.script_preload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every worker runs."""

    kind: str
    """`main` (the trainer: its `main()` is called), `module`, `script` or `command`."""
    target: str
    args: tuple[str, ...] = ()
    fresh: bool = False
    """A script that must not be forked from the warm zygote."""
    cwd: str = "."
    count_steps: bool = True
    """The optimizer's steps are a script's progress; False where it shows it otherwise."""

    @property
    def preload(self) -> str:
        """Module the zygote imports: the trainer, or torch for scripts of others."""
        if self.kind == "main":
            return self.target
        return "" if self.fresh or self.kind == "command" else SCRIPT_PRELOAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One worker to start."""

    local_rank: int
    rank: int
    env: Mapping[str, str]
    log: Path
    heartbeat: Path
    error_file: Path
    error_log: Path | None = None
    """Gets stderr; None: `log` does."""
    args: tuple[str, ...] | None = None
    """Those of this epoch; None: the task's."""
    cpus: str | None = None
    """CPUs to run on, as 0-3,8; None: all of the agent's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted:
    """A worker is running."""

    local_rank: int
    rank: int
    pid: int
    how: str
    """`zygote`, `standby`, `prepared` or `fresh`."""
    why: str | None
    """Why fresh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyReady:
    """A process waits for the next epoch's work of a local rank."""

    local_rank: int
    pid: int
    seconds: float
    """That it took."""
    private_mib: float | None
    """Memory that it shares with no other process; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedReady:
    """A worker of an epoch that may come waits for it."""

    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedLost:
    """It has ended instead."""

    local_rank: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker ended. Exactly one of `code` and `signal` is set."""

    local_rank: int
    rank: int
    pid: int
    code: int | None
    signal: int | None
    record: dict[str, Any] | None
    """The error file's content."""
    error_file: Path
    log: Path
    """Has its stderr."""
    log_tail: str
    """What it last wrote there, of this epoch alone; empty after a good end. After SIGKILL: what is
    known of memory."""
    beat: Beat
    """Its last sign of progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZygoteLost:
    """The zygote died, and every worker with it. `workers` were running."""

    detail: str
    workers: int
    unreapable: tuple[int, ...]
    """Processes that even the kernel could not end."""
    of_memory: bool = False
    """The kernel has killed processes of this machine for memory meanwhile."""


Happening = WorkerStarted | StandbyReady | PreparedReady | PreparedLost | WorkerExited | ZygoteLost
