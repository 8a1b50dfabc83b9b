"""What somebody of the run sends and does not mean: it ends its connection, and nothing else."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from membership_sim import Cluster
from test_messages import formed, messages, number, reports, several, text

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.messages import (
    Changed,
    Formed,
    ReportMessage,
    decode,
    encode,
    wrap,
)
from elastic_trainer.agent.membership.notices import (
    RankPace,
    ShowWorkers,
    WorkersPaced,
    WorkersSeen,
    WorkerView,
)
from elastic_trainer.plan.ladder import Ladder

seconds = st.floats(allow_nan=False, allow_infinity=False) | number
views = st.builds(
    WorkerView,
    rank=number,
    local_rank=number,
    step=number,
    section=text,
    part=text,
    place=number,
    lane=number,
    idle_s=seconds,
    limit_s=seconds,
    state=text,
)
paces = st.builds(
    RankPace,
    rank=st.integers(-1, 2),
    lane=st.integers(-1, 1),
    own_s=st.lists(seconds, max_size=4).map(tuple),
)
epochs = st.integers(-2, 3)
seen = st.builds(
    WorkersSeen,
    epoch=epochs,
    stalled=st.booleans(),
    workers=st.lists(views, max_size=2).map(tuple),
    committed=st.none() | number,
)
paced = st.builds(WorkersPaced, epoch=epochs, ranks=st.lists(paces, max_size=3).map(tuple))


def of_epoch(report: object) -> object:
    """Return it as of an epoch that runs, where it names one."""
    return (
        st.just(report)
        if not hasattr(report, "epoch")
        else epochs.map(lambda epoch: type(report)(**{**_fields(report), "epoch": epoch}))
    )


def _fields(record: object) -> dict[str, object]:
    return {name: getattr(record, name) for name in type(record).__slots__}


@functools.cache
def what_they_hold() -> str:
    """Return what a change must be of, to be one for them."""
    return running().nodes[0].machine.ctx.everyone.digest


bounds = st.lists(st.integers(-1, 5), max_size=4).map(tuple)
said = st.one_of(
    messages,
    messages.flatmap(of_epoch),
    messages.filter(lambda message: isinstance(message, Formed)).flatmap(of_epoch),
    st.builds(
        Changed,
        base=st.builds(what_they_hold),
        rows=several,
        members=bounds,
        spares=bounds,
        left=bounds,
        rest=formed.flatmap(of_epoch),
    ),
    st.builds(ShowWorkers, epoch=epochs),
    st.one_of(reports.flatmap(of_epoch), seen, paced).map(wrap),
    st.builds(
        ReportMessage,
        kind=st.sampled_from(["WorkersSeen", "WorkersPaced", "WorkersFailed", "StopAsked"]),
        report=st.dictionaries(text, number | text, max_size=3),
    ),
)


def running() -> Cluster:
    ladder = Ladder.data_parallel(max_nodes=3, min_nodes=2, workers=1)
    world = Cluster(Settings(ladder=ladder))
    for i in range(3):
        world.add(f"n{i}")
    world.run(5.0)
    assert {node.working for node in world.nodes} == {1}
    return world


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), said), min_size=1, max_size=6))
def test_no_message_ends_an_agent(steps):
    """Whoever hears it, coordinator or follower, over any of its connections."""
    world = running()
    for who, which, message in steps:
        node = world.nodes[who]
        conns = sorted(node.links)
        if node.stopped is not None or not conns:
            continue
        payload = encode(message)
        try:
            heard = decode(payload)
        except ValueError:
            continue  # refused by the parser
        conn = conns[which % len(conns)]
        now = world.now + node.offset
        node.machine.feed(now, lambda role, conn=conn, heard=heard: role.received(conn, heard))
        due = node.machine.next_timer()
        node.machine.tick(max(now, due if due is not None else 0.0))
