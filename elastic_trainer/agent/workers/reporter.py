"""What a node reports of its workers: to membership, to the record, and to people on stderr."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elastic_trainer.agent.hangs.hang import WorkerProgress
from elastic_trainer.agent.hangs.stacks import dump_stacks
from elastic_trainer.agent.membership.notices import (
    EpochAborted,
    EpochFormed,
    JobStopped,
    NodesAwaited,
    WorkersFailed,
    WorkersRunning,
)
from elastic_trainer.agent.membership.tasks import WorkerExited, WorkerStarted
from elastic_trainer.agent.settings import AgentConfig, MembershipHandler
from elastic_trainer.agent.workers.group import group_rank_of
from elastic_trainer.agent.workers.hang_monitor import HangMonitor
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.plan.quantities import counted
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.failures import (
    DETAIL_CHARS,
    EXIT_BUDGET_USED_UP,
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    EXIT_TOO_FEW_NODES,
    Action,
    Failure,
    Kind,
    signal_name,
    without_dumps,
)

STACKS_JOIN_S = 1.0
"""How long the agent's end waits for stacks that storage has yet to take."""
LAST_LINES = 8
"""Lines of a failed worker's stderr that the agent says again."""
MEANINGS = {
    EXIT_SAVED: "stopped, may be continued",
    EXIT_TOO_FEW_NODES: "too few nodes",
    EXIT_DO_NOT_RESTART: "a restart would not help",
    EXIT_BUDGET_USED_UP: "too many failures",
}
"""Exit code -> what it means, for people."""
STDERR = 2
CATCH_UP_S = 0.25
"""A line waits for so long, so that what the workers wrote before it is shown before it."""
VOICE_CLOSE_S = 1.0
"""How long the agent's end waits for a reader of its stderr."""
FIRST_S, LONGEST_S = 5.0, 600.0
"""Until a wait is said, and between two times at most; each pause is twice the last."""


class Voice:
    """Says lines, for any thread, in its own: the agent never waits for who reads its stderr."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def say(self, text: str) -> None:
        """Say `text`, of one or more lines."""
        self._lines.put(f"holdfast agent: {text}\n")
        with self._starting:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="holdfast-voice", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Say what is left, unless nobody reads it."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(VOICE_CLOSE_S)

    def _run(self) -> None:
        lines: list[str | None] = []
        while None not in lines:
            lines = [self._lines.get()]
            if lines[0] is not None:
                time.sleep(CATCH_UP_S)
            with contextlib.suppress(queue.Empty):
                while True:
                    lines.append(self._lines.get_nowait())
            said = "".join(line for line in lines if line is not None)
            # Not by sys.stderr: its lock would be held while a pipe is full.
            with contextlib.suppress(OSError):  # nobody reads it any more
                os.write(STDERR, said.encode(errors="replace"))


class Waiting:
    """Says when to tell of a wait that begins `now`: ever more rarely."""

    def __init__(self, now: float) -> None:
        self._next, self._pause_s = now + FIRST_S, FIRST_S

    def due(self, now: float) -> bool:
        """Return whether it is to be said now; then not again for a while."""
        if now < self._next:
            return False
        self._next, self._pause_s = now + self._pause_s, min(2 * self._pause_s, LONGEST_S)
        return True


@dataclass(slots=True)
class Running:
    """The epoch that runs on this node, as its agent sees it."""

    formed: EpochFormed
    monitor: HangMonitor
    fork_begun: float
    started: list[WorkerStarted] = field(default_factory=list)
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
    """Reports of one node's workers. It decides nothing."""

    def __init__(
        self,
        config: AgentConfig,
        workers: Workers,
        membership: MembershipHandler,
        log: EventLog,
        *,
        clock: Callable[[], float],
        voice: Voice,
    ) -> None:
        self._config, self._workers, self._membership = config, workers, membership
        self._log, self._clock = log, clock
        self._stack_writer: threading.Thread | None = None
        self._voice = voice
        self._waiting: Waiting | None = None
        self._phases: dict[str, float] = {}
        """Seconds of the phases of this recovery that were timed here."""
        self._awaited: tuple[NodesAwaited, float] | None = None
        """As the coordinator said last, and when; None: it is another node's agent."""
        self._told = -1
        """The newest epoch of which a failure was said."""

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
        """Tell the coordinator where the workers are; also put hung ones on record."""
        number, committed = epoch.formed.epoch, self._committed(epoch)
        self._membership.report(epoch.monitor.seen(number, stalled=stalled, committed=committed))
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

    def exited(
        self,
        exited: WorkerExited,
        failure: Failure | None,
        *,
        shown: bool | None = None,
    ) -> None:
        """Say a worker's failure; put it on record, unless it follows from another's.

        Without a `failure` it ended well, or was killed as it did not leave when it was asked to.
        `shown`: its stderr is on the agent's own; None: a failure is not said.
        """
        if failure is not None and shown is not None:
            self._say_failure(exited, failure, shown=shown)
        late = failure is None and exited.signal == signal.SIGKILL
        if late or (failure is not None and failure.kind is not Kind.COLLATERAL):
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
                detail=failure.detail if failure else "it did not leave when it was asked to",
            )

    def killed(self, seconds: float) -> None:
        """Note how long it took to end workers."""
        self._phases["kill_workers"] = max(seconds, self._phases.get("kill_workers", 0.0))

    def started(self, epoch: Running) -> None:
        """Put on record that all workers of this node are started."""
        self._phases["fork"] = self._clock() - epoch.fork_begun
        workers = sorted(epoch.started, key=lambda worker: worker.rank)
        hows = [worker.how for worker in workers]
        why = next((worker.why for worker in workers if worker.why), None)
        self._log.emit_here(
            "workers.started",
            first_rank=workers[0].rank,
            pids=[worker.pid for worker in workers],
            how=hows[0] if len(set(hows)) == 1 else hows,
            why=why,
        )

    def running(self, epoch: Running) -> None:
        """Report that the recovery is over here, and how long its phases took."""
        phases = {phase: round(seconds, 6) for phase, seconds in self._phases.items()}
        number, self._phases = epoch.formed.epoch, {}
        self._membership.report(WorkersRunning(epoch=number, step=epoch.step, phases=phases))

    def dump_stacks(self, epoch: Running) -> None:
        """Put on record what the workers are doing; puts their end off by GATHER_S."""
        self._stack_writer = dump_stacks(
            list(self._workers.processes().values()),
            self._config.stacks_dir,
            epoch.formed.epoch,
            self._log,
        )

    # -- to people ------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Say `text` on the agent's stderr."""
        self._voice.say(text)

    def _say_failure(self, exited: WorkerExited, failure: Failure, *, shown: bool) -> None:
        """Say a failure; of an epoch's first the last lines of stderr too, unless `shown`."""
        ended = signal_name(exited.signal) if exited.signal else f"exit code {exited.code}"
        epoch, detail = self._log.epoch or 0, failure.detail
        if ended not in detail:
            detail = f"{ended}: {detail}"
        text = (
            f"rank {exited.rank} (local rank {exited.local_rank}, process {exited.pid}) on "
            f"{self._config.me.node} failed in epoch {epoch}: {detail}\n  log: {exited.log}"
        )
        if self._told < epoch and not shown and exited.signal != signal.SIGKILL:
            lines = [line for line in without_dumps(exited.log_tail).splitlines() if line.strip()]
            text += "".join(f"\n  | {line[:DETAIL_CHARS]}" for line in lines[-LAST_LINES:])
        self._told = epoch
        self.say(text)

    def formed(self, formed: EpochFormed, *, first: bool) -> None:
        """Say that workers are started again, or that this node is a spare."""
        rank, nodes = group_rank_of(formed, self._config.me), len(formed.members)
        self._awaited = None
        if rank < 0:
            self.say(f"epoch {formed.epoch} runs on {nodes} nodes without this one: it is a spare")
        elif not first:
            on = counted(nodes, "node")
            self.say(f"restart: epoch {formed.epoch} on {on}; {formed.reason}")

    def aborted(self, notice: EpochAborted) -> None:
        """Say why an epoch ends, unless this node has said it of its workers."""
        if self._told < notice.epoch:
            self._told = notice.epoch
            logs = [f"\n  log: {self._config.log_dir.parent / node}" for node in notice.victims]
            where = f" (on {', '.join(notice.victims)})" if notice.victims else ""
            self.say(f"epoch {notice.epoch} ends: {notice.reason}{where}{''.join(logs)}")

    def awaited(self, awaited: NodesAwaited) -> None:
        """Take the coordinator's word of whom it waits for."""
        self._awaited = awaited, self._clock()

    def look(self, *, waits: bool) -> None:
        """Say now and then that this node waits, if it does."""
        now = self._clock()
        self._waiting = (self._waiting or Waiting(now)) if waits else None
        if self._waiting is None or not self._waiting.due(now):
            return
        if self._awaited is None:
            self.say(f"{self._config.me.node} waits for other nodes, or for the coordinator's word")
            return
        awaited, when = self._awaited
        text = f"waiting for nodes: {awaited.have} of {awaited.want} ready"
        if awaited.within_s is not None:
            left_s = max(0.0, awaited.within_s - (now - when))
            text += f"; after {left_s:.0f} s more (join_timeout_s) {awaited.then}"
        self.say(text)

    def stopped(self, stopped: JobStopped) -> None:
        """Say how the job has ended, unless it ended well here."""
        code, reason = stopped.code, stopped.reason
        if code != EXIT_DONE or stopped.over_in is not None:
            meaning = f" ({MEANINGS[code]})" if code in MEANINGS else ""
            what = f"{self._config.me.node} leaves the job" if stopped.serves else "the job ends"
            self.say(f"{what} with {code}{meaning}: {reason}")

    def close(self) -> None:
        """Wait a moment for stacks that storage has yet to take."""
        self._voice.close()
        if self._stack_writer is not None:
            self._stack_writer.join(STACKS_JOIN_S)

    def _committed(self, epoch: Running) -> int | None:
        return epoch.committed if self._config.watch_all else None
