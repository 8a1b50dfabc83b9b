"""What one node's agent serves to Prometheus, and the list of a run's agents for its file_sd.

Two threads do it: the agent's loop leaves a value behind and goes on, and waits neither for a slow
reader nor for storage that stalls.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_trainer.agent.membership.notices import Member
from elastic_trainer.agent.settings import STATES, NodeStatus
from elastic_trainer.metrics_server import MetricsServer
from elastic_trainer.record.failures import Kind
from elastic_trainer.storage.files import write_atomic
from elastic_trainer.storage.typed import parse_json

if TYPE_CHECKING:
    from prometheus_client.core import Metric

EPOCH: Final = "__meta_holdfast_epoch"
"""Label of the targets that says of which epoch they are; Prometheus drops it."""
_CLOSE_S: Final = 2.0


class NodeMetrics:
    """Serves what the agent last said of its node; a collector of prometheus-client.

    `path` is the list of the run's agents; `port` is the same for every agent of the run.
    """

    def __init__(
        self,
        run: str,
        node: str,
        *,
        path: Path | None,
        port: int,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._run, self._node, self._path, self.port = run, node, path, port
        self._wall = wall
        self._status: NodeStatus | None = None
        self._progress_unix = self._committed_unix = 0.0
        self._server: MetricsServer | None = None
        self._lists: queue.SimpleQueue[tuple[int, Sequence[Member]] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="holdfast-targets", daemon=True)

    # -- for the agent's loop ---------------------------------------------------------------

    def show(self, status: NodeStatus) -> None:
        """Leave behind how the node is. Never waits."""
        now, before = self._wall(), self._status
        if status.idle_s is not None:
            self._progress_unix = now - status.idle_s
        if status.committed and (before is None or status.committed != before.committed):
            self._committed_unix = now
        self._status = status

    def list_agents(self, epoch: int, members: Sequence[Member]) -> None:
        """Have the run's agents listed, as this one coordinates. Never waits."""
        self._lists.put((epoch, members))

    def start(self, address: str) -> None:
        """Serve at `address`, and write lists, until `close`.

        A port that cannot be had costs the metrics of this node, not the job: it is said on stderr.
        """
        self._writer.start()
        try:
            self._server = MetricsServer(address, self.port, self.collect)
        except OSError as error:
            where, why = f"{address}:{self.port}", error.strerror or error
            sys.stderr.write(
                f"holdfast agent: no metrics of this node: cannot listen on {where}: {why}; "
                "see network.metrics_port\n"
            )
            return
        self.port = self._server.port
        self._server.start()

    def close(self) -> None:
        """End both threads; lists that storage does not take are not waited for."""
        if self._server is not None:
            self._server.close()
        self._lists.put(None)
        self._writer.join(_CLOSE_S)

    # -- the two threads --------------------------------------------------------------------

    def _write(self) -> None:
        while (wanted := self._lists.get()) is not None:
            if self._path is not None:
                # Storage is away, or full: the next epoch writes again.
                with contextlib.suppress(OSError):
                    write_targets(self._path, *wanted, port=self.port)

    def collect(self) -> Iterator[Metric]:
        """Yield the node's families; none before the agent has said anything."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self._status
        if status is None:
            return
        names, of = ["run", "node"], [self._run, self._node]
        state = GaugeMetricFamily(
            "holdfast_node_state", "1 for what the node does.", labels=[*names, "state"]
        )
        for each in STATES:
            state.add_metric([*of, each], float(each == status.state))
        yield state
        for name, text, value in (
            ("node_coordinator", "1 for the node that coordinates.", float(status.coordinator)),
            ("node_epoch", "Newest epoch that the node knows.", status.epoch),
            ("node_step", "Newest step that a worker of the node has completed.", status.step),
            ("node_workers", "Workers that run here.", status.workers),
            (
                "worker_progress_timestamp_seconds",
                "When the worker that has been still for longest made progress.",
                self._progress_unix or None,
            ),
            (
                "node_snapshot_timestamp_seconds",
                "When a worker of the node last saw a snapshot committed.",
                self._committed_unix or None,
            ),
        ):
            gauge = GaugeMetricFamily(f"holdfast_{name}", text, labels=names)
            if value is not None:
                gauge.add_metric(of, value)
            yield gauge
        faults = CounterMetricFamily(
            "holdfast_node_faults",
            "Epochs that a failure of a worker of this node ended.",
            labels=[*names, "kind"],
        )
        for kind in Kind:
            faults.add_metric([*of, str(kind)], status.faults.get(str(kind), 0))
        yield faults


def write_targets(path: Path, epoch: int, members: Sequence[Member], *, port: int) -> None:
    """List the agents of `epoch`, unless a later one has been: a cut-off coordinator is late.

    Raises:
        OSError: it cannot be written.
    """
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError, LookupError):
        known = parse_json(path.read_text(encoding="utf-8"))
        if int(known[0]["labels"][EPOCH]) > epoch:
            return
    targets = [
        f"[{each.address}]:{port}" if ":" in each.address else f"{each.address}:{port}"
        for each in members
    ]
    write_atomic(path, json.dumps([{"targets": targets, "labels": {EPOCH: str(epoch)}}]) + "\n")
