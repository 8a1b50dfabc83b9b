"""What the agent does when it is sent a signal."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import test_zygote as t
from agent_bench import ME, Bench, ScriptedMembership, bench, named

from elastic_trainer.agent.keeper import Keeper
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    JobStopped,
    LeaveAsked,
    StopAsked,
    WorkersEnded,
)
from elastic_trainer.state.snapshots.image import file_name
from elastic_trainer.worker.heartbeat import Heartbeat, Request

__all__ = ["bench"]  # the fixture


@pytest.mark.process
@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_asks_for_a_stop_by_its_name_and_only_ctrl_c_later_leaves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Schedulers and process managers repeat themselves; two SIGINT at once are one Ctrl-C."""
    bench.env["CHILD_ACT"] = "train"
    monkeypatch.setattr("elastic_trainer.agent.agent.AGAIN_S", 0.5)

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        os.kill(os.getpid(), signal.Signals[first])
        assert m.expect(StopAsked) == StopAsked(reason=first, signal=first)
        for name in (first, "SIGTERM", "SIGHUP", "SIGQUIT", "SIGINT"):
            os.kill(os.getpid(), signal.Signals[name])
        assert not m.closing.wait(1.0), "the save goes on"
        os.kill(os.getpid(), signal.SIGINT)
        assert m.closing.wait(t.DEADLINE_S)

    before = signal.getsignal(signal.SIGTERM)
    result, _, events = bench.run(script)
    assert signal.getsignal(signal.SIGTERM) is before
    assert result.code == 1
    assert (events[-1].event, events[-1].fields["code"]) == ("agent.exit", 1)
    assert "SIGINT" in events[-1].fields["reason"]
    assert result.is_failed()


def test_a_hangup_that_is_ignored_stays_so(bench: Bench) -> None:
    """As nohup has it."""
    bench.env["CHILD_ACT"] = "train"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert m.expect(StopAsked) == StopAsked(reason="SIGUSR2")

    try:
        bench.run(script)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_where_the_node_leaves_alone_sigterm_means_it_alone(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"
    bench.config, me = {"leaves_alone": True}, replace(ME, host="machine-7")

    def script(m: ScriptedMembership) -> None:
        m.begin(0, me)
        os.kill(os.getpid(), signal.SIGTERM)
        assert m.expect(LeaveAsked) == LeaveAsked(reason="SIGTERM")
        os.kill(os.getpid(), signal.SIGUSR2)  # the whole job after all
        assert m.expect(StopAsked) == StopAsked(reason="SIGUSR2")
        m.say(JobStopped(code=91, reason="left on request: SIGTERM"))
        assert m.closing.wait(t.DEADLINE_S)

    result, _, events = bench.run(script, me)
    assert result.code == 91
    assert named(events, "agent.started")[0].fields["host"] == "machine-7"


def test_a_drained_node_leaves_alone_and_the_job_can_still_be_stopped(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        os.kill(os.getpid(), signal.SIGRTMIN)
        assert m.expect(LeaveAsked) == LeaveAsked(reason="drained")
        os.kill(os.getpid(), signal.SIGTERM)  # the first of its kind: it saves
        assert m.expect(StopAsked) == StopAsked(reason="SIGTERM")
        m.say(JobStopped(code=91, reason="left on request: drained"))
        assert m.closing.wait(t.DEADLINE_S)

    result, _, _ = bench.run(script, ME)
    assert result.code == 91


@pytest.mark.parametrize("freed", [True, False])
def test_a_node_that_leaves_serves_its_snapshots_until_they_are_freed(
    bench: Bench, tmp_path: Path, freed: bool
) -> None:
    """Whoever gives it no more time says so by another signal."""
    bench.env["CHILD_ACT"] = "train"
    images = tmp_path / "images"
    images.mkdir()
    (images / file_name("own", epoch=0, rank=0, slot=0)).touch()
    asked = threading.Event()

    class Asked(Keeper):
        def holds_any(self) -> bool:
            held = super().holds_any()
            asked.set()
            return held

    bench.keeper = keeper = Asked(images, "127.0.0.1", authenticate=lambda _: None, key=bytes(32))

    def later() -> None:
        asked.wait(t.DEADLINE_S)
        if freed:
            keeper.free(1)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=later)

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        m.say(JobStopped(code=92, reason="n1 is excluded", serves=True))
        assert m.closing.wait(t.DEADLINE_S)
        assert not asked.is_set(), "the coordinator sees the connection end first"

    thread.start()
    result, _, events = bench.run(script)
    thread.join()
    keeper.close()
    assert result.code == 92
    assert [event.event for event in events[-2:]] == ["snapshot.served", "agent.exit"]
    assert events[-2].fields["freed"] is freed


def test_sigusr1_asks_the_workers_for_a_save_and_says_where_they_were(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"
    asked: list[Request] = []

    def script(m: ScriptedMembership) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # none run yet
        t.until(lambda: len(named(bench.events(), "save.asked")) == 1, "not noted")
        m.begin(0, ME)
        os.kill(os.getpid(), signal.SIGUSR1)
        t.until(lambda: len(named(bench.events(), "save.asked")) == 2, "not noted again")
        (workers,) = bench.zygotes
        for worker in workers._epoch.workers.values():
            beat = Heartbeat(worker.launch.heartbeat)
            asked.append(beat.asked())
            beat.close()
        m.say(AskWorkers(epoch=0, request=Request.STOP))
        m.expect(WorkersEnded)

    _, _, events = bench.run(script)
    first, second = named(events, "save.asked")
    assert first.step is None
    assert second.step is not None
    assert second.step >= 1
    assert all(Request.SAVE in request for request in asked)
    assert len(asked) == 2


@pytest.mark.parametrize("name", [pytest.param("SIGHUP", marks=pytest.mark.process), "SIGUSR1"])
def test_a_signal_that_was_named_asks_for_a_stop(bench: Bench, name: str) -> None:
    """Whatever it means else."""
    bench.env["CHILD_ACT"] = "train"
    bench.config = {"stop_signals": frozenset({"SIGTERM", "SIGINT", name})}

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        os.kill(os.getpid(), signal.Signals[name])
        assert m.expect(StopAsked) == StopAsked(reason=name, signal=name)

    before = signal.getsignal(signal.Signals[name])
    result, _, _ = bench.run(script)
    assert signal.getsignal(signal.Signals[name]) is before
    assert result.code == 0
