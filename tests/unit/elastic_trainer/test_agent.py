"""The agent: epochs from start to end, failures of workers, zygotes and of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import test_zygote as t
from agent_bench import ME, OTHER, Bench, ScriptedMembership, bench, formed, named
from torch.distributed.elastic.agent.server.api import WorkerState

from elastic_trainer.agent.agent import HoldfastAgent
from elastic_trainer.agent.hangs.procfs import state_of
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    JobStopped,
    NodeLeaving,
    ShowWorkers,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
    WorkersSeen,
)
from elastic_trainer.agent.membership.tasks import Task, WorkerExited
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.failures import Action, Kind
from elastic_trainer.heartbeat import Request

__all__ = ["bench"]  # the fixture


def test_runs_an_epoch_to_its_end(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train 3"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(4, OTHER, ME))
        assert m.expect(WorkersRunning).epoch == 4
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=4, finished=True, step=3)
        m.no_more_reports()

    result, agent, events = bench.run(script)
    assert (result.state, result.is_failed(), agent.exit_code) == (WorkerState.SUCCEEDED, False, 0)
    assert [event.event for event in events] == [
        "agent.started", "worker.started", "worker.started", "recovery.phase",
        "worker.exit", "worker.exit", "agent.exit",
    ]  # fmt: skip
    assert events[3].fields["phase"] == "fork"
    assert events[3].epoch == 4
    assert {event.fields["how"] for event in named(events, "worker.started")} == {"zygote"}
    reports = bench.reports()
    assert sorted(reports) == [2, 3]
    env = reports[3]["env"]
    assert isinstance(env, dict)
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_NAME": "default", "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "4", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOLDFAST_EPOCH": "4", "HOLDFAST_RUNG": "2", "HOLDFAST_NODE": "n1",
        "HOLDFAST_ADDRESS": "127.0.0.2",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected
    group = agent.get_worker_group()
    assert [worker.global_rank for worker in group.workers] == [2, 3]
    assert [worker.id for worker in group.workers] == [reports[2]["pid"], reports[3]["pid"]]
    assert (bench.tmp_path / "logs" / "0" / "n1" / "3.log").exists()


def test_saves_and_leaves_when_asked(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        m.expect(WorkersRunning)
        m.say(AskWorkers(epoch=7, request=Request.STOP))  # of another epoch: not for them
        m.say(AskWorkers(epoch=0, request=Request.GROW))
        ended = m.expect(WorkersEnded)
        assert isinstance(ended, WorkersEnded)
        assert not ended.finished
        assert ended.step >= 1

    bench.run(script)


def test_an_aborted_epoch_is_killed_and_the_next_one_runs(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(1, OTHER, ME))
        m.expect(WorkersRunning)
        m.say(EpochAborted(epoch=0, reason="an old one", victims=()))
        m.say(EpochAborted(epoch=1, reason="node lost", victims=("n0",)))
        m.say(formed(0, OTHER, ME))  # late: fenced out
        m.say(formed(2, ME))
        assert m.expect(WorkersRunning).epoch == 2
        m.no_more_reports()

    _, _, events = bench.run(script)
    exits = named(events, "worker.exit")
    assert len(exits) == 4
    assert {event.fields["signal"] for event in exits} == {9}
    assert exits[0].fields["detail"] == "killed by the agent: node lost"
    phases = [(event.epoch, event.fields["phase"]) for event in named(events, "recovery.phase")]
    assert phases == [(1, "fork"), (1, "kill_workers"), (2, "fork"), (2, "kill_workers")]
    assert sorted(bench.reports()) == [0, 1, 2, 3]


def test_a_spare_runs_nothing_until_it_is_a_member(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train 2"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(1, OTHER, spares=(ME,)))
        m.say(EpochAborted(epoch=1, reason="node lost", victims=("n0",)))
        m.say(formed(2, ME))
        m.expect(WorkersRunning)
        m.expect(WorkersEnded)

    _, _, events = bench.run(script)
    assert [event.epoch for event in named(events, "worker.started")] == [2, 2]


@pytest.mark.parametrize(
    ("act", "kind", "action", "detail"),
    [
        ("raise all is lost", Kind.CRASH, Action.RESTART, "RuntimeError: all is lost"),
        ("signal 9", Kind.KILLED, Action.RESTART, "SIGKILL"),
        ("exit 93", Kind.USER_ERROR, Action.STOP, "child does exit 93"),
        ("raise HF999 uncorrectable ECC error", Kind.NODE_FAULT, Action.EVICT, "ECC"),
    ],
)
def test_the_first_failure_is_reported_and_the_rest_killed(
    bench: Bench, act: str, kind: Kind, action: Action, detail: str
) -> None:
    bench.env |= {"CHILD_ACT": "train", "CHILD_ACT_1": act}

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert isinstance(failed, WorkersFailed)
        assert (failed.local_rank, failed.rank) == (1, 1)
        assert (failed.failure.kind, failed.failure.action) == (kind, action)
        assert detail in failed.failure.detail
        m.no_more_reports()

    _, _, events = bench.run(script)
    exits = {event.fields["local_rank"]: event.fields for event in named(events, "worker.exit")}
    assert exits[1]["kind"] == kind
    assert exits[0]["kind"] is None
    assert "killed by the agent" in exits[0]["detail"]


def test_a_consequence_waits_for_its_cause(bench: Bench) -> None:
    bench.config["settle_s"] = 20.0
    bench.env |= {
        "CHILD_ACT_0": "raise Connection closed by peer",
        "CHILD_ACT_1": "late raise the cause",
    }

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert isinstance(failed, WorkersFailed)
        assert (failed.rank, failed.failure.kind) == (1, Kind.CRASH)
        m.no_more_reports()

    bench.run(script)


def test_a_consequence_alone_is_reported_soon(bench: Bench) -> None:
    bench.env |= {"CHILD_ACT": "train", "CHILD_ACT_0": "raise Connection closed by peer"}

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert isinstance(failed, WorkersFailed)
        assert (failed.rank, failed.failure.kind) == (0, Kind.COLLATERAL)

    bench.run(script)


def test_a_hang_is_a_failure(bench: Bench) -> None:
    bench.config |= {"hang_ceiling_s": 0.3, "blame_s": 0.2}
    bench.env |= {"CHILD_ACT_0": "train", "CHILD_ACT_1": "stall 20"}

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        m.expect(WorkersRunning)
        seen = m.expect(WorkersSeen)
        while not seen.hangs:  # the first warnings come before the limit
            assert seen.stalled
            seen = m.expect(WorkersSeen)
        assert [view.idle_s > view.limit_s for view in seen.workers] == [False, True]
        assert [view.rank for view in seen.workers] == [0, 1]
        failed = m.expect(WorkersFailed)
        assert isinstance(failed, WorkersFailed)
        assert (failed.local_rank, failed.step) == (1, 20)
        assert (failed.failure.kind, failed.failure.action) == (Kind.HANG, Action.RESTART)
        assert "in step after step 20; the ceiling is 0.3 s" in failed.failure.detail

    _, _, events = bench.run(script)
    (hung,) = named(events, "worker.hung")
    assert (hung.fields["local_rank"], hung.fields["section"]) == (1, "step")
    (stalled,) = named(events, "worker.stalled")
    assert (stalled.fields["local_rank"], stalled.fields["part"]) == (1, "other")


def test_stacks_of_all_workers_are_kept_before_they_are_killed(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(3, OTHER, ME))
        m.expect(WorkersRunning)
        pids = {rank: report["pid"] for rank, report in bench.reports().items()}
        os.kill(pids[3], signal.SIGSTOP)
        t.until(lambda: state_of(pids[3]) == "T", "not stopped")
        m.say(ShowWorkers(epoch=3))
        seen = m.expect(WorkersSeen)
        assert not seen.stalled
        m.say(EpochAborted(epoch=3, reason="hang", victims=(), stacks=True))
        t.until(lambda: all(t.gone(pid) for pid in pids.values()), "not killed")

    _, _, events = bench.run(script)
    (dumped,) = named(events, "stacks.dumped")
    assert dumped.epoch == 3
    assert dumped.fields["seconds"] < 1.0
    folder = Path(dumped.fields["folder"])
    assert folder == bench.tmp_path / "stacks" / "3"
    runs, stopped = ((folder / f"rank{rank}.txt").read_text() for rank in (2, 3))
    assert "_train" in runs
    assert "stacks, from the worker itself" in runs
    assert "State T (stopped)" in stopped
    assert "from the worker itself" not in stopped
    assert list(bench.tmp_path.rglob("*.stacks")) == []


def test_a_zygote_that_dies_is_a_failure_and_twice_a_bad_node(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "wait"

    def script(m: ScriptedMembership) -> None:
        for epoch in range(2):
            m.say(formed(epoch, ME))
            t.until(lambda: len(bench.reports()) == 2, "not started")
            os.kill(bench.zygotes[0].zygote_pid, signal.SIGKILL)
            failed = m.expect(WorkersFailed)
            assert isinstance(failed, WorkersFailed)
            assert failed.epoch == epoch
            assert "the zygote died (signal SIGKILL)" in failed.failure.detail
            for path in bench.tmp_path.glob("report.*"):
                path.unlink()
        assert "zygote died 2 times" in m.expect(NodeLeaving).reason
        # A coordinator stays, but starts no third one.
        t.until(lambda: t.gone(bench.zygotes[0].zygote_pid), "a third zygote")
        m.say(formed(2, OTHER, spares=(ME,)))
        m.no_more_reports()

    bench.run(script)


def test_a_zygote_that_dies_before_any_epoch_twice_is_a_bad_node(bench: Bench) -> None:
    def script(m: ScriptedMembership) -> None:
        first = bench.zygotes[0].zygote_pid
        os.kill(first, signal.SIGKILL)
        t.until(lambda: bench.zygotes[0].zygote_pid != first, "not replaced")
        os.kill(bench.zygotes[0].zygote_pid, signal.SIGKILL)
        assert "zygote died 2 times" in m.expect(NodeLeaving).reason

    bench.run(script)


def test_a_worker_that_cannot_be_killed_costs_the_node_its_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in the kernel: killed, but never reaped."""
    bench.env["CHILD_ACT"] = "wait"
    real = Workers.kill_all

    def stuck(self: Workers, deadline_s: float) -> tuple[list[WorkerExited], list[int]]:
        exits, unreapable = real(self, deadline_s)
        return exits[1:], [*unreapable, *(item.pid for item in exits[:1])]

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        t.until(lambda: len(bench.reports()) == 2, "not started")
        monkeypatch.setattr(Workers, "kill_all", stuck)
        m.say(EpochAborted(epoch=0, reason="another node is lost", victims=("n0",)))
        assert "cannot end worker processes" in m.expect(NodeLeaving).reason
        m.say(formed(1, ME))  # too late: it runs nothing any more
        m.say(JobStopped(code=92, reason="put out"))

    _, agent, events = bench.run(script)
    assert agent.exit_code == 92
    assert len(named(events, "worker.unreapable")) == 1
    assert len(named(events, "worker.started")) == 2


def test_an_error_of_the_agents_own_ends_workers_and_says_what_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.env["CHILD_ACT"] = "wait"

    def broken(self: HoldfastAgent) -> None:
        raise RuntimeError("out of order")

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        t.until(lambda: len(bench.reports()) == 2, "not started")
        monkeypatch.setattr(HoldfastAgent, "_look_at_heartbeats", broken)
        assert m.closing.wait(t.DEADLINE_S)

    with pytest.raises(RuntimeError, match="out of order"):
        bench.run(script)
    (ended,) = named(bench.events(), "agent.exit")
    assert ended.fields == {"code": 1, "reason": "error: RuntimeError: out of order"}
    assert len(named(bench.events(), "worker.exit")) == 2


def test_scripts_without_heartbeats_run_as_soon_as_they_have_started(bench: Bench) -> None:
    bench.task = Task(
        kind="command", target=sys.executable, args=("-c", "pass"), cwd=str(bench.tmp_path)
    )
    bench.config["watch_all"] = False

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        m.expect(WorkersRunning)
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=0, finished=True, step=0)

    _, _, events = bench.run(script)
    assert {event.fields["how"] for event in named(events, "worker.started")} == {"fresh"}


def test_fork_to_main_is_quick(bench: Bench) -> None:
    """Not a benchmark: a warm fork must not import anything again."""
    bench.env["CHILD_ACT"] = "train 1"
    said: list[float] = []

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        m.expect(WorkersRunning)
        m.expect(WorkersEnded)
        said.append(time.monotonic())
        m.say(formed(1, ME))
        m.expect(WorkersRunning)
        m.expect(WorkersEnded)

    bench.run(script)
    slowest = max(float(str(report["begun"])) for report in bench.reports().values()) - said[0]
    assert slowest < 1.0
