"""A node's workers as torchelastic sees them: spec, group, ranks, failures, result, telemetry."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.events import Event, EventSource, record
from torch.distributed.elastic.metrics import put_metric
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

from elastic_trainer.agent.membership.notices import EpochFormed, Member
from elastic_trainer.agent.membership.tasks import WorkerExited

CLOSE_S = 1.0
"""How long the agent's end waits for a site's handlers."""


def assign_ranks(group: WorkerGroup, formed: EpochFormed, me: Member) -> None:
    """Make `group` that of a new epoch; node i of the rung is `formed.members[i]`.

    As torchelastic's own assignment where all nodes run as many workers, but for the exchange
    by a store: membership has told every node the same members in the same order.
    """
    group.group_rank = group_rank_of(formed, me)
    group.group_world_size = len(formed.members)
    group.master_addr, group.master_port = formed.store_address, formed.store_port
    group.state = WorkerState.HEALTHY
    for worker in group.workers:
        worker.id = None  # its process id, once it has one
        worker.global_rank = group.group_rank * len(group.workers) + worker.local_rank
        worker.role_rank = worker.global_rank  # there is one role
        worker.world_size = worker.role_world_size = len(group.workers) * len(formed.members)


def group_rank_of(formed: EpochFormed, me: Member) -> int:
    """Return this node's index among the members; -1 when it is not one of them."""
    ids = [member.agent_id for member in formed.members]
    return ids.index(me.agent_id) if me.agent_id in ids else -1


def process_failure(exited: WorkerExited) -> ProcessFailure:
    """Return torchelastic's view of a failed worker, with the error file if it left a whole one."""
    whole = exited.record is not None and "message" in exited.record
    failure = partial(
        ProcessFailure,
        local_rank=exited.local_rank,
        pid=exited.pid,
        exitcode=exited.code if exited.code is not None else -(exited.signal or 0),
    )
    try:
        return failure(error_file=str(exited.error_file) if whole else "")
    except (KeyError, TypeError, ValueError):  # a script's own, of another form
        return failure(error_file="")


@dataclass
class JobResult(RunResult):
    """What became of this node's workers in their last epoch, and how the agent should end."""

    code: int = 1
    """Exit code: 0, 91, 92, 93, 94, or 1."""


def forward_error_file(result: JobResult) -> None:
    """Copy the first failure's error file to where the agent's own parent looks for one.

    As torchrun does (`errors.record`). Not by ChildFailedError: it asks the name service for
    this machine's name, which may take ten seconds.
    """
    if not os.environ.get("TORCHELASTIC_ERROR_FILE") or not result.failures:
        return
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    if os.path.isfile(first.error_file):  # noqa: PTH113  a text of torchelastic's, maybe <N/A>
        get_error_handler().dump_error_file(first.error_file, first.exitcode)


class Telemetry:
    """Tells torchelastic's events and metrics, for what a site has registered with them.

    Names, states and metadata are torchelastic's (`SimpleElasticAgent`); restarts are those of
    this agent. Besides there are `workers.ROLE.epoch` and `workers.ROLE.recovery.duration.ms`, from
    the end of an epoch here to the first step of the next. Left out is what only the coordinator
    knows: restarts that remain, and the flakiness that follows from them. Handlers are called in a
    thread, for one that waits for a network must not hold up a recovery.

    `group` is read whenever something is told; `host` is never asked of the name service.
    """

    def __init__(self, group: WorkerGroup, host: str, clock: Callable[[], float]) -> None:
        self._group, self._host, self._clock = group, host, clock
        self._begun = clock()
        self._down_since: float | None = self._begun
        """When the last epoch ended here; None: its successor has done a step."""
        self._epochs = 0
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def formed(self, epoch: int) -> None:
        """A new epoch has this node in it."""
        self._epochs += 1
        if self._down_since is None:
            self._down_since = self._clock()
        self._event("RENDEZVOUS", seconds=self._clock() - self._down_since)
        self._metric("epoch", epoch)

    def started(self, worker: Worker) -> None:
        """A worker runs."""
        self._event("START", worker)

    def running(self) -> None:
        """The first step of an epoch is done here."""
        if self._down_since is not None and self._epochs > 1:
            self._metric("recovery.duration.ms", int((self._clock() - self._down_since) * 1000))
        self._down_since = None
        self._metric("healthy", 1)

    def down(self) -> None:
        """An epoch ends here before its time."""
        if self._down_since is None:
            self._down_since = self._clock()
            self._metric("unhealthy", 1)

    def ended(self, result: JobResult) -> None:
        """The job has stopped."""
        for worker in self._group.workers if self._epochs else []:
            failure = result.failures.get(worker.global_rank)
            well = worker.global_rank in result.return_values
            state = "FAILED" if failure else "SUCCEEDED" if well else "TERMINATED"
            self._event(state, worker, failure=failure)
        failed, again = result.is_failed(), self._epochs > 1
        self._event("FAILED" if failed else "SUCCEEDED")
        self._metric(result.state.name.lower(), 1)
        self._metric("run_total", 1)
        for name, happened in (
            ("run_success_with_retries", again and not failed),
            ("run_success_no_retries", not again and not failed),
            ("run_failed_with_retries", again and failed),
            ("run_failed_no_retries", not again and failed),
        ):
            self._metric(name, int(happened))

    def crashed(self, error: str) -> None:
        """The agent itself has failed: `error` is a traceback."""
        self._event("FAILED", error=error)

    def close(self) -> None:
        """Wait a moment for handlers that have yet to be told."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(CLOSE_S)

    def _event(
        self,
        state: str,
        worker: Worker | None = None,
        *,
        failure: ProcessFailure | None = None,
        seconds: float | None = None,
        error: str | None = None,
    ) -> None:
        group, spec = self._group, self._group.spec
        metadata: dict[str, object] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:  # lists of one: so torchelastic has them
            metadata["local_rank"] = [worker.local_rank]
            metadata["role_rank"] = [worker.role_rank]
            metadata["role_world_size"] = [worker.role_world_size]
            metadata["exit_code"] = [failure.exitcode if failure else None]
            metadata["worker_pid"] = [failure.pid if failure else worker.id]
        event = Event(
            name=f"torchelastic.worker.status.{state}",
            source=EventSource.AGENT if worker is None else EventSource.WORKER,
            timestamp=int(time.time() * 1000),
            metadata={
                "run_id": spec.rdzv_handler.get_run_id(),
                "global_rank": None if worker is None else worker.global_rank,
                "group_rank": group.group_rank,
                "worker_id": None if worker is None else str(worker.id),
                "role": spec.role,
                "hostname": self._host,
                "state": state,
                "total_run_time": int(self._clock() - self._begun),
                "rdzv_backend": spec.rdzv_handler.get_backend(),
                "raw_error": json.dumps(failure.error_file_data) if failure else error,
                "metadata": json.dumps(metadata),
                "agent_restarts": max(0, self._epochs - 1),
                "duration_ms": None if seconds is None else seconds * 1000,
            },
        )
        self._tell(partial(record, event, spec.event_log_handler))

    def _metric(self, name: str, value: int) -> None:
        self._tell(partial(put_metric, f"workers.{self._group.spec.role}.{name}", value))

    def _tell(self, call: Callable[[], None]) -> None:
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="holdfast-telemetry", daemon=True
            )
            self._thread.start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:  # noqa: BLE001  a site's handler; training goes on without it
                traceback.print_exc()
