"""Machines that come and go, in virtual time: what they cost the others, and when they are out."""

from __future__ import annotations

import pytest
from membership_sim import Cluster
from test_membership import coordinator, others, settings, started

from elastic_trainer.agent.membership.attribution import (
    LONGEST_QUARANTINE_S,
    QUARANTINE_S,
    Attribution,
    History,
)
from elastic_trainer.agent.membership.coordinator import GROW_SETTLE_S, GROW_WAIT_S
from elastic_trainer.record.failures import Action, Kind

FIFTY_MINUTES = 100


def flap(cluster: Cluster, node, *, dies: bool):
    """Have a node be away for 10 s and there for 20 s; return who it is now."""
    if dies:
        cluster.kill(node)
        cluster.run(cluster.now + 10.0)
        node = cluster.add(node.me.node)
    else:
        cluster.partition({node.me.node})
        cluster.run(cluster.now + 10.0)
        cluster.network.heal()
    cluster.run(cluster.now + 20.0)
    return node


@pytest.mark.process
@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("leads", [True, False])
def test_one_flapping_node_costs_the_others_a_few_epochs_and_never_the_job(leads, dies):
    cluster = started(8)
    node = coordinator(cluster) if leads else others(cluster)[0]
    name = node.me.node
    for _ in range(FIFTY_MINUTES):
        node = flap(cluster, node, dies=dies)
    assert len(cluster.up) == 8, cluster.describe()
    assert max(cluster.published) <= 8, "1 at first, 2 for each of the losses before it is out"
    assert {n.formed.epoch for n in cluster.up if n.me.node != name} == {max(cluster.published)}
    history = coordinator(cluster).machine.ctx.history
    assert {entry.host for _, entry in history.entries} == {name}
    ended = [e for n in cluster.nodes for e in n.events if e[1] == "job.stopped"]
    assert ended == []

    # Once it stays, it is in again, without anybody's help.
    cluster.run(cluster.now + LONGEST_QUARANTINE_S + GROW_WAIT_S)
    assert cluster.settled(), cluster.describe()
    assert len(cluster.up[0].formed.members) == 8


def test_the_operator_lets_a_machine_in_at_once():
    cluster = started(4)
    for _ in range(3):
        node = next(n for n in cluster.up if n.me.node == "node2")
        node = flap(cluster, node, dies=True)
    assert len(cluster.up[0].formed.members) == 3
    quarantined = [e for n in cluster.up for e in n.events if e[1] == "member.quarantined"]
    assert quarantined[-1][2]["member"] == "node2"
    cluster.kill(node)
    cluster.run(cluster.now + 5.0)
    cluster.add("node2", readmit=True)
    cluster.run_until(lambda: len(cluster.up[0].formed.members) == 4, within=10.0)


def test_a_job_that_cannot_do_without_it_waits_for_its_quarantine_to_end():
    cluster = started(2, least=2, join_timeout_s=600.0)
    node = others(cluster)[0]
    for _ in range(2):
        node = flap(cluster, node, dies=True)
    assert cluster.parked()
    cluster.run_until(cluster.settled, within=QUARANTINE_S)


def test_nodes_that_come_back_one_by_one_cost_one_epoch():
    cluster = started(8)
    gone = others(cluster)[:5]
    for node in gone:
        cluster.kill(node)
    cluster.run_until(cluster.settled, within=5.0)
    before = max(cluster.published)
    for node in gone[:4]:
        cluster.add(node.me.node)
        cluster.run(cluster.now + GROW_SETTLE_S * 0.8)
    cluster.run_until(cluster.settled, within=GROW_SETTLE_S + 2.0)
    assert max(cluster.published) == before + 1
    cluster.add(gone[4].me.node)
    assert cluster.run_until(cluster.settled, within=5.0) < GROW_SETTLE_S, "nobody else can come"


def test_growth_waits_for_one_that_warms_up_but_not_for_long():
    cluster = Cluster(settings(4))
    for i in range(4):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=1.0)
    gone = others(cluster)[:2]
    for node in gone:
        cluster.kill(node)
    cluster.run_until(lambda: max(cluster.published) == 2, within=5.0)
    cluster.run(cluster.now + 1.0)
    cluster.add(gone[0].me.node)
    cluster.add(gone[1].me.node, ready=False)
    took = cluster.run_until(lambda: max(cluster.published) == 3, within=GROW_WAIT_S + 2.0)
    assert took >= GROW_WAIT_S - 1.0


def lost(*moments: tuple[float, str]) -> History:
    history = History()
    for when, host in moments:
        found = Attribution(host, Kind.NODE_LOST, Action.RESTART, "node lost", 0, host)
        history = history.add(found, when, 0)
    return history


@pytest.mark.parametrize(
    ("times", "out_s"),
    [(1, 0.0), (2, 60.0), (3, 120.0), (4, 240.0), (7, 1920.0), (8, 3600.0), (30, 3600.0)],
)
def test_each_loss_keeps_a_machine_out_for_longer(times, out_s):
    history = lost(*((float(t), "a") for t in range(times)), (50.0, "b"))
    last = times - 1.0
    assert history.quarantined(last) == ({"a": last + out_s} if out_s else {})
    assert history.quarantined(last + out_s) == {}


def test_machines_that_are_lost_at_one_moment_are_not_kept_out():
    history = lost(*((t, host) for t in (1.0, 2.0, 3.0) for host in "ab"))
    assert history.quarantined(3.0) == {}
