"""A bench for the agent: real workers, and a scripted coordinator in place of membership."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import pytest
import test_zygote as t
from torch.distributed.elastic.agent.server.api import WorkerSpec

from elastic_trainer.agent.agent import HoldfastAgent
from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.agent.membership.notices import (
    EpochFormed,
    JobStopped,
    Member,
    Notice,
    Report,
    WorkersFailed,
    WorkersReady,
    WorkersRunning,
    WorkersStepped,
)
from elastic_trainer.agent.membership.tasks import Task
from elastic_trainer.agent.settings import AgentConfig
from elastic_trainer.agent.stop_signals import Waker
from elastic_trainer.agent.workers.environment import Scratch
from elastic_trainer.agent.workers.group import JobResult
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import Event

R = TypeVar("R", bound=Report)
ME = Member(agent_id="a1", node="n1", host="n1", address="127.0.0.2", port=1, workers=2)
OTHER = Member(agent_id="a0", node="n0", host="n0", address="127.0.0.1", port=1, workers=2)


def formed(epoch: int, *members: Member, spares: tuple[Member, ...] = ()) -> EpochFormed:
    (rung,) = Ladder.data_parallel(max_nodes=len(members), min_nodes=len(members), workers=2).rungs
    return EpochFormed(
        epoch=epoch,
        members=members,
        spares=spares,
        rung=rung,
        store_address="127.0.0.1",
        store_port=29400,
        coordinator=OTHER.node,
        reason="start",
    )


class ScriptedMembership:
    """Plays the coordinator: `script` runs in a thread of its own, says notices, sees reports."""

    def __init__(self, waker: Waker, script: Callable[[ScriptedMembership], None]) -> None:
        self._waker, self._script = waker, script
        self._notices: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._play)
        self.error: BaseException | None = None
        self.closing = threading.Event()
        self.ready = 0
        self.stepped: list[int] = []
        """Epochs of which a first step was reported."""
        self.closed = False
        self._answer: Notice | None = None

    def get_backend(self) -> str:
        return "scripted"

    def get_run_id(self) -> str:
        return "run"

    def notice(self, timeout_s: float) -> Notice | None:
        if self._thread.ident is None:
            self._thread.start()  # the agent listens, and has its signal handlers
        try:
            return self._notices.get(timeout=timeout_s) if timeout_s else self._notices.get_nowait()
        except queue.Empty:
            return None

    def report(self, report: Report) -> None:
        if isinstance(report, WorkersReady):
            self.ready += 1
        elif isinstance(report, WorkersStepped):
            self.stepped.append(report.epoch)
        else:
            self._reports.put(report)
            if isinstance(report, WorkersFailed) and self._answer is not None:
                self.say(self._answer)

    def close(self) -> None:
        self.closing.set()
        self._thread.join(t.DEADLINE_S)
        self.closed = True

    def say(self, *notices: Notice) -> None:
        for notice in notices:
            self._notices.put(notice)
        self._waker.wake()

    def answer_failures(self, notice: Notice) -> None:
        """Say `notice` the moment a failure is reported."""
        self._answer = notice

    def expect(self, kind: type[R]) -> R:
        report = self._reports.get(timeout=t.DEADLINE_S)
        assert isinstance(report, kind), report
        return report

    def begin(self, epoch: int, *members: Member) -> WorkersRunning:
        """Form an epoch of `members`, and wait until this node's workers run."""
        self.say(formed(epoch, *members))
        return self.expect(WorkersRunning)

    def no_more_reports(self) -> None:
        assert self._reports.empty(), self._reports.get()

    def _play(self) -> None:
        try:
            self._script(self)
        except BaseException as error:  # noqa: BLE001  raised again in the test's thread
            self.error = error
        self.say(JobStopped(code=0 if self.error is None else 1, reason="the script ends"))


@dataclass
class Bench:
    """An agent with real workers and a scripted coordinator."""

    tmp_path: Path
    env: dict[str, str] = field(default_factory=dict)
    num_workers: int = 2
    config: dict[str, object] = field(default_factory=dict)
    task: Task | None = None
    event_log_handler: str = "null"
    zygotes: list[Workers] = field(default_factory=list)
    keeper: Keeper | None = None

    def run(
        self, script: Callable[[ScriptedMembership], None], me: Member = ME
    ) -> tuple[JobResult, HoldfastAgent, list[Event]]:
        task = self.task or Task(kind="main", target=t.CHILD, cwd=str(self.tmp_path))
        report = {"CHILD_REPORT": str(self.tmp_path / "report")}
        workers = Workers(task, env=t.base_env() | report | self.env)
        self.zygotes.append(workers)
        waker = Waker()
        scratch = Scratch("run", me.node, root=self.tmp_path).path
        config = AgentConfig(
            me=me,
            workers=self.num_workers,
            scratch=scratch,
            secret_dir=self.tmp_path,
            log_dir=self.tmp_path / "logs" / "0" / me.node,
            stacks_dir=self.tmp_path / "stacks",
            hang_ceiling_s=60.0,
            start_ceiling_s=60.0,
            tick_s=0.02,
        )
        config = replace(config, **self.config)  # type: ignore[arg-type]
        membership = ScriptedMembership(waker, script)
        spec = WorkerSpec(
            role="default",
            local_world_size=self.num_workers,
            rdzv_handler=membership,
            entrypoint=task.target,
            max_restarts=3,
            event_log_handler=self.event_log_handler,
        )
        log = EventLog(self.tmp_path, f"agent-{me.node}", node=me.node)
        agent = HoldfastAgent(
            config, spec, workers=workers, waker=waker, log=log, keeper=self.keeper
        )
        try:
            result = agent.run()
        finally:
            log.close()
            waker.close()
        assert membership.closed
        if membership.error is not None:
            raise membership.error
        assert list(scratch.glob("*.heartbeat")) == []
        return result, agent, self.events(me)

    def events(self, me: Member = ME) -> list[Event]:
        of = {"events": f"agent-{me.node}.jsonl", "nodes": f"{me.node}.jsonl"}
        paths = (self.tmp_path / folder / name for folder, name in of.items())
        lines = [line for p in paths if p.exists() for line in p.read_text().splitlines()]
        found = [event for line in lines if (event := Event.decode(line))]
        return sorted(found, key=lambda event: event.t_mono)

    def reports(self) -> dict[int, dict[str, object]]:
        paths = self.tmp_path.glob("report.*")
        return {int(path.suffix[1:]): json.loads(path.read_text()) for path in paths}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for workers in bench.zygotes:
        assert t.gone(workers._zygote.pid)


def named(events: list[Event], name: str) -> list[Event]:
    return [event for event in events if event.event == name]
