"""All schedules of three agents with few delays and faults: safe throughout, settled in the end."""

from __future__ import annotations

import time
import zlib
from collections import deque
from dataclasses import dataclass

import pytest
from membership_explore import World

from elastic_trainer.agent.membership.candidate import Candidate
from elastic_trainer.agent.membership.coordinator import Coordinator
from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.seeker import Seeker
from elastic_trainer.plan.ladder import Ladder

LONGEST_S = 300.0
"""Of virtual time: agents that have not settled by then never will."""
SETTINGS = Settings(
    ladder=Ladder.data_parallel(max_nodes=3, min_nodes=2, workers=1),
    heartbeat_s=2.5,
    dead_after_s=5.0,
    join_timeout_s=20.0,
    prepares=True,
)


@dataclass(frozen=True)
class Explored:
    states: int
    steps: int
    depth: int
    settled: int
    whole: bool
    """All schedules were followed to their ends."""


def explore(start: World, *, seconds: float) -> Explored:
    """Follow all schedules from `start`, breadth first, as far as `seconds` carry."""
    deadline = time.monotonic() + seconds
    met = {start.digest()}
    frontier = deque([(zlib.compress(start.packed(), 1), ())])
    steps = depth = settled = 0
    while frontier and time.monotonic() < deadline:
        raw, path = frontier.popleft()
        raw, depth = zlib.decompress(raw), max(depth, len(path))
        for choice in World.unpacked(raw, SETTINGS).choices():
            world, here = World.unpacked(raw, SETTINGS), (*path, choice)
            try:
                world.choose(choice)
                assert world.now < LONGEST_S, "never settled"
            except AssertionError as error:
                error.add_note(f"after {here}\n{world.describe()}")
                raise
            steps += 1
            digest = world.digest()
            if digest not in met:
                met.add(digest)
                settled += world.settled()
                frontier.append((zlib.compress(world.packed(), 1), here))
    return Explored(len(met), steps, depth, settled, whole=not frontier)


def three_agents(delays: int, faults: int) -> World:
    return World.of(SETTINGS, "abc", delays=delays, faults=faults)


def test_three_agents_settle_however_late_one_event_is(record_property):
    found = explore(three_agents(1, 0), seconds=60.0)
    record_property("explored", str(found))
    assert found.whole
    assert found.settled > 1


def test_an_agent_that_believes_a_lost_swap_is_found_out(monkeypatch):
    def believing(swapped):
        return lambda role, state, token, **_: swapped(role, state, token, won=True)

    for role in (Seeker, Candidate, Coordinator):
        monkeypatch.setattr(role, "board_swapped", believing(role.board_swapped))
    with pytest.raises(AssertionError):
        explore(three_agents(1, 0), seconds=60.0)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("delays", "faults", "seconds", "whole"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 0, 150.0, True),
                (0, 1, 150.0, True),
                (1, 1, 50.0, False),
                (0, 2, 50.0, False),
            )
        ),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in ((1, 1, 300.0, False), (0, 2, 300.0, False))
        ),
    ],
)
def test_three_agents_settle_after_a_few_delays_and_faults(
    delays, faults, seconds, whole, record_property
):
    found = explore(three_agents(delays, faults), seconds=seconds)
    record_property("explored", str(found))
    assert found.whole >= whole
    assert found.settled > 1
