"""What the end of a worker means, told to the record and to torchelastic."""

from __future__ import annotations

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.agent.workers import WorkerExited, has_run
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
