from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import AXES, ParallelLayout


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
        assert ladder.rung_for(left) is None


def test_a_rung_is_the_same_after_a_round_trip():
    (rung, _) = make([8, 4]).rungs
    assert Rung.from_dict(json.loads(json.dumps(rung.to_dict()))) == rung


@st.composite
def ladders(draw):
    """Runs of rungs with steps of all kinds, as planners make and as none does."""
    rungs, nodes = [], 5000
    for _ in range(draw(st.integers(1, 6))):
        splits = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]))
        replicate, ep = draw(splits)
        varied, no_sync = draw(st.booleans()), draw(st.booleans())
        layout = ParallelLayout(
            dp=12 * draw(st.integers(50, 90)),
            tp=draw(st.sampled_from([1, 8])),
            pp=draw(st.integers(1, 3)),
            dp_replicate=replicate,
            ep=ep,
            order=draw(st.permutations(AXES).map(tuple)),
        )
        rounds, speed = draw(st.integers(1, 3)), draw(st.none() | st.floats(0.1, 9.0))
        step, dp_step = draw(st.integers(1, 3)), 12 * draw(st.integers(-2, 3))
        for index in range(draw(st.integers(1, 12))):
            if varied:
                replicate, ep = draw(splits)
            dp = layout.dp - index * dp_step
            rungs.append(
                Rung(
                    num_nodes=nodes,
                    layout=replace(layout, dp=dp, dp_replicate=replicate, ep=ep),
                    micro_batches=rounds,
                    tokens_per_s=speed,
                    no_sync=no_sync,
                    memory_gib=draw(st.sampled_from([None, 2.5, 2.6])) if varied else None,
                )
            )
            nodes -= step
        nodes -= draw(st.integers(0, 4))
    return Ladder(tuple(rungs))


@given(ladders())
def test_ranges_are_the_same_ladder(ladder):
    written = json.loads(json.dumps(ladder.to_ranges()))
    assert Ladder.from_ranges(written) == ladder
    assert len(written) <= len(ladder.rungs)


def test_rungs_that_differ_by_equal_steps_are_one_entry():
    rungs = Ladder.data_parallel(max_nodes=2048, min_nodes=1, workers=8)
    first = {"num_nodes": 2048, "layout": "dp16384-pp1-cp1-tp1", "micro_batches": 1}
    steps = {"count": 2048, "nodes_step": 1, "dp_step": 8}
    assert rungs.to_ranges() == [{**first, **steps}]


def test_what_dp_is_split_into_and_memory_may_differ_within_an_entry():
    splits = [(4, 2.5), (3, 2.5), (2, 2.6)]
    rungs = [
        Rung(
            num_nodes=nodes,
            layout=ParallelLayout(dp=12 * nodes, dp_replicate=replicate),
            micro_batches=1,
            memory_gib=gib,
        )
        for nodes, (replicate, gib) in zip((9, 8, 7), splits, strict=True)
    ]
    below = replace(rungs[-1], num_nodes=5, micro_batches=2)
    first, second = Ladder((*rungs, below)).to_ranges()
    assert (first["dp_replicate"], first["memory_gib"]) == ([4, 3, 2], [2.5, 2.5, 2.6])
    assert "memory_gib" not in second
    assert Ladder.from_ranges([first, second]) == Ladder((*rungs, below))


def test_shares_of_the_step_may_differ_within_an_entry():
    for listed in ([(0.5, 0.25), (0.75, 0.125)], [(0.5, 0.25)] * 2):
        rungs = tuple(
            Rung(num_nodes=n, layout=ParallelLayout(dp=n), micro_batches=1, shares=shares)
            for n, shares in zip((2, 1), listed, strict=True)
        )
        (entry,) = Ladder(rungs).to_ranges()
        assert entry["count"] == 2
        assert Ladder.from_ranges(json.loads(json.dumps([entry]))) == Ladder(rungs)


def test_a_list_that_is_not_as_long_as_its_rungs_is_no_ladder():
    (entry,) = Ladder.data_parallel(max_nodes=3, min_nodes=1, workers=8).to_ranges()
    assert Ladder.from_ranges([{**entry, "memory_gib": [1.0, 2.0, 3.0]}])
    with pytest.raises(ValueError):  # noqa: PT011  what all decoders raise
        Ladder.from_ranges([{**entry, "memory_gib": [1.0, 2.0]}])


def test_the_former_form_is_read_too():
    ladder = make([8, 4])
    assert Ladder.from_ranges([rung.to_dict() for rung in ladder.rungs]) == ladder


def test_of_a_script_only_nodes_are_known():
    ladder = Ladder.data_parallel(max_nodes=3, min_nodes=2, workers=4)
    assert [(rung.num_nodes, rung.layout.dp) for rung in ladder.rungs] == [(3, 12), (2, 8)]
    assert all(rung.layout.world_size == rung.layout.dp for rung in ladder.rungs)


def test_ends_of_the_ladder():
    ladder = make([8, 6, 4])
    assert (ladder.max_nodes, ladder.min_nodes) == (8, 4)


@pytest.mark.parametrize("sizes", [[], [4, 4], [4, 6]])
def test_a_ladder_goes_down(sizes):
    with pytest.raises(AssertionError):
        make(sizes)
