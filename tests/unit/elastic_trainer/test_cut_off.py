"""Members that are cut off from the board and from the spares: two epochs do not train for long."""

from __future__ import annotations

import pytest
from membership_sim import Cluster
from test_membership import settings

from elastic_trainer.agent.membership.effects import FENCE_RENEWALS
from elastic_trainer.agent.membership.notices import EpochAborted

RUNG = 2


def with_spares(*, leads_a_member: bool) -> tuple[Cluster, list, list]:
    """Return a cluster, its members, and as many spares."""
    for seed in range(40):
        cluster = Cluster(settings(RUNG, least=RUNG), seed=seed)
        for i in range(2 * RUNG):
            cluster.add(f"node{i}")
        cluster.run(9.0)
        if not cluster.settled():
            continue  # one came too late to be among the spares of the first epoch
        members = [n for n in cluster.up if n.me in n.formed.members]
        spares = [n for n in cluster.up if n not in members]
        if any(n.machine.is_coordinator for n in members) is leads_a_member:
            return cluster, members, spares
    raise AssertionError("no such seed")


@pytest.mark.parametrize("leads_a_member", [True, False])
def test_the_workers_that_were_cut_off_end_within_the_bound(leads_a_member):
    cluster, members, spares = with_spares(leads_a_member=leads_a_member)
    config = cluster.settings
    cut = cluster.now
    cluster.partition({n.me.node for n in members})
    cluster.board.cut |= {n.me.node for n in members}
    cluster.run_until(lambda: all(n.working for n in spares), within=60.0)
    begun = cluster.now
    cluster.run_until(lambda: not any(n.working for n in members), within=60.0)
    bound = config.dead_after_s + FENCE_RENEWALS * config.lease_renew_s + config.lease_renew_s
    assert cluster.now - cut <= bound
    assert cluster.now - begun <= FENCE_RENEWALS * config.lease_renew_s
    newest = max(cluster.published)
    cluster.run(cluster.now + 60.0)
    assert {n.working for n in spares} == {newest}
    assert not any(n.working for n in members)
    cluster.heal()
    cluster.run(cluster.now + 30.0)
    (leader,) = [n for n in cluster.up if n.machine.is_coordinator]
    assert len(leader.machine.role.peers) == 2 * RUNG, "they come back as spares"
    assert max(cluster.published) == newest


def test_who_leads_still_once_the_board_is_back_continues():
    cluster, members, spares = with_spares(leads_a_member=True)
    cluster.board.stalled_until = cluster.now + 60.0
    cluster.kill(spares[0], silent=True)
    cluster.run(cluster.now + 30.0)
    assert not any(n.working for n in members)
    cluster.run_until(cluster.settled, within=40.0)
    assert {n.working for n in members} == {2}


def test_a_board_that_stalls_alone_ends_no_epoch():
    cluster, members, _ = with_spares(leads_a_member=True)
    cluster.board.stalled_until = cluster.now + 300.0
    cluster.run(cluster.now + 290.0)
    assert {n.working for n in members} == {1}


def test_nor_does_a_spare_that_is_known_to_be_dead_meanwhile():
    cluster, members, spares = with_spares(leads_a_member=True)
    cluster.board.stalled_until = cluster.now + 300.0
    cluster.kill(spares[0])
    cluster.run(cluster.now + 290.0)
    assert {n.working for n in members} == {1}


def test_nor_does_a_spare_that_is_cut_off_while_the_board_answers():
    cluster, members, spares = with_spares(leads_a_member=True)
    cluster.partition({spares[0].me.node})
    cluster.board.cut.add(spares[0].me.node)
    cluster.run(cluster.now + 120.0)
    assert {n.working for n in members} == {1}
    for node in members:
        assert not [one for one in node.notices if isinstance(one, EpochAborted)]
