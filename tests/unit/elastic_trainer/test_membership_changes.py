"""An epoch by what has changed: who holds the last one is sent the difference, others all of it."""

from __future__ import annotations

import membership_sim
import pytest
from membership_sim import Cluster

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.messages import Changed, Formed, encode
from elastic_trainer.agent.membership.table import NOBODY
from elastic_trainer.plan.ladder import Ladder

NODES = 6


@pytest.fixture
def encoded(monkeypatch):
    """The epochs that were encoded, in order."""
    seen: list[Formed | Changed] = []

    def spy(message):
        if isinstance(message, Formed | Changed):
            seen.append(message)
        return encode(message)

    monkeypatch.setattr(membership_sim, "encode", spy)
    return seen


def running() -> Cluster:
    ladder = Ladder.data_parallel(max_nodes=NODES, min_nodes=2, workers=1)
    world = Cluster(Settings(ladder=ladder))
    for i in range(NODES):
        world.add(f"n{i}")
    world.run_until(world.settled, 20.0)
    return world


def follower(world):
    return next(n for n in world.up if not n.machine.is_coordinator)


def test_newcomers_are_sent_all_of_the_first_epoch(encoded):
    running()
    assert [type(message) for message in encoded] == [Formed]


def test_a_death_is_sent_to_all_in_one_difference(encoded):
    world = running()
    victim = follower(world)
    world.kill(victim)
    world.run_until(world.settled, 20.0)
    _, change = encoded
    assert isinstance(change, Changed)
    assert change.rows == NOBODY
    assert len(change.members) in (2, 4)  # one run of rows or two
    assert victim.me.agent_id not in world.up[0].machine.ctx.everyone.ids


def test_a_newcomer_is_sent_all_and_the_others_what_it_is(encoded):
    world = running()
    world.kill(follower(world))
    world.run_until(world.settled, 20.0)
    new = world.add("n9")
    world.run_until(world.settled, 120.0)
    *_, change, whole = encoded
    assert isinstance(change, Changed)
    assert isinstance(whole, Formed)
    assert list(change.rows) == [new.me]


def test_a_new_coordinator_knows_who_holds_what_it_holds(encoded):
    world = running()
    world.kill(next(n for n in world.up if n.machine.is_coordinator))
    world.run_until(world.settled, 60.0)
    assert isinstance(encoded[1], Changed)


def test_an_agent_without_the_last_epoch_says_so_when_it_joins(encoded):
    world = running()
    late = follower(world)
    late.machine.ctx.everyone = NOBODY
    world.reset(late)
    world.run(world.now + 1.0)
    world.kill(next(n for n in world.up if n is not late and not n.machine.is_coordinator))
    world.run_until(world.settled, 20.0)
    assert [type(message) for message in encoded] == [Formed, Changed, Formed]


def test_a_change_of_what_an_agent_does_not_hold_ends_its_connection(encoded):
    """It joins anew, and is sent all of the next epoch."""
    world = running()
    late = follower(world)
    late.machine.ctx.everyone = late.machine.ctx.everyone[1:]  # the coordinator does not know
    world.kill(next(n for n in world.up if n is not late and not n.machine.is_coordinator))
    world.run_until(lambda: len(world.published) > 1, 20.0)
    assert late.machine.ctx.epoch == 1
    world.run_until(lambda: world.settled() and late.machine.ctx.epoch == 3, 20.0)
    assert [type(message) for message in encoded] == [Formed, Changed, Changed, Formed]
    assert late.formed == world.published[3]
