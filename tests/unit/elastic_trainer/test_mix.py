"""Turns of a mix: proportions, and where each source's own samples are."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.mix import MAX_PERIOD, Turns, shares_of

SHARES = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(SHARES)
def test_no_source_is_ever_a_sample_ahead_or_behind(shares):
    turns, period = Turns(shares), sum(shares)
    counts, most = [0] * len(shares), 1 - Fraction(1, max(2, 2 * len(shares) - 2))
    for sample in range(2 * period + 3):
        source, own = turns.turn(sample)
        assert own == counts[source] == turns.taken(source, sample)
        counts[source] += 1
        for number, share in zip(counts, shares, strict=True):
            assert abs(number - Fraction(share * (sample + 1), period)) <= most


@given(SHARES, st.integers(0, 10**12), st.integers(1, 300))
def test_samples_in_a_row_take_each_sources_samples_in_a_row(shares, first, number):
    turns = Turns(shares)
    places = [turns.turn(sample) for sample in range(first, first + number)]
    for source in range(len(shares)):
        own = [at for each, at in places if each == source]
        begin, end = (turns.taken(source, at) for at in (first, first + number))
        assert own == list(range(begin, end))


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], (7, 3)),
        ([7, 3], (7, 3)),
        ([1], (1,)),
        ([0.1, 0.2, 0.3], (1, 2, 3)),
        ([2.5, 1e-1], (25, 1)),
        ([1 / 3, 2 / 3], (1, 2)),
        ([0.333333, 0.666667], (21845, 43691)),
        ([1e-9, 1], (1, MAX_PERIOD - 1)),
        ([1e12, 1e12, 1e-12], (32768, 32767, 1)),
    ],
)
def test_weights_become_whole_shares(weights, shares):
    assert shares_of(weights) == shares


@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=40))
def test_shares_are_the_weights_to_one_sample_in_a_period_unless_they_are_tiny(weights):
    shares = shares_of(weights)
    total = sum(map(Fraction, weights))
    assert min(shares) >= 1
    assert sum(shares) <= MAX_PERIOD
    tiny = sum(share == 1 for share in shares)
    for weight, share in zip(weights, shares, strict=True):
        exact = Fraction(weight) / total * sum(shares)
        assert share == 1 or abs(share - exact) < 2 + tiny


def test_the_longest_period_has_each_share():
    shares = (1, 60000, 5000, 535)
    turns = Turns(shares)
    found = [turns.turn(sample)[0] for sample in range(MAX_PERIOD)]
    assert tuple(found.count(source) for source in range(4)) == shares
    assert [each for each, _ in itertools.groupby(found)].count(0) == 1
