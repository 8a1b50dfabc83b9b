"""What the agent does when it is sent a signal."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import test_zygote as t
from agent_bench import ME, Bench, ScriptedMembership, bench, formed, named

from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    JobStopped,
    LeaveAsked,
    StopAsked,
    WorkersEnded,
    WorkersRunning,
)
from elastic_trainer.heartbeat import Heartbeat, Request

__all__ = ["bench"]  # the fixture


def test_a_signal_asks_for_a_stop_and_a_second_one_leaves(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        m.expect(WorkersRunning)
        os.kill(os.getpid(), signal.SIGTERM)
        assert m.expect(StopAsked) == StopAsked(reason="SIGTERM")
        os.kill(os.getpid(), signal.SIGINT)
        assert m.closing.wait(t.DEADLINE_S)

    before = signal.getsignal(signal.SIGTERM)
    result, agent, events = bench.run(script)
    assert signal.getsignal(signal.SIGTERM) is before
    assert agent.exit_code == 1
    assert events[-1].event == "agent.exit"
    assert events[-1].fields == {"code": 1, "reason": "SIGINT, again: left without saving"}
    assert result.is_failed()


def test_where_the_node_leaves_alone_sigterm_means_it_alone(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"
    bench.config, me = {"leaves_alone": True}, replace(ME, host="machine-7")

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, me))
        m.expect(WorkersRunning)
        os.kill(os.getpid(), signal.SIGTERM)
        assert m.expect(LeaveAsked) == LeaveAsked(reason="SIGTERM")
        os.kill(os.getpid(), signal.SIGUSR2)  # the whole job after all
        assert m.expect(StopAsked) == StopAsked(reason="SIGUSR2")
        m.say(JobStopped(code=91, reason="left on request: SIGTERM"))
        assert m.closing.wait(t.DEADLINE_S)

    _, agent, events = bench.run(script, me)
    assert agent.exit_code == 91
    assert named(events, "agent.started")[0].fields["host"] == "machine-7"


def test_sigusr1_asks_the_workers_for_a_save_and_says_where_they_were(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"
    asked: list[Request] = []

    def script(m: ScriptedMembership) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # none run yet
        t.until(lambda: len(named(bench.events(), "save.asked")) == 1, "not noted")
        m.say(formed(0, ME))
        m.expect(WorkersRunning)
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
