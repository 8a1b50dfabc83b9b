from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.layout import split_layers, stages_of_rank
from elastic_trainer.plan.models import PRESETS, ModelShape


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
