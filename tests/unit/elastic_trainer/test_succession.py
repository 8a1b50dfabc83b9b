"""Who follows a coordinator, and how soon, when many die together. In virtual time."""

from __future__ import annotations

import pytest
from membership_sim import Cluster
from test_membership import started

from elastic_trainer.agent.membership.candidate import Candidate
from elastic_trainer.agent.membership.effects import Context, Settings
from elastic_trainer.agent.membership.messages import Elect
from elastic_trainer.agent.membership.notices import Member
from elastic_trainer.agent.membership.table import Members
from elastic_trainer.plan.ladder import Ladder


def line(cluster: Cluster) -> list:
    """The nodes in the order of succession, the coordinator first."""
    lead = next(n for n in cluster.up if n.machine.is_coordinator)
    ids = [m.agent_id for m in lead.machine.ctx.everyone]
    rest = sorted((n for n in cluster.up if n is not lead), key=lambda n: ids.index(n.me.agent_id))
    return [lead, *rest]


@pytest.mark.parametrize("dead", [2, 17, 32])
def test_a_dead_rack_at_the_front_is_succeeded_within_a_second(dead):
    cluster = started(80)
    for node in line(cluster)[:dead]:
        cluster.kill(node)
    took = cluster.run_until(cluster.settled, within=20.0)
    assert took < 1.0, took


@pytest.mark.parametrize("dead", [2, 17])
def test_a_rack_without_power_is_succeeded_within_a_second_of_being_missed(dead):
    cluster = started(64)
    front = line(cluster)[:dead]
    for node in front:
        cluster.kill(node, silent=True)

    def leads() -> bool:
        return any(n.machine.is_coordinator for n in cluster.up)

    missed = cluster.run_until(
        lambda: any(e == "member.lost" for n in cluster.up for _, e, _ in n.events), within=20.0
    )
    assert missed < cluster.settings.dead_after_s + 2 * cluster.settings.heartbeat_s
    assert cluster.run_until(leads, within=20.0) < cluster.settings.heartbeat_s + 1.5
    cluster.run_until(cluster.settled, within=20.0)


def test_a_live_successor_that_has_not_noticed_is_waited_for():
    cluster = started(6)
    lead, first, second, *_ = line(cluster)
    cluster.kill(lead)
    cluster.run_until(cluster.settled, within=2.0)
    assert first.machine.is_coordinator
    assert not second.machine.is_coordinator


def test_slow_hosts_leave_time_for_the_campaign_that_is_under_way():
    """Else those next in line begin theirs, which takes the time of all, and so on without end."""
    cluster = started(128, dial_timeout_s=10.0, stagger_s=5.0)
    epoch = max(cluster.published)
    cluster.slow_s = 0.016
    cluster.kill(line(cluster)[0])
    took = cluster.run_until(lambda: max(cluster.published) > epoch, within=200.0)
    assert took < 100.0, took


MEMBERS = [
    Member(agent_id=name, node=name, host=name, address="10.0.0.1", port=port, workers=1)
    for port, name in enumerate("abcd", 1)
]


def third_in_line() -> tuple[Candidate, Context]:
    """Return `c` once it has lost `a` and has heard of the campaign of `b`, on connection 1."""
    settings = Settings(ladder=Ladder.data_parallel(max_nodes=4, min_nodes=1, workers=1))
    ctx = Context(me=MEMBERS[2], job="j", settings=settings, random=lambda: 0.5, term=1)
    ctx.everyone, ctx.coordinator = Members.of(MEMBERS), "a"
    made = Candidate(ctx, sure=False)
    made.start()
    made.received(1, Elect(candidate="b", job="j", term=1))
    return made, ctx


def test_a_candidate_that_is_gone_is_followed_after_one_delay():
    made, ctx = third_in_line()
    waits = ctx.timers["campaign"]
    made.closed(1, refused=False)
    assert ctx.timers["campaign"] == ctx.settings.stagger_s < waits


def test_the_end_of_another_cuts_no_campaign_short():
    made, ctx = third_in_line()
    ctx.now = ctx.timers["campaign"]
    made.timer("campaign")
    patience = ctx.timers["campaign"]
    ctx.now += 0.1
    made.closed(1, refused=False)
    assert ctx.timers["campaign"] == patience
