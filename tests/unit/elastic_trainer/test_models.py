from __future__ import annotations

import json

import pytest

from elastic_trainer.plan.models import FULL, PRESETS, SLIDING, ModelShape, Qwen3, raw_of, shape_of


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
        ("olmo2-7b", 7_298_617_344),
        ("gemma3-1b", 999_885_952),
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


LAYERS = {"num_layers": 5, "dim": 4, "num_heads": 2, "num_kv_heads": 1, "ffn_dim": 8,
          "vocab_size": 10}  # fmt: skip


def test_layer_types_begin_again_after_the_last():
    shape = Qwen3(**LAYERS, sliding_window=3, layer_types=(SLIDING, FULL))
    assert [shape.layer_window(layer) for layer in range(5)] == [3, None, 3, None, 3]
    assert [Qwen3(**LAYERS).layer_window(layer) for layer in range(2)] == [None, None]


def test_a_query_sees_the_keys_that_its_layer_lets_it_see():
    shape = Qwen3(**LAYERS, sliding_window=3, layer_types=(SLIDING, FULL))
    # of 100: half; of a window of 3 on 100: 3, less what the first positions lack
    assert shape.mean_keys(100) == pytest.approx((3 * (3 - 0.045) + 2 * 50) / 5)
    assert shape.mean_keys(2) == Qwen3(**LAYERS).mean_keys(2) == 1.0
    saved = 12 * 2 * 2 * 3 * (50 - 2.955)
    other = Qwen3(**LAYERS).flops_per_token(100)
    assert other - shape.flops_per_token(100) == pytest.approx(saved)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_what_job_json_has_is_read_back(name):
    shape = PRESETS[name]
    assert shape_of(json.loads(json.dumps(raw_of(shape)))) == shape


def test_fields_of_0_1_0_alone_are_written_where_no_layer_has_a_window():
    assert not {"layer_types", "sliding_window"} & raw_of(PRESETS["qwen3-8b"]).keys()
