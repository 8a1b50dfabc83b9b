"""The schedule of random faults: the seed decides when, who lives decides whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.local.faults import Chaos, ChaosSchedule, FaultAction, parse_chaos
from launcher.spec.errors import UserError

NODES = ["node0", "node1", "node2", "node3"]


@pytest.mark.parametrize(
    ("text", "chaos"),
    [
        ("7,15", Chaos(7, 15.0, None)),
        ("7,15,5", Chaos(7, 15.0, 5.0)),
        (" 0,0.5,2.25 ", Chaos(0, 0.5, 2.25)),
    ],
)
def test_valid_forms(text, chaos):
    assert parse_chaos(text) == chaos


@pytest.mark.parametrize(
    "text", ["", "7", "7,", "7,15,", "a,15", "-1,15", "7,0", "7,15,0", "7,1e3"]
)
def test_mistakes_name_the_form(text):
    with pytest.raises(UserError, match=r"SEED,MEAN_S\[,RETURN_S\]") as caught:
        parse_chaos(text)
    assert caught.value.code == "HF604"


def play(schedule, *, until_s, tick_s):
    """Carry out what a schedule says; return (time, node, kill) in order."""
    alive, done = set(NODES), []
    for tick in range(int(until_s / tick_s)):
        for action, node in schedule.due(tick * tick_s, sorted(alive)):
            kill = action is FaultAction.KILL_NODE
            (alive.remove if kill else alive.add)(node)
            assert alive
            done.append((tick * tick_s, node, kill))
    return done


@given(st.integers(0, 10**6), st.floats(0.5, 30.0), st.floats(0.1, 30.0), st.floats(0.01, 1.0))
def test_kills_and_returns_alternate_and_one_node_always_lives(seed, mean_s, return_s, tick_s):
    chaos = Chaos(seed, mean_s, return_s)
    done = play(ChaosSchedule(chaos, 0.0), until_s=60.0, tick_s=tick_s)
    down = {}
    for t, node, kill in done:
        if kill:
            assert node not in down
            down[node] = t
        else:
            assert t - down.pop(node) >= return_s - 1e-9
    assert done == play(ChaosSchedule(chaos, 0.0), until_s=60.0, tick_s=tick_s)


def test_gaps_have_the_mean_asked_for():
    schedule = ChaosSchedule(Chaos(1, 15.0, 0.001), 0.0)
    kills = [t for t, _, kill in play(schedule, until_s=15000.0, tick_s=0.01) if kill]
    assert 900 < len(kills) < 1100


def test_without_a_return_all_but_one_stay_down():
    done = play(ChaosSchedule(Chaos(1, 1.0), 0.0), until_s=100.0, tick_s=0.1)
    assert len(done) == len(NODES) - 1
    assert all(kill for _, _, kill in done)
