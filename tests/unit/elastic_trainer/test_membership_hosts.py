"""Pods that come and go on machines, in virtual time: excluded is the machine, not a name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_sim import Cluster
from test_membership import coordinator, others, settings
from test_membership_failures import epochs, events, next_epoch

from elastic_trainer.agent.membership.notices import NodeLeaving, WorkersReady
from elastic_trainer.record.failures import Kind


def pods(count: int, *, least: int = 1, **kwargs) -> Cluster:
    """Pods p0, p1, … on the machines m0, m1, …, all in the first epoch."""
    cluster = Cluster(settings(count, least=least, **kwargs))
    for i in range(count):
        cluster.add(f"p{i}", host=f"m{i}")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 1.0)
    return cluster


def exclude(cluster: Cluster, node) -> str:
    """Have the node's workers die until its machine is excluded; return the machine."""
    for _ in range(2):
        cluster.fail_worker(node)
        cluster.run(cluster.now + 3.0)
    assert node.stopped is not None, cluster.describe()
    assert node.stopped.code == 92
    assert node.me.host in node.stopped.reason
    return node.me.host


def test_a_pod_under_another_name_does_not_come_back_on_a_machine_that_was_excluded():
    cluster = pods(4)
    bad = others(cluster)[0]
    host = exclude(cluster, bad)
    (evicted,) = events(cluster, "member.evicted")
    assert (evicted["member"], evicted["host"]) == (bad.me.node, host)
    before = epochs(cluster)
    again = cluster.add("p-again", host=host)
    cluster.run(cluster.now + 5.0)
    assert (again.stopped.code, host in again.stopped.reason) == (92, True)
    refused = events(cluster, "member.refused")[-1]
    assert (refused["member"], refused["host"]) == ("p-again", host)
    assert epochs(cluster) == before, "it is no capacity for growth"


@pytest.mark.parametrize("name", ["the same", "p-new"])
def test_a_pod_on_another_machine_is_welcome_at_once(name):
    cluster = pods(4)
    bad = others(cluster)[0]
    exclude(cluster, bad)
    fresh = cluster.add(bad.me.node if name == "the same" else name, host="m9")
    assert next_epoch(cluster, 2.0) < 1.0
    assert fresh.me in cluster.up[0].formed.members
    assert events(cluster, "member.readmitted") == []
    cluster.run(cluster.now + 1.0)
    cluster.fail_worker(fresh)
    next_epoch(cluster, 2.0)
    assert fresh in cluster.up, "it begins with no failures"


def test_failures_of_pods_with_other_names_add_up_on_their_machine():
    cluster = pods(4)
    first = others(cluster)[0]
    cluster.fail_worker(first)
    next_epoch(cluster, 2.0)
    cluster.run(cluster.now + 1.0)
    cluster.kill(first)
    cluster.run(cluster.now + 2.0)
    second = cluster.add("p-second", host=first.me.host)
    next_epoch(cluster, 2.0)
    cluster.run(cluster.now + 1.0)
    cluster.fail_worker(second)
    cluster.run(cluster.now + 2.0)
    assert second.stopped.code == 92
    assert " 2 " in second.stopped.reason


def test_what_was_excluded_outlives_the_coordinator():
    cluster = pods(5)
    host = exclude(cluster, others(cluster)[0])
    cluster.kill(coordinator(cluster))
    cluster.run_until(cluster.settled, within=5.0)
    again = cluster.add("p-again", host=host)
    cluster.run(cluster.now + 2.0)
    assert again.stopped.code == 92


def test_the_machine_of_the_coordinator_is_given_up_and_another_agent_leads():
    cluster = pods(4)
    first = coordinator(cluster)
    host = exclude(cluster, first)
    cluster.run_until(cluster.settled, within=5.0)
    leader = coordinator(cluster)
    assert leader is not first
    assert {m.node for m in leader.formed.members} == {n.me.node for n in cluster.up}
    assert leader.machine.ctx.excluded.keys() == {host}
    entries = leader.machine.ctx.history.entries
    assert {entry.host for _, entry in entries} == {host}, "that it went is nobody's failure"
    again = cluster.add(first.me.node, host=host)
    cluster.run(cluster.now + 2.0)
    assert again.stopped.code == 92
    fresh = cluster.add(first.me.node, host="m9")
    cluster.run_until(cluster.settled, within=5.0)
    assert fresh.me in cluster.up[0].formed.members


def test_pods_that_share_a_machine_leave_it_together():
    cluster = Cluster(settings(4))
    for i in range(4):
        cluster.add(f"p{i}", host=f"m{i // 2}")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 1.0)
    leader = coordinator(cluster)
    there = [n for n in cluster.up if n.me.host != leader.me.host]
    cluster.fail_worker(there[0], Kind.NODE_FAULT, "Xid 79")
    cluster.run_until(cluster.settled, within=5.0)
    assert {n.stopped.code for n in there} == {92}
    assert len(cluster.up[0].formed.members) == 2
    (evicted,) = events(cluster, "member.evicted")
    assert evicted["member"] == there[0].me.node


def test_nothing_tells_the_only_machine_from_the_program():
    cluster = Cluster(settings(3, max_restarts=5))
    for i in range(3):
        cluster.add(f"p{i}", host="m0")
    cluster.run_until(cluster.settled, within=1.0)
    for _ in range(4):
        cluster.run(cluster.now + 1.0)
        cluster.fail_worker(others(cluster)[0])
        next_epoch(cluster, 2.0)
    assert events(cluster, "member.evicted") == []
    assert len(cluster.up) == 3


# --- too few are left ------------------------------------------------------------------


def test_a_parked_job_of_pods_waits_for_one_on_another_machine():
    cluster = pods(3, least=3, join_timeout_s=30.0)
    bad = others(cluster)[0]
    exclude(cluster, bad)
    assert cluster.parked()
    cluster.run(cluster.now + 300.0)
    assert cluster.parked(), "nobody was refused: perhaps no machine is free"
    cluster.add("p-new", host="m9")
    cluster.run_until(cluster.settled, within=2.0)
    assert len(cluster.up[0].formed.members) == 3


def test_pods_that_find_no_other_machine_end_the_job_in_the_end():
    cluster = pods(3, least=3, join_timeout_s=30.0)
    host = exclude(cluster, others(cluster)[0])
    for i in range(3):
        cluster.add(f"again{i}", host=host)
        cluster.run(cluster.now + 5.0)
    assert cluster.parked()
    cluster.run(cluster.now + 30.0)
    assert cluster.parked()
    cluster.add("last", host=host)
    cluster.run(cluster.now + 2.0)
    assert {n.stopped.code for n in cluster.nodes} == {92}
    assert host in cluster.board.content[0].ended.reason


def test_nodes_that_are_machines_do_not_come_back_so_nobody_waits():
    cluster = Cluster(settings(3, least=3))
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 1.0)
    cluster.report(others(cluster)[0], NodeLeaving(reason="a failed check"))
    cluster.run(cluster.now + 2.0)
    assert {n.stopped.code for n in cluster.nodes} == {92}


# --- anything in any order -------------------------------------------------------------

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fail", "fault", "kill", "come", "come", "leave"]),
        st.integers(0, 9),
        st.integers(0, 5),
        st.sampled_from([0.05, 0.7, 3.0]),
    ),
    max_size=14,
)


@given(STEPS, st.integers(0, 9))
def test_no_agent_ever_works_on_a_machine_after_it_was_excluded(steps, seed):
    """Pods fail, die and come under old and new names on few machines; the simulation checks
    every epoch that is published, this test what came of it."""
    cluster = Cluster(settings(4, max_restarts=1000, no_progress=1000, max_crashes=1000), seed=seed)
    for i in range(4):
        cluster.add(f"p{i}", host=f"m{i}")
    cluster.run_until(cluster.settled, within=2.0)
    for what, which, where, pause_s in steps:
        up = cluster.up
        if not up:
            return
        node = up[which % len(up)]
        if what == "fail":
            cluster.fail_worker(node)
        elif what == "fault":
            cluster.fail_worker(node, Kind.NODE_FAULT, "Xid 79")
        elif what == "leave":
            cluster.report(node, NodeLeaving(reason="a failed check"))
        elif what == "kill" and len(up) > 1:
            cluster.kill(node)
        elif what == "come" and all(n.me.node != f"p{which}" for n in up):
            cluster.report(cluster.add(f"p{which}", host=f"m{where}"), WorkersReady())
        cluster.run(cluster.now + pause_s)
    cluster.run(cluster.now + 90.0)  # also for an agent that is left alone, and gathers anew
    leaders = [n for n in cluster.up if n.machine.is_coordinator]
    for leader in leaders:
        excluded = leader.machine.ctx.excluded
        working = {n.me.agent_id: n.me.host for n in cluster.up if n.working is not None}
        assert not set(working.values()) & excluded.keys(), cluster.describe()
        assert all(n.me.host not in excluded for n in cluster.up if n is not leader)
        rung = cluster.settings.ladder.rung_for(len(cluster.able()))
        size = rung.num_nodes if rung else 0
        newest = set(cluster.published[max(cluster.published)].members.ids) if size else set()
        assert (working.keys(), len(newest)) == (newest, size), cluster.describe()
