"""The coordinator's transition table: what does not count in a phase does nothing."""

from __future__ import annotations

from typing import get_args

import pytest

from elastic_trainer.agent.membership.coordinator import TRANSITIONS, Coordinator, Phase
from elastic_trainer.agent.membership.effects import Context, Settings
from elastic_trainer.agent.membership.messages import Join, wrap
from elastic_trainer.agent.membership.notices import (
    LeaveAsked,
    Member,
    NodeLeaving,
    Report,
    StopAsked,
    WorkersCommitted,
    WorkersEnded,
    WorkersFailed,
    WorkersPaced,
    WorkersPrepared,
    WorkersReady,
    WorkersRunning,
    WorkersSeen,
    WorkersStepped,
)
from elastic_trainer.agent.membership.roles import ToCoordinator
from elastic_trainer.board.state import BoardState, Lease
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.failures import Action, Failure, Kind

ME = Member(agent_id="a", node="n0", host="n0", address="10.0.0.1", port=1, workers=1)
OTHER = Member(agent_id="b", node="n1", host="n1", address="10.0.0.2", port=1, workers=1)
LEASE = Lease(holder="a", node="n0", job="j", address="10.0.0.1", port=1, term=1)


def reports(epoch: int) -> list[Report]:
    failure = Failure(kind=Kind.KILLED, action=Action.RESTART, detail="SIGKILL")
    return [
        WorkersReady(),
        WorkersRunning(epoch=epoch, step=1),
        WorkersSeen(epoch=epoch, stalled=True, workers=()),
        WorkersPaced(epoch=epoch, ranks=()),
        WorkersFailed(epoch=epoch, local_rank=0, rank=0, step=1, failure=failure),
        WorkersEnded(epoch=epoch, finished=True, step=1),
        StopAsked(reason="SIGTERM"),
        LeaveAsked(reason="drained"),
        NodeLeaving(reason="a failed check"),
        WorkersCommitted(epoch=epoch),
        WorkersStepped(epoch=epoch),
        WorkersPrepared(number=7),
    ]


LADDER = Ladder.data_parallel(max_nodes=2, min_nodes=2, workers=1)


def coordinator(phase: Phase) -> Coordinator:
    """Return one of two agents whose epoch 3 is in `phase`."""
    ctx = Context(me=ME, job="j", settings=Settings(ladder=LADDER), random=lambda: 0.5, epoch=3)
    made = Coordinator(ctx, ToCoordinator(BoardState(epoch=3, lease=LEASE), 1))
    made.start()
    made.received(1, Join(member=OTHER, job="j", last_epoch=3))
    made.phase, made.members = phase, ("a", "b")
    ctx.outbox.clear()
    return made


def test_the_table_has_every_report():
    assert set(get_args(Report)) <= TRANSITIONS.keys()
    assert {type(report) for report in reports(3)} == set(get_args(Report))


def test_the_table_names_methods():
    assert all(
        callable(getattr(Coordinator, on.handler or "advance")) for on in TRANSITIONS.values()
    )


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("report", reports(3), ids=lambda report: type(report).__name__)
def test_a_report_does_nothing_in_a_phase_in_which_it_does_not_count(phase, report):
    one = coordinator(phase)
    timers = dict(one.ctx.timers)
    one.received(1, wrap(report))
    if phase not in TRANSITIONS[type(report)].phases:
        assert (one.phase, one.ctx.outbox, one.ctx.timers) == (phase, [], timers)


@pytest.mark.parametrize("phase", Phase)
def test_what_is_said_of_another_epoch_does_nothing(phase):
    for report in (each for each in reports(2) if hasattr(each, "epoch")):
        one = coordinator(phase)
        one.received(1, wrap(report))
        assert (one.phase, one.ctx.outbox) == (phase, [])


@pytest.mark.parametrize(
    ("phase", "report", "then"),
    [
        (Phase.STARTING, WorkersRunning(epoch=3, step=1), Phase.RUNNING),
        (Phase.RUNNING, StopAsked(reason="SIGTERM"), Phase.DRAINING),
        (Phase.IDLE, StopAsked(reason="SIGTERM"), Phase.ENDING),
        (Phase.RUNNING, reports(3)[4], Phase.FORMING),
        (Phase.DRAINING, reports(3)[4], Phase.FORMING),
    ],
)
def test_where_a_report_leads(phase, report, then):
    one = coordinator(phase)
    one.received(1, wrap(report))
    assert one.phase is then


@pytest.mark.parametrize(
    ("phase", "then"), [(Phase.IDLE, Phase.ENDING), (Phase.RUNNING, Phase.DRAINING)]
)
def test_when_all_are_asked_to_go_the_job_saves_what_runs_and_ends(phase, then):
    one = coordinator(phase)
    one.reported(LeaveAsked(reason="drained"))
    one.received(1, wrap(LeaveAsked(reason="drained")))
    one.timer("together")
    assert one.phase is then
    assert "drained" in one._stopping
