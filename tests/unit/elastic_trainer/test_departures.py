"""Agents that are asked to go, in virtual time: who goes on, what it costs, and when all end."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_sim import Cluster
from test_membership import coordinator, others, started

from elastic_trainer.agent.membership.coordinator import BOUNDARY_S, TOGETHER_S
from elastic_trainer.agent.membership.effects import SERVE_S
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    EpochFormed,
    LeaveAsked,
    NodeLeaving,
)
from elastic_trainer.worker.heartbeat import Request

LEAVE = LeaveAsked(reason="SIGTERM")


def told(node, kind) -> list:
    return [notice for notice in node.notices if isinstance(notice, kind)]


def charged(cluster: Cluster) -> int:
    return len(coordinator(cluster).machine.ctx.history.entries)


def settled_without(cluster: Cluster, *gone) -> float:
    return cluster.run_until(
        lambda: cluster.settled() and not any(node in cluster.up for node in gone), within=10.0
    )


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("nodes", [2, 4])
def test_one_that_is_asked_to_go_takes_nobody_along(leads, nodes):
    cluster = started(nodes)
    gone = coordinator(cluster) if leads else others(cluster)[0]
    cluster.report(gone, LEAVE)
    took = settled_without(cluster, gone)
    assert took < TOGETHER_S + 1.5, "no dead-man's time-out"
    assert (gone.stopped.code, gone.stopped.serves) == (91, True)
    assert charged(cluster) == 0
    for node in cluster.up:
        assert node.formed.reason == f"{gone.me.node} left"
        asked = told(node, AskWorkers)
        assert [notice.request for notice in asked] == [Request.GROW], "at a step's end"
        assert not told(node, EpochAborted) or leads
    cluster.run(cluster.now + 120.0)
    assert cluster.settled()


def test_a_pod_of_that_name_may_come_back():
    cluster = started(3)
    gone = others(cluster)[0]
    cluster.report(gone, LEAVE)
    settled_without(cluster, gone)
    cluster.run(cluster.now + 1.0)
    cluster.add(gone.me.node)
    cluster.run_until(cluster.settled, within=5.0)
    assert len(cluster.up) == 3
    assert charged(cluster) == 0


def test_a_spare_that_goes_disturbs_nobody():
    for seed in range(20):  # until the spare is not the one that coordinates
        cluster = Cluster(started(2).settings, seed=seed)
        for i in range(3):
            cluster.add(f"node{i}")
        cluster.run_until(cluster.settled, within=3.0)
        (spare,) = [n for n in cluster.up if n.me not in n.formed.members]
        if not spare.machine.is_coordinator:
            break
    cluster.report(spare, LEAVE)
    cluster.run_until(lambda: spare.stopped is not None, within=TOGETHER_S + 0.5)
    cluster.run(cluster.now + 5.0)
    assert max(cluster.published) == 1
    assert spare.stopped.code == 91


def test_a_spare_takes_the_place_of_a_member_that_goes():
    cluster = Cluster(started(2).settings)
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=3.0)
    cluster.run(cluster.now + 1.0)
    member = next(
        n for n in cluster.up if n.me in n.formed.members and not n.machine.is_coordinator
    )
    cluster.report(member, LEAVE)
    settled_without(cluster, member)
    assert len(cluster.up[0].formed.members) == 2


def test_several_that_go_together_cost_one_epoch():
    cluster = started(6)
    gone = others(cluster)[:3]
    for node in gone:
        cluster.report(node, LEAVE)
        cluster.run(cluster.now + TOGETHER_S / 5)
    settled_without(cluster, *gone)
    assert max(cluster.published) == 2
    assert {node.stopped.code for node in gone} == {91}


def neighbours(cluster: Cluster, *, leads: bool) -> list:
    """Return two nodes of which one keeps the copy of the other."""
    led = [node.machine.is_coordinator for node in cluster.nodes]
    first = led.index(True) if leads else (led.index(True) + 1) % len(led)
    return [cluster.nodes[first], cluster.nodes[(first + 1) % len(led)]]


@pytest.mark.parametrize("leads", [False, True])
def test_neighbours_that_go_together_serve_until_the_others_have_committed(leads):
    cluster = started(4)
    gone = neighbours(cluster, leads=leads)
    for node in gone:
        cluster.report(node, LEAVE)
    settled_without(cluster, *gone)
    assert {m.agent_id for m in cluster.up[0].formed.left} == {n.me.agent_id for n in gone}
    cluster.run(cluster.now + 2.0)
    assert cluster.training.lost == []
    assert [node.serves for node in gone] == [False, False], "freed by the first commit"
    cluster.kill(others(cluster)[0])
    cluster.run_until(cluster.settled, within=5.0)
    assert cluster.up[0].formed.left == (), "nobody asks them any more"


def test_one_that_is_about_to_go_is_asked_when_its_neighbour_dies():
    cluster = started(4)
    going, dies = neighbours(cluster, leads=False)
    cluster.report(going, LEAVE)
    cluster.run(cluster.now + 0.2)
    cluster.kill(dies)
    cluster.run_until(lambda: max(cluster.published) == 2, within=1.0)
    assert [m.agent_id for m in cluster.published[2].left] == [going.me.agent_id]
    cluster.run(cluster.now + 3.0)
    assert cluster.training.lost == []
    assert going.stopped.code == 91


def test_those_that_left_are_asked_again_when_the_next_epoch_ends_before_its_first_commit():
    cluster = started(5)
    gone = neighbours(cluster, leads=False)
    for node in gone:
        cluster.report(node, LEAVE)
    settled_without(cluster, *gone)
    cluster.fail_worker(others(cluster)[0])
    cluster.run_until(lambda: max(cluster.published) == 3, within=5.0)
    cluster.run(cluster.now + 2.0)
    assert {m.agent_id for m in cluster.published[3].left} == {n.me.agent_id for n in gone}
    assert cluster.training.lost == []


def test_an_epoch_that_never_commits_asks_those_that_left_for_so_long_only():
    cluster = started(4)
    cluster.training.commits = False
    gone = neighbours(cluster, leads=False)
    for node in gone:
        cluster.report(node, LEAVE)
    settled_without(cluster, *gone)
    for epoch, left in [(3, 2), (4, 0)]:
        cluster.run(cluster.now + SERVE_S * 0.6)
        cluster.fail_worker(cluster.up[epoch % 2])
        cluster.run_until(lambda epoch=epoch: max(cluster.published) == epoch, within=5.0)
        assert len(cluster.published[epoch].left) == left


def test_neighbours_that_are_excluded_serve_until_the_others_have_committed():
    cluster = started(5)
    gone = neighbours(cluster, leads=False)
    for node in gone:
        cluster.report(node, NodeLeaving(reason="a worker cannot be killed"))
    settled_without(cluster, *gone)
    assert {node.stopped.code for node in gone} == {92}
    assert {m.agent_id for m in cluster.up[0].formed.left} == {n.me.agent_id for n in gone}
    cluster.run(cluster.now + 2.0)
    assert cluster.training.lost == []
    assert [node.serves for node in gone] == [False, False]


def test_a_node_that_is_about_to_go_serves_an_epoch_that_forms_before_it_is_let_go():
    cluster = started(4)
    leaver, lost = neighbours(cluster, leads=False)
    cluster.report(leaver, LEAVE)
    cluster.kill(lost)
    settled_without(cluster, leaver, lost)
    assert [m.agent_id for m in cluster.published[2].left] == [leaver.me.agent_id]
    cluster.run(cluster.now + 2.0)
    assert cluster.training.lost == []


def test_a_node_that_is_let_go_after_an_epoch_without_it_has_committed_serves_nobody():
    cluster = started(4)
    gone = others(cluster)[0]
    cluster.report(gone, LEAVE)
    cluster.fail_worker(gone)
    settled_without(cluster, gone)
    assert max(cluster.published) == 2
    assert (gone.stopped.code, gone.stopped.serves) == (91, False)


@pytest.mark.parametrize("nodes", [1, 3])
def test_when_all_are_asked_the_job_saves_and_ends(nodes):
    cluster = started(nodes)
    for node in cluster.nodes:
        cluster.report(node, LEAVE)
        cluster.run(cluster.now + 0.1)
    cluster.run(cluster.now + 5.0)
    assert {node.stopped.code for node in cluster.nodes} == {91}
    for node in cluster.nodes:
        assert Request.STOP in told(node, AskWorkers)[-1].request
    ended = cluster.board.content[0].ended
    assert ended.code == 91
    assert re.search(r"step \d", ended.reason)
    assert cluster.board.content[0].lease is None


def test_where_too_few_stay_the_state_goes_to_storage_first():
    cluster = started(3, least=3)
    gone = others(cluster)[0]
    cluster.report(gone, LEAVE)
    cluster.run_until(lambda: gone.stopped is not None, within=10.0)
    assert ("membership.parked", {"have": 2, "need": 3}) in [
        event[1:] for event in coordinator(cluster).events
    ]
    for node in cluster.up:
        assert Request.STOP in told(node, AskWorkers)[-1].request
    assert {node.stopped for node in cluster.up} == {None}
    cluster.add(gone.me.node)
    cluster.run_until(cluster.settled, within=5.0)
    assert charged(cluster) == 0


def test_a_step_that_does_not_end_holds_nobody_for_ever():
    cluster = started(3)
    gone = others(cluster)[0]
    for node in cluster.nodes:
        node.working = -1 if node is gone else node.working  # its worker answers nothing
    cluster.report(gone, LEAVE)
    cluster.run(cluster.now + TOGETHER_S + BOUNDARY_S - 1.0)
    assert gone.stopped is None
    settled_without(cluster, gone)
    assert charged(cluster) == 0


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("after_s", [0.2, TOGETHER_S + 0.05])
def test_one_that_dies_on_its_way_out_is_not_charged(leads, after_s):
    cluster = started(4)
    gone = coordinator(cluster) if leads else others(cluster)[0]
    cluster.report(gone, LEAVE)
    cluster.run(cluster.now + after_s)
    cluster.kill(gone)
    settled_without(cluster, gone)
    assert charged(cluster) == 0


def test_one_that_just_dies_is_charged_as_before():
    cluster = started(4)
    cluster.kill(others(cluster)[0])
    cluster.run_until(cluster.settled, within=5.0)
    assert charged(cluster) == 1


def test_the_wish_outlives_the_coordinator_that_heard_it():
    cluster = started(4)
    gone = others(cluster)[-1]
    cluster.report(gone, LEAVE)
    cluster.run(cluster.now + 0.1)
    cluster.kill(coordinator(cluster))
    settled_without(cluster, gone)
    assert gone.stopped.code == 91


@given(
    nodes=st.integers(2, 6),
    script=st.lists(
        st.tuples(st.floats(0.0, 3.0).map(lambda s: round(s, 2)), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=8,
    ),
)
def test_whoever_is_asked_goes_and_the_rest_settle(nodes, script):
    """Wishes and deaths in any order; the simulation checks every swap and every epoch."""
    cluster = started(nodes)
    for pause_s, which, dies in script:
        cluster.run(cluster.now + pause_s)
        up = cluster.up
        if not up:
            break
        node = up[which % len(up)]
        if dies and len(up) > 1:
            cluster.kill(node)
        else:
            cluster.report(node, LEAVE)
            node.notices.append(LEAVE)
    cluster.run(cluster.now + 60.0)
    assert cluster.training.unexcused == []
    for node in cluster.nodes:
        if LEAVE in node.notices:
            assert not node.alive, cluster.describe()
    if cluster.up:
        assert cluster.settled(), cluster.describe()
        assert told(cluster.up[0], EpochFormed)
