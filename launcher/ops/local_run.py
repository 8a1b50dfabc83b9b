"""Watches a run on the emulated cluster: progress, faults, interruption, the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic_trainer.events import Event
from launcher.backends.local import LocalCluster
from launcher.errors import PermanentError
from launcher.ops.faults import Fault, FaultAction
from launcher.ops.progress import Progress, View
from launcher.ops.record import LauncherLog, RunRecord
from launcher.ops.timeline import worker_rank

_TICK_S = 0.02


@dataclass
class Interrupts:
    """How often the user asked for the end; signal handlers only count."""

    count: int = 0

    def __call__(self, *_: object) -> None:
        """Count one; fits `signal.signal`."""
        self.count += 1


@dataclass
class LocalRun:
    """One attempt, from the start of its agents to their end."""

    cluster: LocalCluster
    record: RunRecord
    log: LauncherLog
    progress: Progress
    view: View
    faults: Sequence[Fault] = ()
    interrupts: Interrupts = field(default_factory=Interrupts)
    sleep: Callable[[float], None] = time.sleep
    _struck_step: int = -1
    _struck_epoch: int = -1

    def run(self) -> None:
        """Start every agent and return when none is left, or the user would not wait.

        Raises:
            PermanentError: agents cannot be started.
        """
        pending = list(self.faults)
        asked = 0
        self.record.poll()
        # Old attempts' events are history, not progress; the newest state is.
        self.progress.apply(self.record.events)
        self.progress.recent.clear()
        self.progress.state = "starting"
        self.log.emit("run.started", attempt=self.cluster.attempt, nodes=len(self.cluster.nodes))
        self.cluster.start()
        while True:
            self._look()
            pending = self._strike(pending)
            if self.interrupts.count > asked:
                asked = self.interrupts.count
                if asked > 1:
                    self.view.note("killing every node")
                    break
                pending = []
                self.view.note("stopping: workers save their state (Ctrl-C again kills)")
                self.cluster.stop()
            if not self.cluster.alive() and not self._revive(pending):
                break
            self.sleep(_TICK_S)
        self.cluster.kill_all()
        self._look()

    def _look(self) -> list[Event]:
        fresh = self.record.poll()
        self.progress.up = self.cluster.alive()
        self.view.update(self.progress, self.progress.apply(fresh))
        return fresh

    def _revive(self, pending: list[Fault]) -> bool:
        """Bring a node back when faults have killed all, if one is to come back anyway."""
        if self.cluster.codes() or self.interrupts.count:
            return False  # agents have ended by themselves: the run is over
        for fault in [fault for fault in pending if fault.brings_back]:
            pending.remove(fault)
            if self._inject(fault):
                return True
        return False

    def _strike(self, pending: list[Fault]) -> list[Fault]:
        """Inject what is due; return what is not. A parked job gets its nodes back at once."""
        kept = []
        parked = self.progress.parked is not None
        for fault in pending:
            due = self.progress.step >= fault.step or (parked and fault.brings_back)
            if not due or not self._ready(fault):
                kept.append(fault)
            else:
                self._inject(fault)
        return kept

    def _ready(self, fault: Fault) -> bool:
        """Whether the run is in a state that `fault` makes sense in.

        What brings nodes back always does. What strikes waits until the run
        trains again after an earlier fault, so that two at neighbouring steps do
        not melt into one; those at the same step strike together.
        """
        if fault.brings_back:
            return True
        recovered = self.progress.epoch > self._struck_epoch and self.progress.state == "training"
        return recovered or fault.step == self._struck_step

    def _inject(self, fault: Fault) -> bool:
        """Carry out one fault; return whether there was anything to do."""
        node, pid = self._target(fault)
        problem = self._problem(fault, node, pid)
        if problem or node is None:
            self.view.note(f"fault {fault} left out: {problem}")
            return False
        rank = fault.target if fault.action is FaultAction.KILL_WORKER else None
        # The clock of the failure starts here, so the record comes first.
        self.log.emit(
            "fault.injected",
            node=node,
            rank=rank,
            epoch=self.progress.epoch,
            step=self.progress.step,
            action=str(fault.action),
            target=node if rank is None else f"rank {rank} on {node}",
        )
        self._carry_out(fault.action, node, pid)
        if not fault.brings_back and node in self.progress.members:
            self._struck_step, self._struck_epoch = fault.step, self.progress.epoch
        return True

    def _target(self, fault: Fault) -> tuple[str | None, int | None]:
        """Return the node that `fault` strikes, and the process if it strikes only one."""
        if fault.action is FaultAction.KILL_WORKER:
            return self._worker(fault.target)
        if fault.target is not None:
            return f"node{fault.target}", None
        match fault.action:
            case FaultAction.KILL_COORDINATOR:
                return self.progress.coordinator or None, None
            case FaultAction.RETURN_NODE:
                return self.cluster.longest_dead(), None
            case _:
                paused = (node.name for node in self.cluster.nodes.values() if node.paused)
                return next(paused, None), None

    def _carry_out(self, action: FaultAction, node: str, pid: int | None) -> None:
        cluster = self.cluster
        match action:
            case FaultAction.KILL_NODE | FaultAction.KILL_COORDINATOR:
                cluster.kill_node(node)
            case FaultAction.KILL_WORKER:
                assert pid is not None
                try:
                    cluster.kill_worker(pid)
                except PermanentError as error:  # it ended by itself a moment ago
                    self.view.note(str(error))
            case FaultAction.RETURN_NODE:
                cluster.return_node(node)
            case FaultAction.PAUSE_NODE:
                cluster.pause_node(node)
            case FaultAction.RESUME_NODE:
                cluster.resume_node(node)

    def _problem(self, fault: Fault, node: str | None, pid: int | None) -> str:
        """Return why `fault` cannot be carried out; empty: it can."""
        if node is None:
            return "there is no such node or worker now"
        known = self.cluster.nodes.get(node)
        if known is None:
            return f"there is no {node}"
        if fault.action is FaultAction.RETURN_NODE:
            return f"{node} is up" if known.alive else ""
        if fault.action is FaultAction.KILL_WORKER and pid is None:
            return "there is no such worker now"
        return "" if known.alive else f"{node} is down already"

    def _worker(self, rank: int | None) -> tuple[str | None, int | None]:
        """Return node and pid of the worker of global rank `rank` in the current epoch."""
        for event in reversed(self.record.events):
            if (
                event.event == "worker.started"
                and worker_rank(event) == rank
                and event.epoch == self.progress.epoch
            ):
                pid = event.fields.get("pid")
                return event.node, pid if isinstance(pid, int) else None
        return None, None
