"""Planned changes: the next epoch is prepared while one runs, and nothing is lost if it is not."""

from __future__ import annotations

from membership_sim import WORKERS_PREPARE_S, Cluster
from test_membership import coordinator, others, settings, started

from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    DropPrepared,
    LeaveAsked,
    PrepareEpoch,
    Warned,
)
from elastic_trainer.agent.membership.preparation import AGAIN_S, MOST_FAILED


def preparing(nodes: int, of: int, **kwargs) -> Cluster:
    """Return a cluster of fewer nodes than it can have, which runs."""
    cluster = Cluster(settings(of, prepares=True, join_timeout_s=2.0, **kwargs))
    for i in range(nodes):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=4.0)
    cluster.run(cluster.now + 1.0)
    return cluster


def told(node, kind) -> list:
    return [notice for notice in node.notices if isinstance(notice, kind)]


def settled_after(cluster: Cluster, epoch: int, *, within: float = 10.0) -> None:
    """Run until all are in an epoch later than `epoch`."""
    cluster.run_until(lambda: max(cluster.published) > epoch and cluster.settled(), within=within)


def until(cluster: Cluster, event: str, *, within: float = 10.0) -> float:
    lead = coordinator(cluster)
    return cluster.run_until(lambda: any(e == event for _, e, _ in lead.events), within=within)


def test_a_node_is_taken_in_by_workers_that_were_prepared_while_the_others_trained():
    cluster = preparing(3, 4)
    new = cluster.add("node3")
    until(cluster, "epoch.preparing")
    begun = cluster.now
    until(cluster, "epoch.prepared")
    assert cluster.now - begun >= WORKERS_PREPARE_S
    assert all(node.working == 1 for node in cluster.up if node is not new), "they train on"
    settled_after(cluster, 1)
    assert cluster.taken == 4
    assert max(cluster.published) == 2
    assert cluster.published[2].reason == "growth"


def test_a_job_that_cannot_prepare_asks_its_workers_to_leave_at_once():
    cluster = Cluster(settings(4, join_timeout_s=2.0))
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=4.0)
    cluster.run(cluster.now + 1.0)
    cluster.add("node3")
    settled_after(cluster, 1)
    assert cluster.taken == 0
    assert not told(cluster.up[0], PrepareEpoch)


def test_a_newcomer_that_dies_while_it_prepares_costs_nothing():
    cluster = preparing(3, 4)
    new = cluster.add("node3")
    until(cluster, "epoch.preparing")
    cluster.run(cluster.now + 0.1)
    cluster.kill(new)
    until(cluster, "epoch.unprepared")
    cluster.run(cluster.now + 5.0)
    assert max(cluster.published) == 1
    assert not any(told(node, AskWorkers) for node in cluster.up), "nobody was asked to leave"
    assert all(node.prepared is None for node in cluster.up)


def test_a_member_that_dies_while_the_next_epoch_is_prepared_ends_both():
    cluster = preparing(3, 4)
    cluster.add("node3")
    until(cluster, "epoch.preparing")
    cluster.run(cluster.now + 0.1)
    victim = others(cluster)[0]
    cluster.kill(victim)
    settled_after(cluster, 1)
    assert max(cluster.published) >= 2
    assert cluster.published[2].prepared == 0, "those that were prepared count on the dead one"
    assert len(cluster.published[max(cluster.published)].members) == 3


def test_the_old_epoch_trains_on_when_the_next_does_not_come_up():
    cluster = preparing(3, 4)
    new = cluster.add("node3")
    until(cluster, "epoch.preparing")
    cluster.run(cluster.now + 0.1)
    cluster.fail_prepared(new)
    lead = coordinator(cluster)
    cluster.run_until(lambda: bool(told(lead, Warned)), within=1.0)
    assert "node3" in told(lead, Warned)[0].text
    cluster.run(cluster.now + AGAIN_S - 5.0)
    assert max(cluster.published) == 1, "it trains on"
    assert all(node.working == 1 for node in cluster.up if node is not new)
    settled_after(cluster, 1)
    assert cluster.taken == 4, "tried again"


def test_preparing_takes_no_longer_than_it_may():
    cluster = preparing(3, 4, prepare_s=5.0)
    new = cluster.add("node3")
    until(cluster, "epoch.preparing")
    new.prepared = None
    cluster.pause(new)
    took = until(cluster, "epoch.unprepared", within=20.0)
    assert took <= 6.0
    assert max(cluster.published) == 1


def test_a_node_that_leaves_goes_once_the_others_are_prepared_without_it():
    cluster = started(4, prepares=True)
    leaver = others(cluster)[0]
    cluster.report(leaver, LeaveAsked(reason="drained"))
    until(cluster, "epoch.prepared")
    assert leaver.working == 1, "it trains until then"
    settled_after(cluster, 1)
    assert cluster.taken == 3
    assert leaver.me.node not in {m.node for m in cluster.published[2].members}


def test_a_node_that_leaves_does_not_wait_for_others_that_cannot_be_prepared():
    cluster = started(4, prepares=True, prepare_s=12.0)
    leaver, other, *_ = others(cluster)
    cluster.report(leaver, LeaveAsked(reason="drained"))
    until(cluster, "epoch.preparing")
    cluster.run(cluster.now + 0.1)
    cluster.fail_prepared(other)
    settled_after(cluster, 1, within=3.0)
    assert cluster.taken == 0
    assert max(cluster.published) == 2


def test_a_coordinator_that_leaves_with_others_is_followed_before_their_processes_end():
    cluster = started(4, prepares=True)
    cluster.ending_s = 5.0
    for node in (coordinator(cluster), others(cluster)[0]):
        cluster.report(node, LeaveAsked(reason="drained"))
    until(cluster, "member.left")
    cluster.run_until(lambda: 2 in cluster.published, within=1.0)
    assert len(cluster.published[2].members) == 2


def test_a_node_that_leaves_while_it_is_prepared_for_is_prepared_without():
    cluster = preparing(3, 4)
    cluster.add("node3")
    until(cluster, "epoch.preparing")
    leaver = others(cluster)[0]
    cluster.report(leaver, LeaveAsked(reason="drained"))
    until(cluster, "epoch.unprepared")
    settled_after(cluster, 1)
    assert cluster.taken == 3
    assert {m.node for m in cluster.published[2].members} == {
        node.me.node for node in cluster.up if node is not leaver
    }


def test_workers_whose_prepared_ones_have_died_fail_rather_than_meet_nobody():
    cluster = preparing(3, 4)
    new = cluster.add("node3")
    until(cluster, "epoch.prepared")
    new.prepared, new.waits = None, 0  # killed, and nobody has heard of it
    settled_after(cluster, 2)
    assert cluster.published[2].prepared
    assert not cluster.published[max(cluster.published)].prepared


def test_a_prepare_that_a_broken_connection_lost_is_sent_again():
    cluster = preparing(3, 4)
    new = cluster.add("node3")
    until(cluster, "epoch.preparing")
    cluster.reset(new)
    settled_after(cluster, 1)
    assert cluster.taken == 4
    assert len(told(new, DropPrepared)) == 0


def test_a_node_whose_preparation_fails_again_and_again_is_taken_in_without():
    cluster = preparing(3, 4)
    new = cluster.add("node3")
    lead, begun = coordinator(cluster), cluster.now
    for failed in range(1, MOST_FAILED + 1):
        assert max(cluster.published) == 1, "it trains on"
        waits = AGAIN_S * 2 ** (failed - 1) + 5.0
        cluster.run_until(lambda: new.prepared is not None, within=waits)
        cluster.fail_prepared(new)
        cluster.run_until(lambda: new.prepared is None and bool(told(lead, Warned)), within=1.0)
    settled_after(cluster, 1)
    assert cluster.taken == 0
    assert len(told(lead, Warned)) == MOST_FAILED
    assert cluster.now - begun > AGAIN_S * 3
