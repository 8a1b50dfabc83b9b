from __future__ import annotations

import pytest

from elastic_trainer.worker.heartbeat import Beat, Heartbeat, Request, Section, StepPart


@pytest.fixture
def sides(tmp_path):
    """The agent's and the worker's mapping of one file."""
    agent = Heartbeat(tmp_path / "beat", create=True)
    worker = Heartbeat(tmp_path / "beat")
    yield agent, worker
    agent.close()
    worker.close()


def test_the_agent_reads_what_the_worker_does(sides):
    agent, worker = sides
    assert agent.read() == Beat(0, Section.STARTING, 0, 0)
    worker.beat(step=7, section=Section.STEP, committed_step=5)
    worker.beat()
    assert agent.read() == Beat(7, Section.STEP, 2, 5, StepPart.OTHER, 1, 0)


def test_requests_add_up_and_stay(sides):
    agent, worker = sides
    assert worker.asked() == Request.NONE
    agent.ask(Request.STOP)
    agent.ask(Request.SAVE)
    assert worker.asked() == Request.STOP | Request.SAVE


def test_a_served_save_can_be_asked_for_again_and_takes_no_stop_along(sides):
    agent, worker = sides
    agent.ask(Request.SAVE)
    agent.ask(Request.SAVE)
    worker.save_served()
    assert worker.asked() == Request.NONE
    agent.ask(Request.SAVE | Request.GROW)
    assert worker.asked() == Request.SAVE | Request.GROW
    worker.save_served()
    assert worker.asked() == Request.GROW


def test_each_field_has_one_writer(sides, tmp_path):
    """Or one side's store could undo the other's."""
    agent, worker = sides
    path = tmp_path / "beat"
    before = path.read_bytes()
    agent.ask(Request.STOP | Request.SAVE)
    by_agent = path.read_bytes()
    worker.beat(step=1, section=Section.STEP, committed_step=1)
    worker.save_served()
    by_worker = path.read_bytes()
    changed = [
        {i // 8 for i in range(len(old)) if old[i] != new[i]}
        for old, new in ((before, by_agent), (by_agent, by_worker))
    ]
    assert changed[0]
    assert changed[1]
    assert not changed[0] & changed[1]
