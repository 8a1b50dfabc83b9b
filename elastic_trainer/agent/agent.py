"""HoldfastAgent: one per node; turns membership's notices into running workers.

A torchelastic agent: WorkerSpec, the rendezvous handler in it (the one that torchrun gets by
`--rdzv-backend holdfast`), WorkerGroup, RunResult, error files, events and metrics are
torchelastic's. Its base is ElasticAgent, since almost nothing of SimpleElasticAgent could stay:

- `_rendezvous` blocks the loop on the store of the first node. If a node dies meanwhile, nobody
  hears of the abort until a time-out. Here an epoch is a notice with the ranks in it.
- `_invoke_run` polls, restarts by its own count, and ends in a barrier on a store whose node may be
  dead. Here one select waits for zygote, coordinator and heartbeats, and the coordinator counts.
- `_construct_event` asks the name service for the machine's name at every event: ten seconds each
  where it does not answer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

from torch.distributed.elastic.agent.server.api import (
    ElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elastic_trainer.agent.hangs.stacks import is_stuck
from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.agent.membership.attribution import gather
from elastic_trainer.agent.membership.effects import SERVE_S
from elastic_trainer.agent.membership.lease import is_of
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    DropPrepared,
    EpochAborted,
    EpochFormed,
    JobStopped,
    LeaveAsked,
    NodeLeaving,
    NodesAwaited,
    Notice,
    PrepareEpoch,
    ShowWorkers,
    StopAsked,
    Warned,
    WorkersCommitted,
    WorkersEnded,
    WorkersFailed,
    WorkersPrepared,
    WorkersReady,
    WorkersStepped,
)
from elastic_trainer.agent.membership.tasks import (
    Launch,
    PreparedLost,
    PreparedReady,
    StandbyReady,
    WorkerExited,
    WorkerStarted,
    ZygoteLost,
)
from elastic_trainer.agent.metrics import NodeMetrics
from elastic_trainer.agent.settings import AgentConfig, MembershipHandler, NodeStatus
from elastic_trainer.agent.stop_signals import (
    AGAIN_S,
    LEAVE,
    REPEATABLE,
    SAVE,
    STOP_WORKERS,
    URGENT,
    StopSignals,
    Waker,
)
from elastic_trainer.agent.workers.environment import launches_of, make_again
from elastic_trainer.agent.workers.group import (
    JobResult,
    Telemetry,
    assign_ranks,
    group_rank_of,
    process_failure,
)
from elastic_trainer.agent.workers.hang_monitor import HangMonitor
from elastic_trainer.agent.workers.reporter import Reporter, Running, Voice
from elastic_trainer.agent.workers.scripts import Scripts
from elastic_trainer.agent.workers.workers import Workers, failure_of, has_run
from elastic_trainer.plan.gpus import named
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.failures import (
    EXIT_DO_NOT_RESTART,
    EXIT_DONE,
    EXIT_SAVED,
    Action,
    Failure,
    Kind,
)
from elastic_trainer.worker.heartbeat import Beat, Request

ZYGOTES_LOST = 4
"""So many in a row a node may lose and stay, if workers have run on it; else one."""


class HoldfastAgent(ElasticAgent):
    """Runs this node's workers as membership says, until the job stops.

    One thread, one loop: it waits for notices, for the zygote and for the clock. It owns no
    accelerator and keeps nothing that a worker's death could harm. The rendezvous handler in `spec`
    is a `MembershipHandler` that calls `waker.wake` when it has a notice; `run` closes it, and
    `workers`, at its end.
    """

    def __init__(
        self,
        config: AgentConfig,
        spec: WorkerSpec,
        *,
        workers: Workers,
        waker: Waker,
        log: EventLog,
        scripts: Scripts | None = None,
        keeper: Keeper | None = None,
        metrics: NodeMetrics | None = None,
        voice: Voice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._workers, self._metrics = config, workers, metrics
        self._membership: MembershipHandler = spec.rdzv_handler
        self._waker, self._log, self._clock = waker, log, clock
        self._keeper = keeper
        voice = voice or Voice()
        self._scripts = scripts or Scripts(workers.task, log, say=voice.say)
        self._group = WorkerGroup(spec)
        self._telemetry = Telemetry(self._group, config.me.host, clock)
        self._reporter = Reporter(config, workers, self._membership, log, clock=clock, voice=voice)
        self._epoch: Running | None = None
        self._newest = -1
        self._zygotes_lost = 0
        """Since a worker has run here."""
        self._has_run = False
        self._signals = StopSignals(waker.wake, config.stop_signals)
        self._urgings: Counter[str] = Counter()
        """Signals that asked for a stop, but for REPEATABLE, by name."""
        self._urged_at: float | None = None
        """When the first one came."""
        self._asked: set[type] = set()
        """Of StopAsked and LeaveAsked, what was reported."""
        self._reported_ready = self._left = False
        self._stopped: JobStopped | None = None
        self._failures: dict[int, ProcessFailure] = {}
        self._succeeded: list[int] = []
        """Ranks of this node that failed and that ended well in the newest epoch."""
        self._formed: EpochFormed | None = None
        """The newest epoch, with this node in it or not."""
        self._planned: EpochFormed | None = None
        """An epoch that may come, or that comes, whose workers are prepared here."""
        self._waiting: set[int] = set()
        """Local ranks of those that wait for it."""
        self._read_ahead: deque[Notice] = deque()
        """Notices that came while workers were killed."""
        self._faults: Counter[str] = Counter()

    def get_worker_group(self, role: str = "default") -> WorkerGroup:
        """Return torchelastic's view of this node's workers."""
        assert role == self._group.spec.role, f"one role only: {self._group.spec.role}"
        return self._group

    def run(self, role: str = "default") -> JobResult:
        """Serve until the job stops; then return what became of this node's workers."""
        assert role == self._group.spec.role, f"one role only: {self._group.spec.role}"
        me = self._config.me
        self._log.emit_here(
            "agent.started",
            pid=os.getpid(),
            host=me.host,
            address=me.address,
            port=me.port,
            gpus=[gpu.uuid for gpu in self._config.gpus if gpu is not None],
        )
        code, reason = 1, ""
        with self._signals:
            try:
                while self._stopped is None:
                    self._turn()
                code, reason = self._stopped.code, self._stopped.reason
            except BaseException as error:
                reason = f"error: {type(error).__name__}: {error}"
                self._telemetry.crashed(traceback.format_exc())
                raise
            finally:
                # Also after an error of ours: a node must not continue without its agent.
                self._kill_workers()
                self._workers.close()
                self._scripts.close()
                self._reporter.close()
                self._membership.close()
                if self._stopped is not None and self._stopped.serves:
                    self._serve_snapshots()
                known = self._stopped is not None and self._stopped.on_record
                emit = self._log.emit_here if known else self._log.emit
                emit("agent.exit", code=code, reason=reason)
                result = self._result(code)
                if self._stopped is not None:
                    self._telemetry.ended(result)
                self._telemetry.close()
        return result

    def _result(self, code: int) -> JobResult:
        failed = code not in {EXIT_DONE, EXIT_SAVED}
        self._group.state = WorkerState.FAILED if failed else WorkerState.SUCCEEDED
        return JobResult(
            state=self._group.state,
            return_values=dict.fromkeys(self._succeeded),
            failures=self._failures if failed else {},
            code=code,
        )

    # -- the loop -------------------------------------------------------------------------

    def _turn(self) -> None:
        """Wait for something to happen, at most one tick, and serve it."""
        if not self._reported_ready and self._workers.ready:  # until then no epoch waits for it
            self._reported_ready = True
            self._membership.report(WorkersReady())
        epoch = self._epoch
        timeout_s = 1.0 if epoch is None else self._config.tick_s
        if epoch is not None and epoch.held is not None:
            timeout_s = min(timeout_s, epoch.held_until - self._clock())
        watched = [self._waker.fileno(), *([] if self._left else [self._workers.fileno()])]
        select.select(watched, [], [], max(0.0, timeout_s))
        self._waker.drain()
        self._serve_signals()
        while self._stopped is None and (notice := self._next_notice()) is not None:
            self._serve_notice(notice)
        if self._stopped is None and not self._left:
            self._serve_workers()
            self._look_at_heartbeats()
        status = self._status()
        self._reporter.look(waits=status.state == "waiting")
        if self._metrics is not None:
            self._metrics.show(status)

    def _status(self) -> NodeStatus:
        formed, epoch, me = self._formed, self._epoch, self._config.me
        state = "waiting"
        if self._left:
            state = "left"
        elif epoch is not None:
            state = "in"
        elif formed is not None and me.agent_id in {each.agent_id for each in formed.spares}:
            state = "spare"
        return NodeStatus(
            state=state,
            epoch=0 if formed is None else formed.epoch,
            step=0 if epoch is None else epoch.step,
            committed=0 if epoch is None else epoch.committed,
            workers=self._workers.alive,
            idle_s=None if epoch is None else epoch.monitor.longest_idle_s(),
            coordinator=formed is not None and formed.coordinator == me.node,
            faults=dict(self._faults),
        )

    def _list_agents(self, formed: EpochFormed) -> None:
        """Have the run's agents listed, if this one coordinates: it alone knows them all."""
        if self._metrics is not None and formed.coordinator == self._config.me.node:
            everyone = (*formed.members, *formed.spares, *formed.left)
            self._metrics.list_agents(formed.epoch, everyone)

    def _next_notice(self) -> Notice | None:
        return self._read_ahead.popleft() if self._read_ahead else self._membership.notice(0.0)

    def _serve_notice(self, notice: Notice) -> None:
        epoch = self._epoch
        match notice:
            case EpochFormed():
                self._form(notice)
            case PrepareEpoch() | DropPrepared():
                self._plan(notice)
            case EpochAborted(epoch=number) if epoch is not None and number >= epoch.formed.epoch:
                self._reporter.aborted(notice)
                if notice.stacks:
                    self._reporter.dump_stacks(epoch)
                self._kill_workers()
            case ShowWorkers(epoch=number) if epoch is not None and number == epoch.formed.epoch:
                self._reporter.show(epoch, stalled=False)
            case AskWorkers(epoch=number) if epoch is not None and number == epoch.formed.epoch:
                self._workers.ask(notice.request)
                self._scripts.ask(notice.request, self._clock(), notice.signal)
                self._forgive(epoch)
            case JobStopped():
                self._stop(notice)
            case Warned(text=text):
                self._reporter.say(text)
            case NodesAwaited():
                self._reporter.awaited(notice)

    def _stop(self, notice: JobStopped) -> None:
        if notice.over_in is not None:
            notice = self._over_before(notice, notice.over_in)
        self._stopped = notice
        self._reporter.stopped(notice)
        if self._formed is not None and not notice.serves:  # else the others go on
            self._list_agents(replace(self._formed, members=(), spares=(), left=()))

    def _over_before(self, notice: JobStopped, over_in: str) -> JobStopped:
        """Return how an agent ends that finds the job over: nothing is run."""
        config = self._config
        again = "to run it again, name another --rdzv-id"
        if notice.code != EXIT_DONE:
            again = f"to continue it, name another --job than {over_in}; {again}"
            return replace(notice, reason=f"it ended before: {notice.reason}; {again}")
        late = config.named_job is not None and is_of(config.named_job, over_in)
        if config.if_done == "ok" or (config.if_done is None and late):
            return replace(notice, reason=f"nothing is run: {notice.reason}")
        said = f"HF522 nothing is run: {notice.reason}; {again}; --if-done ok ends with 0"
        return replace(notice, code=EXIT_DO_NOT_RESTART, reason=said)

    def _form(self, formed: EpochFormed) -> None:
        if formed.epoch <= self._newest:
            return  # an older one, late: the epoch fences everything
        begin = self._clock()
        self._kill_workers(formed)
        first, self._newest, self._formed = self._formed is None, formed.epoch, formed
        prepared = self._takes_prepared(formed)
        self._list_agents(formed)
        self._reporter.formed(formed, first=first)
        config, me = self._config, self._config.me
        if self._left or group_rank_of(formed, me) < 0:
            return  # a spare, or not fit for any more
        self._log.epoch = formed.epoch
        assign_ranks(self._group, formed, me)
        self._failures, self._succeeded = {}, []
        self._telemetry.formed(formed.epoch)
        launches = self._scripts.begin(formed, self._launches(self._group, formed))
        monitor = HangMonitor(config, self._workers, self._clock)
        self._epoch = Running(formed, monitor, begin)
        if formed.prepared and not prepared:  # the others' workers have met that which is gone
            detail = f"the worker that was prepared on {me.node} has ended"
            failure = Failure(kind=Kind.COLLATERAL, action=Action.RESTART, detail=detail)
            self._fail(self._epoch, self._reporter.failed(self._epoch, 0, 0, failure))
            return
        self._workers.launch(formed.epoch, launches, prepared=prepared)

    # -- an epoch that may come -------------------------------------------------------------

    def _plan(self, notice: PrepareEpoch | DropPrepared) -> None:
        """Have the workers of an epoch made ready beside those that run, or end them."""
        known, me = self._planned, self._config.me
        if isinstance(notice, DropPrepared):
            if known is not None and known.prepared == notice.number:
                self._drop_prepared()
            return
        formed = notice.formed
        if self._left or formed.epoch <= self._newest or group_rank_of(formed, me) < 0:
            return
        if known is not None and known.prepared == formed.prepared:
            return  # told again over a new connection
        self._planned, self._waiting = formed, set()
        self._workers.prepare(formed.epoch, self._launches_ahead(formed))

    def _begin_ahead(self, formed: EpochFormed) -> None:
        """Have standbys begin an epoch that is formed; they read its state once it is launched."""
        if formed.epoch <= self._newest or formed.prepared:
            return
        if not self._left and group_rank_of(formed, self._config.me) >= 0:
            self._planned, self._waiting = formed, set()
            self._workers.prepare(formed.epoch, self._launches_ahead(formed), urgent=True)

    def _launches_ahead(self, formed: EpochFormed) -> list[Launch]:
        group = WorkerGroup(self._group.spec)
        assign_ranks(group, formed, self._config.me)
        return self._launches(group, formed)

    def _launches(self, group: WorkerGroup, formed: EpochFormed) -> list[Launch]:
        scratch = self._config.scratch
        if make_again(scratch):
            self._reporter.say(
                f"{scratch} was removed, as logind (RemoveIPC) or a cleaner does; it is "
                "made again, and what this node kept in memory comes from another node or storage"
            )
        return launches_of(group, formed, self._config)

    def _drop_prepared(self) -> None:
        self._planned, self._waiting = None, set()
        self._workers.drop_prepared()

    def _takes_prepared(self, formed: EpochFormed) -> bool:
        """Whether an epoch has the workers that wait here; those of another one are ended."""
        planned, self._planned = self._planned, None
        numbers = formed.epoch, formed.prepared
        if planned is not None and (planned.epoch, planned.prepared) == numbers:
            return True
        self._workers.drop_prepared()
        return False

    def _on_prepared(self, happening: PreparedReady | PreparedLost) -> None:
        planned = self._planned
        if planned is None:
            return
        if isinstance(happening, PreparedLost):
            self._drop_prepared()
            failed = f"rank {happening.local_rank} of the node: {happening.detail}"
            self._membership.report(WorkersPrepared(number=planned.prepared, failed=failed))
            return
        self._waiting.add(happening.local_rank)
        if len(self._waiting) == self._config.workers:
            self._membership.report(WorkersPrepared(number=planned.prepared))

    # -- workers --------------------------------------------------------------------------

    def _serve_workers(self) -> None:
        for happening in self._workers.poll():
            match happening:
                case WorkerStarted():
                    self._on_started(happening)
                case StandbyReady():
                    self._log.emit_here("standby.ready", **asdict(happening))
                case PreparedReady() | PreparedLost():
                    self._on_prepared(happening)
                case WorkerExited():
                    self._on_exit(happening)
                case ZygoteLost():
                    self._on_zygote_lost(happening)
        self._scripts.turn(self._clock(), self._workers)
        epoch = self._epoch
        if epoch is not None and epoch.held is not None and self._clock() >= epoch.held_until:
            self._fail(epoch, epoch.held)

    def _on_started(self, started: WorkerStarted) -> None:
        epoch = self._epoch
        if epoch is None:
            return
        worker = self._group.workers[started.local_rank]
        worker.id = started.pid
        self._telemetry.started(worker)
        epoch.started.append(started)
        if len(epoch.started) == self._config.workers:
            self._reporter.started(epoch)
            if not self._config.watch_all:
                self._now_running(epoch)  # a script tells nothing better

    def _on_exit(self, exited: WorkerExited) -> None:
        exited = replace(exited, beat=self._scripts.since_the_beginning(exited.beat))
        epoch, failure = self._epoch, failure_of(exited, beats=self._config.watch_all)
        failure = self._scripts.classify(exited, failure)
        again = self._scripts.look_back({exited.local_rank: exited.beat}, ending=failure is None)
        failure = again or failure
        if failure is not None:
            failure = named(failure, exited.local_rank, self._config.gpus)
        # Once the epoch has failed, others end for that.
        shown = None if epoch is None else self._scripts.on_console(exited.local_rank)
        self._reporter.exited(exited, failure, shown=shown)
        if epoch is None:
            return  # its epoch has failed already
        epoch.step = max(epoch.step, exited.beat.step)
        self._note_step(epoch, exited.beat)
        if failure is None:
            self._succeeded.append(exited.rank)
            self._on_good_end(epoch, exited)
            return
        self._failures[exited.rank] = process_failure(exited)
        epoch.committed = max(epoch.committed, exited.beat.committed_step)
        report = self._reporter.failed(epoch, exited.local_rank, exited.beat.step, failure)
        epoch.held, waits = gather(epoch.held, report)
        if not waits or self._all_seen:
            self._fail(epoch, epoch.held)
            return
        # The cause, or the same error, may come a moment later from another worker here.
        shared = epoch.held.failure.kind is not Kind.COLLATERAL
        wait_s = self._config.shared_settle_s if shared else self._config.settle_s
        epoch.held_until = max(epoch.held_until, self._clock() + wait_s)

    @property
    def _all_seen(self) -> bool:
        """Whether the end of every worker was looked at: several may be read at once."""
        return len(self._succeeded) + len(self._failures) == self._config.workers

    def _on_good_end(self, epoch: Running, exited: WorkerExited) -> None:
        epoch.finished = epoch.finished and self._scripts.finished(exited)
        if not self._all_seen or epoch.failed:
            return
        if epoch.held is not None:
            self._fail(epoch, epoch.held)
        else:
            self._ended(epoch)

    def _ended(self, epoch: Running) -> None:
        self._now_running(epoch)
        self._show_progress(epoch, last=True)
        self._scripts.ended(finished=epoch.finished)
        number, saved = epoch.formed.epoch, self._scripts.saved
        self._membership.report(
            WorkersEnded(epoch=number, finished=epoch.finished, step=epoch.step, saved=saved)
        )
        self._group.state = WorkerState.SUCCEEDED
        self._epoch = None

    def _forgive(self, epoch: Running) -> None:
        """Take back a failure that was not reported yet: peers that were asked first caused it."""
        if epoch.held is None or epoch.failed or not self._scripts.asked:
            return
        if self._scripts.take_requests(self._workers):
            return  # the workers that are left would wait for the one that failed
        epoch.held, epoch.finished, self._scripts.saved = None, False, False
        if not self._workers.alive:
            self._ended(epoch)

    def _fail(self, epoch: Running, report: WorkersFailed) -> None:
        """Report the first failure of an epoch and end what is left of it here."""
        if epoch.failed:
            return
        epoch.failed = True
        self._faults[str(report.failure.kind)] += 1
        self._group.state = WorkerState.UNHEALTHY
        # First: the other nodes wait for it.
        self._membership.report(replace(report, stepped=epoch.stepped))
        if report.failure.kind is Kind.HANG:
            self._reporter.dump_stacks(epoch)
        self._kill_workers()

    def _on_zygote_lost(self, lost: ZygoteLost) -> None:
        epoch = self._epoch
        if epoch is not None:
            # A consequence: whoever ended it, as memory that ran out, says nothing of this machine.
            kind = Kind.OUT_OF_MEMORY if lost.of_memory else Kind.COLLATERAL
            detail = f"the zygote died ({lost.detail}) and its workers with it"
            failure = Failure(kind=kind, action=Action.RESTART, detail=detail)
            self._reporter.say(f"{self._config.me.node}: {detail}")
            self._fail(epoch, self._reporter.failed(epoch, 0, epoch.step, failure))
        self._leave_if_unreapable(lost.unreapable)
        self._zygotes_lost += 1
        if self._zygotes_lost > (ZYGOTES_LOST if self._has_run else 1):
            self._leave(f"the zygote died {self._zygotes_lost} times: {lost.detail}")

    def _kill_workers(self, following: EpochFormed | None = None) -> None:
        """End the epoch here: afterwards no process of it runs, or the node has said it leaves.

        Standbys begin the epoch that follows meanwhile, as soon as it is known.
        """
        if self._epoch is None and not self._workers.alive and self._workers.cleared:
            return
        begin, had = self._clock(), self._workers.alive
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            self._telemetry.down()
        exits, unreapable = self._workers.kill_all(
            self._config.device.kill_deadline_s, partial(self._look_ahead, following)
        )
        for item in exits:
            exited = replace(item, beat=self._scripts.since_the_beginning(item.beat))
            self._scripts.look_back({exited.local_rank: exited.beat}, ending=True)
            if epoch is not None:
                epoch.step = max(epoch.step, exited.beat.step)
            if exited.signal != signal.SIGKILL:  # else it was killed here
                failure = failure_of(exited, beats=self._config.watch_all)
                shown = self._scripts.on_console(exited.local_rank)
                self._reporter.exited(exited, failure, shown=shown)
        if epoch is not None:
            self._show_progress(epoch, last=True)
        if had:
            self._reporter.killed(self._clock() - begin)
        self._leave_if_unreapable(tuple(unreapable))

    def _look_ahead(self, following: EpochFormed | None) -> bool:
        """Begin the epoch that follows, if it is known; return whether to look no more."""
        if self._stopped is not None or self._workers.standing < self._config.workers:
            return True  # without a standby for each worker nobody could begin
        while following is None and (notice := self._membership.notice(0.0)) is not None:
            self._read_ahead.append(notice)
            following = notice if isinstance(notice, EpochFormed) else None
        if following is not None:
            self._begin_ahead(following)
        return following is not None

    def _leave_if_unreapable(self, pids: tuple[int, ...]) -> None:
        """Leave where a killed process is stuck in the kernel, which no signal ends.

        Others are on their way out, and are waited for by nobody.
        """
        stuck = [pid for pid in pids if is_stuck(pid)]
        for pid in pids:
            self._log.emit("worker.unreapable", pid=pid, stuck=pid in stuck)
        if stuck:
            listed = ", ".join(map(str, stuck))
            self._leave(f"cannot end worker processes {listed} with SIGKILL: they are in state D")

    def _leave(self, reason: str) -> None:
        """Run no more workers here. The agent stays while it is needed to coordinate."""
        if not self._left:
            self._left = True
            self._membership.report(NodeLeaving(reason=reason))
            self._workers.close()

    # -- progress -------------------------------------------------------------------------

    def _look_at_heartbeats(self) -> None:
        epoch = self._epoch
        if epoch is None or not self._workers.alive:
            return
        beats = self._scripts.beats(epoch.formed.epoch, self._workers.beats())
        epoch.step = max([epoch.step, *(beat.step for beat in beats.values())])
        committed = (beat.committed_step for beat in beats.values())
        epoch.committed = max([epoch.committed, *committed])
        self._note_step(epoch, *beats.values())
        again = self._scripts.look_back(beats)
        self._show_progress(epoch)
        if again is not None:
            self._fail(epoch, self._reporter.failed(epoch, 0, epoch.step, again))
            return
        if not epoch.freed and any(beat.committed_step for beat in beats.values()):
            self._free_older_snapshots(epoch)
        # A worker can have completed a step before the zygote's word of its start is read.
        all_started = len(epoch.started) == len(beats) == self._config.workers
        if all_started and all(map(has_run, beats.values())):
            self._now_running(epoch)
        epoch.monitor.look()
        if (paced := epoch.monitor.paced(epoch.formed.epoch)) is not None:
            self._membership.report(paced)
        if epoch.monitor.stalled():
            self._reporter.show(epoch, stalled=True)
        if (worst := epoch.monitor.overdue()) is not None:  # no coordinator acts
            self._fail(epoch, self._reporter.overdue(epoch, worst))

    def _note_step(self, epoch: Running, *beats: Beat) -> None:
        """Report the first step of an epoch, as one node for all."""
        if not epoch.stepped and any(map(has_run, beats)):
            epoch.stepped = True
            if group_rank_of(epoch.formed, self._config.me) == 0:
                self._membership.report(WorkersStepped(epoch=epoch.formed.epoch))

    def _free_older_snapshots(self, epoch: Running) -> None:
        epoch.freed = True
        if self._keeper is not None:
            self._keeper.free(epoch.formed.epoch)
        if group_rank_of(epoch.formed, self._config.me) == 0:
            self._membership.report(WorkersCommitted(epoch=epoch.formed.epoch))

    def _serve_snapshots(self) -> None:
        """Stay until the others have committed a snapshot without this node, and freed its own.

        What it holds may be the only one: the copy of a node that has left with it. Whoever gives
        no more time says so by another signal.
        """
        keeper, begun = self._keeper, self._clock()
        if keeper is None or not keeper.holds_any():
            return
        urged, until = 2 if self._config.leaves_alone else 1, begun + SERVE_S
        while (
            (holds := keeper.holds_any()) and self._clock() < until and len(self._urgings) < urged
        ):
            select.select([self._waker.fileno()], [], [], self._config.tick_s)
            self._waker.drain()
            if any(self._urge(name) for name in self._signals.taken()):
                break
        self._log.emit("snapshot.served", seconds=round(self._clock() - begun, 3), freed=not holds)

    def _show_progress(self, epoch: Running, *, last: bool = False) -> None:
        """One node speaks for a script; the trainer speaks for itself."""
        if not self._config.watch_all and group_rank_of(epoch.formed, self._config.me) == 0:
            self._scripts.show_progress(epoch.step, self._clock(), last=last)

    def _now_running(self, epoch: Running) -> None:
        if epoch.running:
            return
        epoch.running = self._has_run = True
        self._zygotes_lost = 0
        self._telemetry.running()
        self._reporter.running(epoch)
        if (ladder := self._config.standbys_for) is not None:  # not before: it would slow the start
            left = len(epoch.formed.members) + len(epoch.formed.spares) - 1  # should one be lost
            rung = ladder.rung_for(left) or epoch.formed.rung
            self._workers.stand_by({"HOLDFAST_RUNG": json.dumps(rung.to_dict())})

    def _serve_signals(self) -> None:
        for name in self._signals.taken():
            if name == SAVE and name not in self._config.stop_signals:
                self._ask_for_save()
                continue
            again = self._urge(name)
            alone = name == LEAVE or (self._config.leaves_alone and name != REPEATABLE)
            passed_on = name if name in self._config.stop_signals else STOP_WORKERS
            wish: LeaveAsked | StopAsked = StopAsked(reason=name, signal=passed_on)
            if alone:
                wish = LeaveAsked(reason="drained" if name == LEAVE else name)
            if type(wish) not in self._asked:
                self._asked.add(type(wish))
                self._scripts.signalled = True
                self._membership.report(wish)
                self._reporter.say(self._scripts.announce(name, alone=alone))
            elif again:
                self._stopped = JobStopped(code=1, reason=f"{name}, again: left without saving")

    def _urge(self, name: str) -> bool:
        """Note a signal; return whether it says, as the second one, that there is no more time."""
        if name in (REPEATABLE, LEAVE, SAVE):
            return False
        self._urgings[name] += 1
        if self._urged_at is None:
            self._urged_at = self._clock()
        return name == URGENT and self._clock() - self._urged_at >= AGAIN_S

    def _ask_for_save(self) -> None:
        """Have the group save and continue: one worker that asks is enough, wherever it runs."""
        beats = {} if self._epoch is None else self._workers.beats()
        listens = [b for b in beats.values() if b.listens or self._config.watch_all]
        if listens:
            self._workers.ask(Request.SAVE)
        self._log.emit("save.asked", step=max((beat.step for beat in listens), default=None))
