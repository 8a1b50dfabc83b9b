"""Bisection of broken and slow nodes: any one, and any two, within the bound of rounds."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.fleet.preflight.collectives import Bisection, confirmed, second_pass


def rounds_over(size, faults):
    """Play the rounds with planted `faults` (index -> broken or slow); return them and verdicts."""
    return play([f"n{i}" for i in range(size)], {f"n{i}": kind for i, kind in faults.items()})


def play(nodes, planted):
    bisection, size = Bisection(nodes=nodes), len(nodes)
    count = 0
    while groups := bisection.next_round():
        count += 1
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
        assert min(map(len, groups)) > 1
        kinds = {group: {planted.get(node) for node in group} for group in groups}
        bisection.tell(
            {
                group: None if "broken" in kind else 10.0 if "slow" in kind else 1.0
                for group, kind in kinds.items()
            }
        )
    assert count <= (math.ceil(math.log2(size)) + 1 if size > 1 else 0)
    return bisection.verdicts()


def named(faults, kind):
    return {f"n{i}" for i, what in faults.items() if what == kind}


def assert_found(size, faults):
    found = rounds_over(size, faults)
    assert found.broken == named(faults, "broken"), faults
    assert found.slow == named(faults, "slow"), faults
    assert not found.suspects, faults


@pytest.mark.parametrize("size", range(3, 13))
def test_every_one_or_two_bad_nodes_of_few_are_found(size):
    for bad in range(3 if size > 3 else 2):
        for indices in itertools.combinations(range(size), bad):
            for kinds in itertools.product(["broken", "slow"], repeat=bad):
                assert_found(size, dict(zip(indices, kinds, strict=True)))


@given(st.data(), st.integers(4, 300))
def test_up_to_two_bad_nodes_are_found_within_the_bound(data, size):
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=2, unique=True))
    assert_found(size, {i: data.draw(st.sampled_from(["broken", "slow"])) for i in indices})


@given(st.integers(2, 20), st.data())
def test_a_healthy_node_is_never_called_broken(size, data):
    faults = dict.fromkeys(data.draw(st.sets(st.integers(0, size - 1))), "broken")
    found = rounds_over(size, faults)
    assert found.broken <= named(faults, "broken") <= found.broken | found.suspects
    assert not found.slow


@pytest.mark.parametrize("size", range(3, 8))
def test_whatever_is_slow_is_so_again_and_only_that(size):
    nodes = [f"n{i}" for i in range(size)]
    for kinds in itertools.product(["healthy", "slow", "broken"], repeat=size):
        planted = dict(zip(nodes, kinds, strict=True))
        if (found := play(nodes, planted)).slow:
            again = second_pass(nodes, found)
            assert confirmed(found, play(again, planted)) == found, planted
            assert confirmed(found, play(again, {})).slow == frozenset()


@pytest.mark.parametrize("size", range(3, 8))
def test_a_node_that_breaks_in_the_second_pass_is_found_and_clears_nobody(size):
    nodes = [f"n{i}" for i in range(size)]
    for slow, broken in itertools.permutations(nodes, 2):
        found = play(nodes, {slow: "slow"})
        again = second_pass(nodes, found)
        if broken in again:
            died = confirmed(found, play(again, {slow: "slow", broken: "broken"}))
            assert broken in died.broken | died.suspects
            assert died.slow == {slow}


@pytest.mark.parametrize("size", [0, 1])
def test_fewer_than_two_nodes_are_not_judged(size):
    assert not rounds_over(size, {}).suspects


def test_two_nodes_that_fail_together_are_both_suspects():
    assert rounds_over(2, {0: "broken"}).suspects == {"n0", "n1"}
