"""What the agent says on its stderr."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

import pytest
import test_zygote as t
from agent_bench import ME, OTHER, Bench, ScriptedMembership, bench, formed

from elastic_trainer.agent.membership.notices import (
    EpochAborted,
    JobStopped,
    NodesAwaited,
    WorkersFailed,
)
from elastic_trainer.agent.workers import reporter
from elastic_trainer.agent.workers.reporter import LONGEST_S, Voice, Waiting

__all__ = ["bench"]  # the fixture


def test_nobody_waits_for_who_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setattr(reporter, "STDERR", write)
    said, begin = Voice(), time.monotonic()
    for _ in range(10):
        said.say("x" * 65536)
    said.close()
    assert time.monotonic() - begin < 5.0
    os.close(read)  # ends the thread's write
    said.close()
    os.close(write)


def test_a_wait_is_said_rarely() -> None:
    waiting = Waiting(0.0)
    said = [second for second in range(86400) if waiting.due(second)]
    assert said[:5] == [5, 10, 20, 40, 80]
    assert max(b - a for a, b in itertools.pairwise(said)) == LONGEST_S


def test_a_failure_of_another_node_and_the_end_are_said(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.begin(1, ME, OTHER)
        m.say(EpochAborted(epoch=1, reason="rank 3 failed: boom", victims=("n0",)))
        m.begin(2, ME)
        m.say(JobStopped(code=94, reason="3 restarts"))
        assert m.closing.wait(t.DEADLINE_S)

    bench.run(script)
    failed, log, again, ended = capfd.readouterr().err.splitlines()
    assert failed.startswith("holdfast agent: ")
    assert "rank 3 failed: boom" in failed
    assert "n0" in failed
    assert Path(log.split()[-1]) == bench.tmp_path / "logs" / "0" / "n0"
    assert "restart" in again
    assert "94" in ended
    assert "3 restarts" in ended


def test_of_the_failures_of_an_epoch_the_first_has_its_last_lines(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.env["CHILD_ACT"] = "raise"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(1, ME))
        assert m.expect(WorkersFailed)

    bench.run(script)
    said = capfd.readouterr().err
    assert 1 <= said.count("on n1 failed") == said.count("\n  log: ") <= 2
    assert 1 <= said.count("\n  | ") <= 8


@pytest.mark.process
def test_the_coordinator_says_for_whom_it_waits(
    bench: Bench, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporter, "FIRST_S", 0.2)

    def script(m: ScriptedMembership) -> None:
        m.say(NodesAwaited(have=1, want=2, within_s=300.0, then="it gives up"))
        assert not m.closing.wait(2.5)

    bench.run(script)
    first, *more = capfd.readouterr().err.splitlines()
    assert "1 of 2" in first
    assert "join_timeout_s" in first
    assert "it gives up" in first
    assert len(more) <= 4
