"""Bisection of broken and slow nodes: any one, and any two, within the bound of rounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.ops.preflight.bisection import Bisection


def rounds_over(size, faults):
    """Play the rounds with planted `faults` (index -> broken or slow); return them and verdicts."""
    bisection = Bisection(nodes=[f"n{i}" for i in range(size)])
    planted = {f"n{i}": kind for i, kind in faults.items()}
    count = 0
    while groups := bisection.next_round():
        count += 1
        assert count < 50
        members = [node for group in groups for node in group]
        assert len(members) == len(set(members))
        kinds = {group: {planted.get(node) for node in group} for group in groups}
        bisection.tell(
            {
                group: None if "broken" in kind else 10.0 if "slow" in kind else 1.0
                for group, kind in kinds.items()
            }
        )
    return count, bisection.verdicts()


def named(faults, kind):
    return {f"n{i}" for i, what in faults.items() if what == kind}


@given(st.data(), st.integers(7, 300), st.integers(0, 2))
def test_up_to_two_bad_nodes_are_found_within_the_bound(data, size, bad):
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=bad, max_size=bad, unique=True))
    faults = {i: data.draw(st.sampled_from(["broken", "slow"])) for i in indices}
    count, found = rounds_over(size, faults)
    assert count <= math.log2(size) + 1
    assert found.broken == named(faults, "broken")
    assert found.slow == named(faults, "slow")
    assert not found.suspects
    assert found.together


@given(st.integers(3, 300), st.data())
def test_one_broken_node_is_found_among_three_or_more(size, data):
    at = data.draw(st.integers(0, size - 1))
    count, found = rounds_over(size, {at: "broken"})
    assert count <= math.ceil(math.log2(size)) + 1
    assert (found.broken, found.suspects) == ({f"n{at}"}, set())


@given(st.integers(2, 12), st.data())
def test_a_healthy_node_is_never_called_broken(size, data):
    bad = data.draw(st.sets(st.integers(0, size - 1)))
    faults = dict.fromkeys(bad, "broken")
    _, found = rounds_over(size, faults)
    assert found.broken <= named(faults, "broken") <= found.broken | found.suspects


def test_two_slow_nodes_of_three_pairs_are_found():
    assert rounds_over(7, {0: "slow", 3: "slow"})[1].slow == {"n0", "n3"}


@pytest.mark.parametrize("size", [0, 1])
def test_fewer_than_two_nodes_have_no_round(size):
    assert rounds_over(size, {})[0] == 0


def test_two_nodes_that_fail_together_are_both_suspects():
    assert rounds_over(2, {0: "broken"})[1].suspects == {"n0", "n1"}
