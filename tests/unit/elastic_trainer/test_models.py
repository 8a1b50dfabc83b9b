from __future__ import annotations

import pytest

from elastic_trainer.plan.models import PRESETS, ModelShape


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405.85e9),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("mixtral-8x7b", 46_702_792_704),
    ],
)
def test_parameter_counts_are_the_published_ones(name, published):
    assert PRESETS[name].num_params() == pytest.approx(published, rel=1e-4)


def test_parameter_count_of_a_shape_counted_by_hand():
    shape = ModelShape(num_layers=1, dim=4, num_heads=2, num_kv_heads=1, ffn_dim=8, vocab_size=10)
    # q 16, k 8, v 8, o 16, three of 32, two norms of 4; tables 2 x 40; final norm 4
    assert shape.num_params() == 48 + 96 + 8 + 80 + 4


def test_tied_embeddings_count_once():
    fields = {"num_layers": 1, "dim": 4, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 8}
    tied = ModelShape(**fields, vocab_size=10, tie_embeddings=True)
    untied = ModelShape(**fields, vocab_size=10)
    assert untied.num_params() - tied.num_params() == 40


def test_a_head_size_of_its_own_is_used():
    shape = ModelShape(
        num_layers=1, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=8, vocab_size=8, head_dim=32
    )
    assert shape.head_size == 32
    assert PRESETS["tiny"].head_size == 16


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_are_consistent(name):
    shape = PRESETS[name]
    assert shape.num_heads % shape.num_kv_heads == 0
    assert shape.dim == shape.num_heads * shape.head_size or shape.head_dim
    assert shape.head_size % 2 == 0  # RoPE rotates pairs
