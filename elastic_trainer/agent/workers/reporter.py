"""What a node reports of its workers: to membership, and to the record."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass

from elastic_trainer.agent.hangs.hang import WorkerProgress
from elastic_trainer.agent.hangs.stacks import dump_stacks
from elastic_trainer.agent.membership.notices import EpochFormed, WorkersFailed
from elastic_trainer.agent.membership.tasks import StandbyReady, WorkerExited, WorkerStarted
from elastic_trainer.agent.workers.group import group_rank_of
from elastic_trainer.agent.workers.hang_monitor import HangMonitor
from elastic_trainer.agent.workers.settings import AgentConfig, Membership
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.event_log import EventLog
from elastic_trainer.failures import Action, Failure, Kind

STACKS_JOIN_S = 1.0
"""How long the agent's end waits for stacks that storage has yet to take."""


@dataclass(slots=True)
class Running:
    """The epoch that runs on this node, as its agent sees it."""

    """One epoch on this node."""

    formed: EpochFormed
    monitor: HangMonitor
    fork_begun: float
    started: int = 0
    running: bool = False
    stepped: bool = False
    """A worker here has completed a step of it."""
    failed: bool = False
    freed: bool = False
    """Older epochs' snapshots have been let go."""
    finished: bool = True
    """No worker that ended well left before the last step."""
    step: int = 0
    """Highest completed step seen."""
    committed: int = 0
    """Newest step that workers said to be committed."""
    held: WorkersFailed | None = None
    """A consequence, kept back in the hope of its cause; or an error others may have too."""
    held_until: float = 0.0


class Reporter:
    """Reports of one node's workers. It decides nothing.

    Args:
        config: of the agent.
        workers: of this node.
        membership: is notified of the progress of workers.
        log: the agent's events.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: AgentConfig,
        workers: Workers,
        membership: Membership,
        log: EventLog,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._workers, self._membership = config, workers, membership
        self._log, self._clock = log, clock
        self._stack_writer: threading.Thread | None = None

    def failed(self, epoch: Running, local_rank: int, step: int, failure: Failure) -> WorkersFailed:
        """Return the report of a failure of one worker here."""
        first = group_rank_of(epoch.formed, self._config.me) * self._config.workers
        return WorkersFailed(
            epoch=epoch.formed.epoch,
            local_rank=local_rank,
            rank=first + local_rank,
            step=step,
            failure=failure,
            of=self._config.workers,
            committed=self._committed(epoch),
        )

    def overdue(self, epoch: Running, worst: WorkerProgress) -> WorkersFailed:
        """Put a hang that no coordinator has acted upon on record; return its report."""
        section, step = worst.beat.section.name.lower(), worst.beat.step
        detail = (
            f"no progress for {worst.idle_s:.1f} s in {section} "
            f"after step {step}; the ceiling is {worst.ceiling_s:g} s"
        )
        failure = Failure(kind=Kind.HANG, action=Action.RESTART, detail=detail)
        report = self.failed(epoch, worst.local_rank, step, failure)
        self._log.emit(
            "worker.hung",
            step=step,
            member=self._config.me.node,
            local_rank=worst.local_rank,
            worker_rank=report.rank,
            section=section,
            idle_s=round(worst.idle_s, 3),
            detail=detail,
        )
        return report

    def show(self, epoch: Running, *, stalled: bool) -> None:
        """Tell the coordinator where the workers stand; also put those that hang on record."""
        self._membership.report(
            epoch.monitor.seen(
                epoch.formed.epoch, stalled=stalled, committed=self._committed(epoch)
            )
        )
        for worker in epoch.monitor.newly_hung():
            self._log.emit(
                "worker.stalled",
                step=worker.beat.step,
                local_rank=worker.local_rank,
                section=worker.beat.section.name.lower(),
                part=worker.beat.part.name.lower(),
                idle_s=round(worker.idle_s, 3),
                limit_s=round(worker.limit_s, 3),
                state=worker.state,
            )

    def exited(self, exited: WorkerExited, failure: Failure | None, detail: str = "") -> None:
        """Put the end of a worker on record; `detail` stands where there is no failure."""
        self._log.emit(
            "worker.exit",
            step=exited.beat.step,
            pid=exited.pid,
            local_rank=exited.local_rank,
            worker_rank=exited.rank,
            code=exited.code,
            signal=exited.signal,
            kind=failure.kind if failure else None,
            action=failure.action if failure else None,
            detail=failure.detail if failure else detail,
        )

    def started(self, started: WorkerStarted) -> None:
        """Put the start of a worker on record."""
        self._log.emit(
            "worker.started",
            pid=started.pid,
            local_rank=started.local_rank,
            worker_rank=started.rank,
            how=started.how,
            why=started.why,
        )

    def standby(self, ready: StandbyReady) -> None:
        """Put on record that a process waits for the next epoch."""
        self._log.emit("standby.ready", **dataclasses.asdict(ready))

    def phase(self, phase: str, begin: float) -> None:
        """Put a phase of a recovery on record: from `begin` until now."""
        self._log.emit("recovery.phase", phase=phase, seconds=round(self._clock() - begin, 6))

    def dump_stacks(self, epoch: Running) -> None:
        """Put on record what the workers are doing; puts their end off by GATHER_S."""
        self._stack_writer = dump_stacks(
            list(self._workers.processes().values()),
            self._config.stacks_dir,
            epoch.formed.epoch,
            self._log,
        )

    def close(self) -> None:
        """Wait a moment for stacks that storage has yet to take."""
        if self._stack_writer is not None:
            self._stack_writer.join(STACKS_JOIN_S)

    def _committed(self, epoch: Running) -> int | None:
        return epoch.committed if self._config.watch_all else None
