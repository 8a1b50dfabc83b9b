from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.ladder import Ladder, Rung, TooFewNodes
from elastic_trainer.layout import ParallelLayout


def make(sizes):
    return Ladder(
        tuple(
            Rung(num_nodes=size, layout=ParallelLayout(dp=size), micro_batches=1) for size in sizes
        )
    )


sizes = st.sets(st.integers(1, 60), min_size=1).map(lambda s: sorted(s, reverse=True))


@given(sizes, st.integers(0, 80))
def test_rung_for_is_the_largest_rung_that_fits(sizes, left):
    ladder = make(sizes)
    fitting = [size for size in sizes if size <= left]
    if fitting:
        assert ladder.rung_for(left).num_nodes == max(fitting)
        assert ladder.rung_for(left) == make(sizes).rung_for(left)
    else:
        with pytest.raises(TooFewNodes):
            ladder.rung_for(left)


def test_too_few_nodes_says_what_is_missing():
    with pytest.raises(TooFewNodes, match="3 nodes left, the last rung needs 4: waiting"):
        make([8, 4]).rung_for(3)


def test_ends_of_the_ladder():
    ladder = make([8, 6, 4])
    assert (ladder.max_nodes, ladder.min_nodes) == (8, 4)


@pytest.mark.parametrize("sizes", [[], [4, 4], [4, 6]])
def test_a_ladder_goes_down(sizes):
    with pytest.raises(AssertionError):
        make(sizes)
