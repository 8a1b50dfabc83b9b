"""Watches a run on the emulated cluster: progress, faults, interruption, the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import TypeVar

from elastic_trainer.record.events import Event
from launcher.local.faults import (
    INSIDE,
    Chaos,
    ChaosSchedule,
    Fault,
    FaultAction,
    FaultPhase,
    phases_begun,
)
from launcher.platforms.local import LocalCluster
from launcher.record.files import LauncherLog, RunRecord, workers_of
from launcher.record.status import TrainingStatus
from launcher.runs.watching.screen import View
from launcher.spec.errors import PermanentError

_TICK_S = 0.02
_What = TypeVar("_What", str, int)
_SILENT_S = 10.0
"""A full disk takes no record: it has space again once nothing was recorded for so long."""
_SAVES = {"checkpoint.started", "checkpoint.committed", "checkpoint.failed"}
_FAST_TICK_S = 0.004
"""While a fault waits for a phase: some last only a few dozen milliseconds."""


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
    progress: TrainingStatus
    view: View
    faults: Sequence[Fault] = ()
    chaos: Chaos | None = None
    interrupts: Interrupts = field(default_factory=Interrupts)
    sleep: Callable[[float], None] = time.sleep
    mono: Callable[[], float] = time.monotonic
    _heard: float = field(default=inf, init=False)
    """When events were last seen."""
    _saving: bool = field(default=False, init=False)
    _struck_step: int = -1
    _struck_epoch: int = -1
    _schedule: ChaosSchedule | None = None

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
            begun = phases_begun(self._look())
            pending = self._strike(pending, begun)
            self._rage()
            if self.interrupts.count > asked:
                asked = self.interrupts.count
                if asked > 1:
                    self.view.note("killing every node")
                    break
                pending, self.chaos = [], None
                self.view.note("stopping: workers save their state (Ctrl-C again kills)")
                self.cluster.stop()
            if not self._awake() and not self._revive(pending):
                break
            self.sleep(_FAST_TICK_S if any(fault.phase for fault in pending) else _TICK_S)
        self.cluster.kill_all()
        self._look()

    def _look(self) -> list[Event]:
        fresh = self.record.poll()
        for event in fresh:
            if event.event != "board.failed":  # the one that a full disk brings, again and again
                self._heard = self.mono()
            if event.event in _SAVES:
                self._saving = event.event == "checkpoint.started"
        self.progress.up = self.cluster.alive()
        self.view.update(self.progress, self.progress.apply(fresh))
        return fresh

    def _awake(self) -> bool:
        """Whether a node runs; once others have ended the job, one that is paused does not count.

        It would sleep for ever, and nothing is left for it to do.
        """
        alive = self.cluster.alive()
        return any(not self.cluster.nodes[name].paused for name in alive) or (
            bool(alive) and not self.cluster.codes()
        )

    def _revive(self, pending: list[Fault]) -> bool:
        """Bring a node back when faults have killed all, if one is to come back anyway."""
        if self.cluster.codes() or self.interrupts.count:
            return False  # agents have ended by themselves: the run is over
        for fault in [fault for fault in pending if fault.brings_back]:
            pending.remove(fault)
            if self._inject(fault):
                return True
        return False

    def _strike(self, pending: list[Fault], begun: frozenset[FaultPhase]) -> list[Fault]:
        """Inject what is due; return what is not.

        A parked job gets its nodes back at once. A silent run may have no room for its record; if
        it is only starting slowly, nothing may be freed that is yet to be filled.
        """
        kept = []
        parked = self.progress.parked is not None
        silent = self.mono() - self._heard > _SILENT_S
        full = not any(fault.action is FaultAction.FILL_DISK for fault in pending)
        for fault in pending:
            due = self.progress.step >= fault.step and fault.phase in (None, *begun)
            if fault.action is FaultAction.FREE_DISK:
                due |= full and (parked or silent)
            else:
                due |= parked and fault.brings_back
            if not due or not self._ready(fault):
                kept.append(fault)
            else:
                self._inject(fault)
        return kept

    def _ready(self, fault: Fault) -> bool:
        """Whether the run is in a state that `fault` makes sense in.

        What brings nodes back always does, and what waits for a phase says so. Other faults wait
        until the run trains again after an earlier one, so that two at neighbouring steps do not
        melt into one; faults at the same step strike together. A save under way would take what
        a full disk leaves for the record.
        """
        if fault.brings_back or fault.phase is not None:
            return True
        if fault.action is FaultAction.FILL_DISK and self._saving:
            return False
        recovered = self.progress.epoch > self._struck_epoch and self.progress.state == "training"
        return recovered or fault.step == self._struck_step

    def _rage(self) -> None:
        """Kill and return nodes at random, from the first completed step until the job ends."""
        if self.chaos is None or self.progress.state == "ending":
            return
        if self._schedule is None:
            if self.progress.state != "training":
                return
            self._schedule = ChaosSchedule(self.chaos, self.mono())
        for action, node in self._schedule.due(self.mono(), self.cluster.alive()):
            index = list(self.cluster.nodes).index(node)
            self._inject(Fault(action, index, self.progress.step))

    def _inject(self, fault: Fault) -> bool:
        """Return whether there was anything to do."""
        if fault.on_job:
            return self._inject_into_job(fault)
        node, pid = self._target(fault)
        problem = self._problem(fault, node, pid)
        if problem or node is None:
            self.view.note(f"fault {fault} left out: {problem}")
            return False
        rank = fault.target if fault.on_worker else None
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

    def _inject_into_job(self, fault: Fault) -> bool:
        action, step = str(fault.action), self.progress.step
        try:
            if fault.action is FaultAction.FILL_DISK:
                self.cluster.check_small_disk()
            if fault.action is FaultAction.FREE_DISK:
                self.cluster.free_disk()  # there is no room to record it in before
            self.log.emit("fault.injected", step=step, action=action, target="the job")
            if fault.action is FaultAction.FILL_DISK:
                self.cluster.fill_disk(left_bytes=1024 * (fault.target or 0))
            if fault.action is FaultAction.PREEMPT:
                self.cluster.stop()
        except PermanentError as error:
            self.view.note(f"fault {fault} left out: {error}")
            return False
        return True

    def _target(self, fault: Fault) -> tuple[str | None, int | None]:
        """Return the node that `fault` strikes, and the process if it strikes only one."""
        if fault.on_worker:
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
            case FaultAction.KILL_AGENT:
                cluster.kill_agent(node)
            case FaultAction.KILL_ZYGOTE:
                self._at_hand(cluster.kill_zygote, node)
            case FaultAction.KILL_WORKER:
                self._at_hand(partial(cluster.signal_worker, signal.SIGKILL), pid)
            case FaultAction.PAUSE_WORKER:
                self._at_hand(partial(cluster.signal_worker, signal.SIGSTOP), pid)
            case (
                FaultAction.SPIN_WORKER
                | FaultAction.WEDGE_WORKER
                | FaultAction.STARVE_WORKER
                | FaultAction.SLOW_WORKER
            ):
                self._at_hand(partial(cluster.ask_worker, INSIDE[action]), pid)
            case FaultAction.RETURN_NODE:
                cluster.start_node(node)
            case FaultAction.PAUSE_NODE:
                cluster.pause_node(node)
            case FaultAction.RESUME_NODE:
                cluster.resume_node(node)

    def _at_hand(self, strike: Callable[[_What], None], what: _What | None) -> None:
        """Strike one process, unless it has ended by itself a moment ago."""
        assert what is not None
        try:
            strike(what)
        except PermanentError as error:
            self.view.note(str(error))

    def _problem(self, fault: Fault, node: str | None, pid: int | None) -> str:
        """Return why `fault` cannot be carried out; empty: it can."""
        if node is None:
            return "no such node or worker now"
        known = self.cluster.nodes.get(node)
        if known is None:
            return f"no {node}"
        if fault.action is FaultAction.RETURN_NODE:
            return f"{node} is up" if known.alive else ""
        if fault.on_worker and pid is None:
            return "no such worker now"
        return "" if known.alive else f"{node} is down already"

    def _worker(self, rank: int | None) -> tuple[str | None, int | None]:
        """Return node and pid of the worker of global rank `rank` in the current epoch."""
        found = workers_of(self.record.run_dir).get(-1 if rank is None else rank)
        if found is None or found.epoch != self.progress.epoch:
            return None, None
        return found.node, found.pid
