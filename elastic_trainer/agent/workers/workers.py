"""The workers of one node: starts them through the zygote, watches, kills, counts the dead."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_trainer.agent.hangs.stacks import StackTarget, size_of
from elastic_trainer.agent.membership.tasks import (
    Happening,
    Launch,
    PreparedLost,
    PreparedReady,
    StandbyReady,
    Task,
    WorkerExited,
    WorkerStarted,
    ZygoteLost,
)
from elastic_trainer.agent.workers.zygote_client import ZygoteClient, ZygoteDiedError
from elastic_trainer.record.failures import EXIT_DONE, EXIT_SAVED, Failure, classify
from elastic_trainer.storage.files import read_json
from elastic_trainer.worker.heartbeat import Beat, Heartbeat, Pace, Request, Section
from elastic_trainer.worker.worker_answers import forget_answers

LOOK_S = 0.002
"""How often `kill_all` calls `meanwhile`."""
LOG_TAIL_BYTES = 65536
"""More than the stacks of all threads at an end by a signal, which come after the reason."""
ORPHANS_S = 2.0
"""How long workers and what they started may take to die after their zygote."""


OOM_KILLED = "the kernel has killed processes of this machine for memory (oom_kill in /proc/vmstat)"
"""Replaces the log of a worker that died of SIGKILL meanwhile."""


def oom_kills() -> int:
    """Count the processes of this machine, in a container too, that the kernel killed for memory.

    Since it booted; 0 where the kernel does not tell.
    """
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass(slots=True)
class _Local:
    launch: Launch
    heartbeat: Heartbeat
    log_offset: int
    pid: int = 0
    """0 until the zygote reports it."""
    pidfd: int = -1


@dataclass(slots=True)
class _Started:
    number: int = -1
    oom_kills: int = 0
    """When it was launched."""
    workers: dict[int, _Local] = field(default_factory=dict)
    """local rank -> those not known to have ended."""


class Workers:
    """The workers of the current epoch, and the zygote behind them.

    Every call returns at once but for `kill_all`, which has a deadline. Without a `zygote` for this
    task one starts in its own interpreter.
    """

    def __init__(
        self,
        task: Task,
        *,
        env: Mapping[str, str],
        zygote: ZygoteClient | None = None,
        clock: Callable[[], float] = time.monotonic,
        oom_kills: Callable[[], int] = oom_kills,
    ) -> None:
        self.task, self._env, self._clock = task, dict(env), clock
        self._oom_kills = oom_kills
        self._zygote = zygote or self._start_zygote()
        self.ready = False
        """The zygote has imported what it could, so that a launch begins at once."""
        self.cleared = True
        """Nothing that a worker of an ended epoch has started is left."""
        self._epoch = _Started()
        self._prepared = _Started()
        """Workers of an epoch that may come."""
        self._standing: set[int] = set()
        """Local ranks that have a standby which is ready."""
        self._unsent: list[dict[str, Any]] = []
        self._found: list[Happening] = []

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when `poll` has news; it may change."""
        return self._zygote.fileno()

    @property
    def alive(self) -> int:
        """How many workers were launched and are not known to have ended."""
        return len(self._epoch.workers)

    def launch(self, epoch: int, launches: list[Launch], *, prepared: bool = False) -> None:
        """Start the workers of `epoch`; `poll` reports each. Nothing else may run.

        `prepared`: they are those that `prepare` made; one that has ended meanwhile has failed.
        """
        assert not self._epoch.workers, f"epoch {self._epoch.number} still has workers"
        if prepared:
            assert self._prepared.number == epoch, f"epoch {epoch} was not prepared"
            self._epoch, self._prepared = self._prepared, _Started()
        else:
            self.drop_prepared()
            self._epoch = self._started_of(epoch, launches)
        self._standing.clear()
        for launch in launches:
            self._ask_for("start", epoch, launch, prepared=prepared)
        self._flush()

    def prepare(self, epoch: int, launches: list[Launch], *, urgent: bool = False) -> None:
        """Have the workers of an epoch that may come made ready; `poll` says which wait for it.

        `urgent`: it is formed, and may be launched before they wait.
        """
        if urgent:
            launches = [
                replace(each, env={**each.env, "HOLDFAST_URGENT": "1"}) for each in launches
            ]
        self.drop_prepared()
        self._prepared = self._started_of(epoch, launches)
        self._standing.clear()
        for launch in launches:
            self._ask_for("prepare", epoch, launch)
        self._flush()

    @property
    def standing(self) -> int:
        """How many standbys can begin an epoch's work before it is launched."""
        return len(self._standing) if self.task.kind == "main" else 0

    def drop_prepared(self) -> None:
        """End what is prepared, if anything is."""
        if not self._prepared.workers:
            return
        for local_rank in list(self._prepared.workers):
            self._forget(self._prepared, local_rank)
        self._prepared = _Started()
        self._unsent = [request for request in self._unsent if request["op"] != "prepare"]
        self._unsent.append({"op": "drop"})
        self._flush()

    def _started_of(self, epoch: int, launches: list[Launch]) -> _Started:
        started = _Started(epoch, self._oom_kills())
        for launch in launches:
            launch.log.parent.mkdir(parents=True, exist_ok=True)
            launch.error_file.unlink(missing_ok=True)
            started.workers[launch.local_rank] = _Local(
                launch,
                Heartbeat(launch.heartbeat, create=True),
                size_of(launch.error_log or launch.log),
            )
        return started

    def _ask_for(self, op: str, epoch: int, launch: Launch, **more: Any) -> None:
        self._ask(
            op,
            launch,
            launch.env,
            epoch=epoch,
            args=list(self.task.args if launch.args is None else launch.args),
            fresh=self.task.fresh,
            log=str(launch.log),
            error_log=str(launch.error_log) if launch.error_log else None,
            count_steps=self.task.count_steps,
            **more,
        )

    def stand_by(self, env: Mapping[str, str]) -> None:
        """Prepare a process for each worker's place in the next epoch; `poll` says which is ready.

        `env` is what the next launch's may have that differs from this epoch's.
        """
        if self.task.fresh or self.task.kind == "command":
            return  # these start by exec
        for worker in self._epoch.workers.values():
            self._ask("standby", worker.launch, {**worker.launch.env, **env})
        self._flush()

    def _ask(self, op: str, launch: Launch, env: Mapping[str, str], **more: Any) -> None:
        request = {
            "op": op,
            "local_rank": launch.local_rank,
            "kind": self.task.kind,
            "target": self.task.target,
            "env": dict(env),
            "cwd": self.task.cwd,
            "cpus": launch.cpus,
        }
        self._unsent.append(request | more)

    def poll(self, timeout_s: float = 0.0) -> list[Happening]:
        """Return what has happened, maybe nothing; wait up to `timeout_s` for the zygote's word."""
        self._read(0.0 if self._found else timeout_s)
        found, self._found = self._found, []
        return found

    def beats(self) -> dict[int, Beat]:
        """Return local rank -> newest reading, of the workers that run."""
        return {rank: worker.heartbeat.read() for rank, worker in self._epoch.workers.items()}

    def send(self, local_rank: int, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to one worker, or to all that it started; nothing when it has ended."""
        worker = self._epoch.workers.get(local_rank)
        if worker is None or worker.pidfd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker.pidfd, 0)  # its id is still its own
            if group:
                os.killpg(worker.pid, number)
            else:
                signal.pidfd_send_signal(worker.pidfd, number)

    def paces(self) -> dict[int, Pace]:
        """Return local rank -> where the time went, of the workers that run."""
        return {rank: worker.heartbeat.pace() for rank, worker in self._epoch.workers.items()}

    def processes(self) -> dict[int, StackTarget]:
        """Return local rank -> process, of the workers that have started."""
        return {
            local: StackTarget(rank=w.launch.rank, pid=w.pid, heartbeat=w.launch.heartbeat)
            for local, w in self._epoch.workers.items()
            if w.pid
        }

    def ask(self, request: Request) -> None:
        """Put `request` before every worker."""
        for worker in self._epoch.workers.values():
            worker.heartbeat.ask(request)

    def kill_all(
        self, deadline_s: float, meanwhile: Callable[[], bool] = lambda: True
    ) -> tuple[list[WorkerExited], list[int]]:
        """SIGKILL every worker and all they started; wait until all are gone, at most `deadline_s`.

        `meanwhile` is called until it returns True.

        Returns:
            The workers that ended, and the ids of processes that could not be made to.
        """
        deadline = self._clock() + deadline_s
        if not self.ready:  # nothing was sent yet, so nobody is there to be killed
            self._unsent.clear()
            for local_rank in list(self._epoch.workers):
                self._forget(self._epoch, local_rank)
        if self._epoch.workers:
            self._signal_all()
        done = False
        while not self._gone and (left := deadline - self._clock()) > 0:
            done = done or meanwhile()
            self._read(left if done else LOOK_S)
        if not self._gone:
            self._replace_zygote("did not reap its workers")
        exits = [item for item in self._found if isinstance(item, WorkerExited)]
        lost = [item for item in self._found if isinstance(item, ZygoteLost)]
        self._found = [*lost]
        return exits, [pid for item in lost for pid in item.unreapable]

    @property
    def _gone(self) -> bool:
        return not self._epoch.workers and self.cleared

    def close(self) -> None:
        """Kill the zygote and whatever runs, and unmap the heartbeats."""
        self._signal_all()
        self._zygote.close(ORPHANS_S)
        for started in (self._epoch, self._prepared):
            for local_rank in list(started.workers):
                self._forget(started, local_rank)

    # -- zygote ---------------------------------------------------------------------------

    def _start_zygote(self) -> ZygoteClient:
        return ZygoteClient.spawned(preload=self.task.preload, env=self._env, cwd=self.task.cwd)

    def _replace_zygote(self, why: str) -> None:
        self._unsent.clear()
        lost = list(self._epoch.workers.items())
        unreapable = self._zygote.close(ORPHANS_S)
        # Before the exits, of which it is the cause.
        of_memory = self._oom_kills() > self._epoch.oom_kills
        self._found.append(
            ZygoteLost(
                detail=f"{why}; {OOM_KILLED}" if of_memory else why,
                workers=len(lost),
                unreapable=tuple(unreapable),
                of_memory=of_memory,
            )
        )
        for local_rank, worker in lost:
            self._exited(local_rank, worker, -int(signal.SIGKILL))
        for local_rank in list(self._prepared.workers):
            self._prepared_lost(local_rank, -int(signal.SIGKILL))
        self._standing.clear()
        self._zygote, self.ready, self.cleared = self._start_zygote(), False, True

    def _flush(self) -> None:
        """Send what waits, once the zygote is warm: what was not sent can be taken back."""
        if not self.ready:
            return
        try:
            while self._unsent:
                self._zygote.send(**self._unsent[0])
                self._unsent.pop(0)
        except ZygoteDiedError as error:
            self._replace_zygote(str(error))

    def _read(self, timeout_s: float) -> None:
        try:
            messages = self._zygote.receive(timeout_s)
        except ZygoteDiedError as error:
            self._replace_zygote(str(error))
            return
        for message in messages:
            event = message.pop("event")
            if event == "ready":
                self.ready = True
                self._flush()
            elif event == "standby":
                self._standing.add(message["local_rank"])
                self._found.append(StandbyReady(**message))
            elif message["epoch"] == self._prepared.number:
                self._of_prepared(event, message)
            elif message["epoch"] != self._epoch.number or event in {"prepared", "unprepared"}:
                pass  # of an epoch that was given up, or of one that has begun
            elif event == "cleared":
                self.cleared = True
            elif (worker := self._epoch.workers.get(message["local_rank"])) is not None:
                if event == "started":
                    self._started(worker, message)
                else:
                    self._exited(message["local_rank"], worker, message["status"])

    # -- workers --------------------------------------------------------------------------

    def _started(self, worker: _Local, message: Mapping[str, Any]) -> None:
        worker.pid, self.cleared = message["pid"], False
        # Kernels before 5.3 have none, and one that ended and was reaped is gone:
        # the zygote's word has to do then.
        with contextlib.suppress(OSError):
            worker.pidfd = os.pidfd_open(worker.pid)
        self._found.append(
            WorkerStarted(
                local_rank=worker.launch.local_rank,
                rank=worker.launch.rank,
                pid=worker.pid,
                how=message["how"],
                why=message["why"],
            )
        )

    def _exited(self, local_rank: int, worker: _Local, status: int) -> None:
        killed = status == -int(signal.SIGKILL)
        tail = ""
        if killed and self._oom_kills() > self._epoch.oom_kills:
            tail = OOM_KILLED
        elif status and not killed:
            tail = _read_tail(worker)
        self._found.append(
            WorkerExited(
                local_rank=local_rank,
                rank=worker.launch.rank,
                pid=worker.pid,
                code=status if status >= 0 else None,
                signal=-status if status < 0 else None,
                record=read_json(worker.launch.error_file) or None,  # torn by its end
                error_file=worker.launch.error_file,
                log=worker.launch.error_log or worker.launch.log,
                log_tail=tail,
                beat=worker.heartbeat.read(),
            )
        )
        self._forget(self._epoch, local_rank)

    def _of_prepared(self, event: str, message: Mapping[str, Any]) -> None:
        if event == "prepared":
            self._found.append(PreparedReady(local_rank=message["local_rank"]))
        elif event == "unprepared":
            self._prepared_lost(message["local_rank"], message["status"])

    def _prepared_lost(self, local_rank: int, status: int) -> None:
        """Report that what was prepared has ended. Its place stays: a launch finds it so."""
        worker = self._prepared.workers.get(local_rank)
        if worker is not None:
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            last = [] if status < 0 else _read_tail(worker).strip().splitlines()[-1:]
            self._found.append(
                PreparedLost(local_rank=local_rank, detail=": ".join([how, *last])[:300])
            )

    def _forget(self, started: _Started, local_rank: int) -> None:
        worker = started.workers.pop(local_rank)
        worker.heartbeat.close()
        worker.launch.heartbeat.unlink(missing_ok=True)
        forget_answers(worker.launch.heartbeat)
        if worker.pidfd >= 0:
            os.close(worker.pidfd)

    def _signal_all(self) -> None:
        for worker in self._epoch.workers.values():
            if worker.pidfd >= 0:  # does not depend on the zygote being well
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(worker.pidfd, signal.SIGKILL)
        # A zygote that is gone took its workers along; `_read` will find out.
        with contextlib.suppress(ZygoteDiedError):
            self._zygote.send(op="kill")


def _read_tail(worker: _Local) -> str:
    try:
        with (worker.launch.error_log or worker.launch.log).open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(worker.log_offset, end - LOG_TAIL_BYTES))
            return log.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError as error:
        return f"(the log cannot be read: {error})"


def has_run(beat: Beat) -> bool:
    """Return whether the worker of this reading has completed a step of its epoch."""
    return beat.section >= Section.STEP


def failure_of(exited: WorkerExited, *, beats: bool) -> Failure | None:
    """Classify the end of a worker; None for a good end.

    `beats`: its heartbeat tells how far it came; of a script without one nobody knows.
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
