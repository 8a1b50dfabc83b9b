"""Workers as the record and torchelastic see them: their places, and what their ends mean."""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.agent.membership.notices import EpochFormed, Member
from elastic_trainer.agent.membership.tasks import Launch, WorkerExited
from elastic_trainer.agent.workers.environment import ROLE, group_rank_of
from elastic_trainer.agent.workers.workers import has_run
from elastic_trainer.event_log import EventLog
from elastic_trainer.failures import EXIT_DONE, EXIT_SAVED, Failure, classify


def failure_of(exited: WorkerExited, *, beats: bool) -> Failure | None:
    """Classify the end of a worker; None for a good end.

    Args:
        exited: how it ended.
        beats: its heartbeat tells how far it came; of a script without one nobody knows.
    """
    if exited.code in {EXIT_DONE, EXIT_SAVED}:
        return None
    return classify(
        code=exited.code,
        signal=exited.signal,
        record=exited.record,
        log_tail=exited.log_tail,
        at_start=beats and not has_run(exited.beat),
    )


def log_exit(
    log: EventLog, exited: WorkerExited, failure: Failure | None, detail: str = ""
) -> None:
    """Append the `worker.exit` event; `detail` stands where there is no failure."""
    log.emit(
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


def process_failure(exited: WorkerExited) -> ProcessFailure:
    """Return torchelastic's view of a failed worker."""
    failure = ProcessFailure(
        local_rank=exited.local_rank,
        pid=exited.pid,
        exitcode=exited.code if exited.code is not None else -(exited.signal or 0),
        error_file="",
    )
    if exited.record is not None:
        failure.error_file_data = exited.record
        failure.message = str(exited.record.get("message", ""))
    return failure


def worker_spec(workers: int, target: str, max_restarts: int, role: str = ROLE) -> WorkerSpec:
    """Return torchelastic's description of this node's workers.

    It has no rendezvous handler: membership tells this agent of epochs by notices.
    """
    return WorkerSpec(
        role=role,
        local_world_size=workers,
        rdzv_handler=None,
        entrypoint=target,
        max_restarts=max_restarts,
    )


def describe(group: WorkerGroup, formed: EpochFormed, me: Member, launches: list[Launch]) -> None:
    """Make torchelastic's view of this node's workers that of a new epoch."""
    group.group_rank = group_rank_of(formed, me)
    group.group_world_size = len(formed.members)
    group.master_addr, group.master_port = formed.store_address, formed.store_port
    group.state = WorkerState.HEALTHY
    for worker, launch in zip(group.workers, launches, strict=True):
        worker.id = None  # its process id, once it has one
        worker.global_rank = worker.role_rank = launch.rank
        worker.world_size = worker.role_world_size = len(launches) * len(formed.members)
