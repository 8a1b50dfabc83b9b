from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.layout import (
    AXES,
    ParallelLayout,
    micro_batches_per_rank,
    split_layers,
    stages_of_rank,
)
from elastic_trainer.plan.models import PRESETS, ModelShape

degrees = st.integers(1, 5)


@st.composite
def layouts(draw):
    replicate, ep = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    return ParallelLayout(
        dp=draw(degrees) * replicate * ep,
        tp=draw(degrees),
        pp=draw(degrees),
        cp=draw(degrees),
        dp_replicate=replicate,
        ep=ep,
        order=tuple(draw(st.permutations(AXES))),
    )


@given(layouts())
def test_rank_and_coordinate_are_inverse_and_cover_every_rank_once(layout):
    seen = set()
    for rank in range(layout.world_size):
        coordinate = layout.coordinate(rank)
        assert layout.rank(coordinate) == rank
        seen.add(tuple(sorted(coordinate.items())))
    assert len(seen) == layout.world_size


@given(layouts())
def test_neighbours_along_the_innermost_axis_have_consecutive_ranks(layout):
    inner = layout.order[0]
    for rank in range(0, layout.world_size, getattr(layout, inner)):
        group = layout.ranks_along(inner, rank)
        assert group == list(range(rank, rank + getattr(layout, inner)))


@given(layouts(), st.sampled_from(AXES))
def test_groups_along_an_axis_partition_the_world(layout, axis):
    groups = {tuple(layout.ranks_along(axis, rank)) for rank in range(layout.world_size)}
    assert sorted(itertools.chain(*groups)) == list(range(layout.world_size))
    assert {len(group) for group in groups} == {getattr(layout, axis)}


@given(layouts())
def test_text_and_dict_forms_round_trip(layout):
    assert ParallelLayout.parse(str(layout)) == layout
    assert ParallelLayout.from_dict(layout.to_dict()) == layout


def test_text_form_is_outermost_first():
    assert str(ParallelLayout(dp=8, pp=16, cp=16, tp=8)) == "dp8-pp16-cp16-tp8"
    assert str(ParallelLayout(dp=4, dp_replicate=2)) == "dp4-pp1-cp1-tp1-hsdp2"
    assert str(ParallelLayout(dp=4, dp_replicate=2, ep=2)) == "dp4-pp1-cp1-tp1-hsdp2-ep2"


@pytest.mark.parametrize("text", ["", "dp8", "dp8-pp1-cp1-tp0", "dp8-pp1-cp1-tp1-dp2", "x", "dp8 "])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        ParallelLayout.parse(text)


def test_hsdp_shards_within_a_replica():
    assert ParallelLayout(dp=8, dp_replicate=2).dp_shard == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"dp": 3, "dp_replicate": 2},
        {"dp": 4, "dp_replicate": 2, "ep": 4},
        {"tp": 0},
        {"order": ("tp", "tp", "pp", "dp")},
    ],
)
def test_impossible_layouts_are_asserted(wrong):
    with pytest.raises(AssertionError):
        ParallelLayout(**wrong)


@given(st.integers(1, 1000), st.integers(1, 100))
def test_every_rank_runs_enough_micro_batches_and_not_one_more(num, dp):
    rounds = micro_batches_per_rank(num, dp)
    assert (rounds - 1) * dp < num <= rounds * dp


def test_people_read_no_axes_of_size_one():
    assert ParallelLayout(dp=4, tp=2).label == "dp4·tp2"
    assert ParallelLayout().label == "dp1"
    assert ParallelLayout(pp=2).label == "pp2"
    assert ParallelLayout(dp=4, dp_replicate=2, cp=2).label == "dp4·cp2·hsdp2"


def counts(name, num_stages):
    return [len(span.layers) for span in split_layers(PRESETS[name], num_stages)]


def test_llama_405b_is_split_as_published():
    """One layer less on the first and the last of 16 stages (arXiv 2407.21783, 3.3.2)."""
    assert counts("llama3-405b", 16) == [7, *[8] * 14, 7]


def test_embedding_and_head_count_as_work():
    assert counts("llama3-8b", 4) == [7, 9, 9, 7]
    assert counts("llama3-8b", 1) == [32]
    assert counts("llama3-8b", 32) == [1] * 32
    assert counts("tiny", 3) == [1, 2, 1]


@given(
    num_layers=st.integers(1, 40),
    vocab_size=st.integers(1, 20_000),
    tied=st.booleans(),
    data=st.data(),
)
def test_every_layer_is_held_once_and_no_stage_is_needlessly_large(
    num_layers, vocab_size, tied, data
):
    shape = ModelShape(
        num_layers=num_layers,
        dim=64,
        num_heads=4,
        num_kv_heads=4,
        ffn_dim=128,
        vocab_size=vocab_size,
        tie_embeddings=tied,
    )
    num_stages = data.draw(st.integers(1, num_layers))
    spans = split_layers(shape, num_stages)
    assert [i for span in spans for i in span.layers] == list(range(num_layers))
    assert all(len(span.layers) >= 1 for span in spans)
    assert [span.has_embedding for span in spans] == [True] + [False] * (num_stages - 1)
    assert [span.has_head for span in spans] == [False] * (num_stages - 1) + [True]
    inner = [len(span.layers) for span in spans[1:-1]]
    if inner:
        assert max(inner) - min(inner) <= 1
        ends = [len(spans[0].layers), len(spans[-1].layers)]
        assert max(ends) <= max(inner) + 1
        assert abs(ends[0] - ends[1]) <= 1


@pytest.mark.parametrize(("pp", "interleave"), [(2, 1), (2, 2), (4, 3)])
def test_stages_go_round_the_ranks(pp, interleave):
    held = [stages_of_rank(rank, pp, interleave) for rank in range(pp)]
    assert sorted(stage for mine in held for stage in mine) == list(range(pp * interleave))
    assert all(stage % pp == rank for rank, mine in enumerate(held) for stage in mine)
