"""Membership and the board: leases, other jobs, partitions, a board that fails; virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from membership_sim import Cluster
from test_membership import coordinator, others, settings, started

from elastic_trainer.agent.membership.coordinator import STRAYS_S
from elastic_trainer.agent.membership.notices import StopAsked, WorkersEnded


def test_a_second_job_is_refused_and_named():
    cluster = started(2)
    intruder = cluster.add("node9", job="other")
    cluster.run(cluster.now + 1.0)
    assert intruder.stopped.code == 93
    assert "job job" in intruder.stopped.reason


def test_a_second_job_is_refused_also_when_it_cannot_reach_the_first():
    cluster = started(2)
    intruder = cluster.add("node9", job="other")
    cluster.partition({"node9"})
    cluster.run(cluster.now + 30.0)
    assert intruder.stopped.code == 93


def test_a_dead_jobs_run_is_taken_over_after_a_while():
    cluster = started(2)
    for node in list(cluster.up):
        cluster.kill(node)
    for i in range(2):
        cluster.add(f"node{i}", job="next")
    took = cluster.run_until(cluster.settled, within=20.0)
    assert took >= cluster.settings.takeover_refused_s


@pytest.mark.parametrize("why", ["its holder is gone", "its holder is silent", "it is down"])
def test_those_who_wait_for_the_lease_leave_the_board_alone(why):
    """At most one read in two seconds each, and never many of them at once."""
    waiting, wait_s, begin_s = 100, 40.0, 12.0
    patient = replace(settings(2), takeover_s=1000.0, takeover_refused_s=1000.0)
    cluster = Cluster(patient)
    first = cluster.add("node0")
    cluster.run_until(lambda: first.machine.is_coordinator, within=5.0)
    cluster.kill(first, silent=why == "its holder is silent")
    if why == "it is down":
        cluster.board.down_until = cluster.now + 2 * wait_s
    for i in range(waiting):
        cluster.add(f"other{i}", job="next")
    begun = cluster.now + begin_s
    cluster.run(begun + wait_s)
    times = [when for when, _ in cluster.board.reads if when >= begun]
    assert len(times) <= 0.5 * waiting * wait_s
    most = max(Counter(int(10 * when) for when in times).values())
    assert most <= waiting / 4, "in a tenth of a second"


def test_a_lease_that_becomes_free_is_taken_in_time_however_long_the_wait():
    cluster = Cluster(replace(settings(2), takeover_refused_s=61.0))
    first = cluster.add("node0")
    cluster.run_until(lambda: first.machine.is_coordinator, within=5.0)
    cluster.kill(first)
    cluster.add("node1", job="next")
    took = cluster.run_until(lambda: any(n.machine.is_coordinator for n in cluster.up), within=70.0)
    assert 61.0 <= took < 61.5


def test_a_board_that_does_not_answer_leaves_the_running_epoch_alone():
    cluster = started(3)
    cluster.board.down_until = cluster.now + 60.0
    cluster.run(cluster.now + 59.0)
    assert cluster.settled()
    assert max(cluster.published) == 1


def test_no_epoch_is_formed_without_the_board():
    cluster = started(3)
    cluster.board.down_until = cluster.now + 30.0
    cluster.kill(others(cluster)[0])
    cluster.run(cluster.now + 29.0)
    assert max(cluster.published) == 1
    cluster.run_until(cluster.settled, within=5.0)


def test_a_minority_cut_off_forms_nothing_that_stands():
    cluster = started(5)
    cut_off = {n.me.node for n in others(cluster)[:2]}
    cluster.partition(cut_off)
    cluster.run(cluster.now + 30.0)
    majority = [n for n in cluster.up if n.me.node not in cut_off]
    newest = max(cluster.published)
    assert {n.formed.epoch for n in majority} == {newest}
    cluster.heal()
    cluster.run_until(cluster.settled, within=60.0)


@pytest.mark.parametrize("earlier_s", [0.0, 0.1, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0])
def test_a_coordinator_cut_off_forms_nothing_is_replaced_and_joins_again(earlier_s):
    cluster = started(5)
    old = coordinator(cluster)
    # It misses the others before they miss it.
    cluster.network.cut |= {(n.me.node, old.me.node) for n in others(cluster)}
    cluster.run(cluster.now + earlier_s)
    cluster.partition({old.me.node})
    cluster.run(cluster.now + 40.0)
    assert old.formed is None or old.formed.epoch == 1
    assert {n.formed.epoch for n in cluster.up if n is not old} == {2}
    cluster.heal()
    cluster.run_until(cluster.settled, within=60.0)


def test_a_checkpoint_commit_between_costs_only_another_try():
    cluster = started(3)
    victim = others(cluster)[0]
    cluster.kill(victim)
    for _ in range(20):
        cluster.run(cluster.now + 0.001)
        cluster.board.commit()
    cluster.run_until(cluster.settled, within=2.0)


def test_a_deposed_coordinator_ends_nobodys_job():
    cluster = started(5)
    old, member = coordinator(cluster), others(cluster)[0]
    cluster.partition({old.me.node, member.me.node})
    cluster.board.cut |= {old.me.node, member.me.node}
    cluster.run(cluster.now + 30.0)
    assert old.machine.is_coordinator
    cluster.report(old, StopAsked(reason="SIGTERM"))
    cluster.run(cluster.now + 1.0)
    cluster.board.cut.clear()
    cluster.run(cluster.now + 2.0)
    assert not old.machine.is_coordinator
    assert old.stopped is None
    assert member.stopped is None
    cluster.heal()
    cluster.run(cluster.now + 30.0)
    assert {n.stopped.code for n in cluster.nodes} == {91}  # by the coordinator that counts


def test_a_board_that_is_down_for_long_does_not_end_a_campaign():
    cluster = started(2)
    cluster.kill(coordinator(cluster), silent=True)
    cluster.board.down_until = cluster.now + 45.0
    cluster.run(cluster.now + 45.0)
    cluster.run_until(cluster.settled, within=20.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_board_that_stalls_while_new_agents_seek_a_dead_coordinator_makes_one_of_them_lead(seed):
    """The winner still waits for answers to what it asked before it won."""
    cluster = Cluster(settings(3), seed=seed)
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=1.0)
    for node in list(cluster.up):
        cluster.kill(node, silent=True)
    for i in range(3, 6):
        cluster.add(f"node{i}")
    cluster.run(cluster.now + 4.0)
    cluster.board.stalled_until = cluster.now + cluster.settings.takeover_s
    waits_s = cluster.settings.takeover_s + STRAYS_S
    cluster.run_until(cluster.settled, within=waits_s + 1.0)


@pytest.mark.parametrize("seed", range(8))
def test_a_lease_won_unheard_is_taken_up(seed):
    cluster = Cluster(settings(3), seed=seed)
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.board.lose_replies = True
    cluster.kill(coordinator(cluster))
    cluster.run(cluster.now + 3.0)
    cluster.board.lose_replies = False
    cluster.run_until(cluster.settled, within=2.0)


def test_a_board_that_was_emptied_is_put_back_and_the_epoch_runs_on():
    cluster = started(3)
    before, _ = cluster.board.content
    cluster.board.empty()
    cluster.run(cluster.now + 2 * cluster.settings.lease_renew_s)
    now, _ = cluster.board.content
    assert (now.epoch, now.lease.holder) == (before.epoch, before.lease.holder)
    assert cluster.settled()
    assert max(cluster.published) == 1
    cluster.board.empty()
    cluster.kill(others(cluster)[0])
    cluster.run_until(lambda: cluster.settled() and max(cluster.published) == 2, within=10.0)


def test_epochs_rise_also_where_the_coordinator_dies_with_the_board():
    cluster = started(2)
    cluster.board.empty()
    cluster.kill(coordinator(cluster))
    cluster.run_until(lambda: cluster.settled() and max(cluster.published) > 1, within=30.0)


def test_the_end_of_a_job_is_put_on_a_board_that_was_emptied():
    cluster = started(2)
    cluster.board.empty()
    cluster.report(coordinator(cluster), StopAsked(reason="SIGTERM", signal="SIGTERM"))
    for node in list(cluster.up):
        cluster.report(node, WorkersEnded(epoch=1, finished=True, step=9, saved=True))
    cluster.run_until(lambda: all(node.stopped for node in cluster.nodes), within=3.0)
    assert cluster.board.content[0].ended.code == 0


@pytest.mark.parametrize("gone", [True, False])
def test_only_a_board_that_is_gone_for_good_ends_a_job_that_needs_an_epoch(gone):
    cluster = started(2)
    cluster.board.gone = gone
    cluster.board.down_until = cluster.now + 60.0
    leads = coordinator(cluster)
    cluster.run(cluster.now + 20.0)
    assert not leads.stopped, "a running epoch needs no board"
    cluster.kill(others(cluster)[0])
    cluster.run(cluster.now + 20.0)
    assert bool(leads.stopped) is gone
    if gone:
        assert leads.stopped.code == 93
        assert "HF523" in leads.stopped.reason
    else:
        cluster.run_until(lambda: cluster.settled() and max(cluster.published) == 2, within=60.0)


def test_a_live_lease_is_not_taken_where_its_address_means_another_machine():
    """Not even when one renewal of it is a little late."""
    cluster = started(2)
    live = coordinator(cluster).me
    cluster.run(cluster.settings.lease_renew_s + 0.1)
    cluster.network.refusing.add(("far", live.node))
    far = cluster.add("far", job="other")
    cluster.run(2 * cluster.settings.lease_renew_s - 0.1)
    cluster.board.cut.add(live.node)
    cluster.run(cluster.now + 1.5)
    cluster.board.cut.clear()
    cluster.run(cluster.now + 20.0)
    assert far.stopped.code == 93
    assert coordinator(cluster).me == live
