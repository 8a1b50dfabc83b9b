from __future__ import annotations

import dataclasses
import json
from functools import partial

import pytest
from hf_models import names_of
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.model.decoder import build
from elastic_trainer.plan.hf_config import parse_hf_config
from elastic_trainer.plan.models import (
    FULL,
    PRESETS,
    SLIDING,
    Gemma3,
    Granite,
    Mistral,
    ModelShape,
    Olmo2,
    Olmo3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
)
from elastic_trainer.state import hf_names

TINY = PRESETS["tiny"]
unscaled = st.builds(
    ModelShape,
    num_layers=st.integers(1, 200),
    dim=st.sampled_from([64, 128, 4096]),
    num_heads=st.sampled_from([4, 8, 32]),
    num_kv_heads=st.sampled_from([1, 2, 4]),
    ffn_dim=st.integers(1, 60000),
    vocab_size=st.integers(1, 300000),
    head_dim=st.sampled_from([0, 16, 128]),
    norm_eps=st.sampled_from([1e-5, 1e-6]),
    rope_theta=st.sampled_from([10000.0, 500000.0]),
    rope_scaling_factor=st.sampled_from([8.0, 32.0]),
    tie_embeddings=st.booleans(),
)
contexts = st.sampled_from([4096, 8192])
scalings = st.one_of(
    st.just({"rope_scaling": "linear"}),
    st.fixed_dictionaries(
        {
            "rope_low_freq_factor": st.sampled_from([1.0, 2.0]),
            "rope_high_freq_factor": st.sampled_from([4.0, 8.0]),
            "rope_original_context": contexts,
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_scaling": st.just("yarn"),
            "rope_beta_fast": st.sampled_from([32.0, 16.0]),
            "rope_beta_slow": st.sampled_from([1.0, 2.0]),
            "rope_truncate": st.booleans(),
            "rope_attention_factor": st.sampled_from([None, 1.0, 1.25]),
            "rope_original_context": contexts,
        }
    ),
)
llamas = st.builds(lambda base, scaling: dataclasses.replace(base, **scaling), unscaled, scalings)


def of_family(family, base, **own):
    return family(**dataclasses.asdict(base) | {"head_dim": base.head_size}, **own)


windows = st.sampled_from([{}, {"sliding_window": 4096}]) | st.fixed_dictionaries(
    {
        "sliding_window": st.integers(1, 9999),
        "layer_types": st.sampled_from([(SLIDING, FULL), (FULL, SLIDING, SLIDING)]),
    }
)


def layered(family, base, window, **own):
    """Of layers enough that the pattern is the briefest way to say it."""
    return of_family(family, dataclasses.replace(base, num_layers=6), **window, **own)


shapes = st.one_of(
    llamas,
    st.builds(partial(layered, Qwen2), llamas, windows),
    st.builds(partial(layered, Qwen3), llamas, windows, attention_bias=st.booleans()),
    st.builds(partial(of_family, Olmo2), llamas),
    st.builds(
        partial(layered, Olmo3),
        llamas,
        windows,
        rope_local_theta=st.sampled_from([10000.0, 500000.0]),
    ),
    st.builds(
        partial(layered, Gemma3),
        llamas,
        windows,
        rope_local_theta=st.sampled_from([10000.0, 500000.0]),
        query_pre_attn_scalar=st.integers(1, 999),
    ),
    st.builds(
        partial(of_family, Qwen3Moe),
        llamas,
        num_experts=st.integers(1, 128),
        experts_per_token=st.integers(1, 8),
        norm_topk_prob=st.booleans(),
    ),
    st.builds(partial(of_family, Granite), llamas, attention_multiplier=st.floats(0.01, 1.0)),
    st.builds(partial(of_family, Mistral), llamas, sliding_window=st.sampled_from([None, 4096])),
)


@given(shapes)
def test_the_config_is_read_back_to_the_same_shape(shape):
    assert parse_hf_config(json.dumps(hf_names.hf_config(shape, "float32"))) == shape


def test_without_scaling_no_scaling_is_written():
    config = hf_names.hf_config(TINY, "bfloat16", context=4096)
    assert config["rope_scaling"] is None
    assert (config["torch_dtype"], config["max_position_embeddings"]) == ("bfloat16", 4096)
    assert parse_hf_config(json.dumps(config)) == TINY


@pytest.mark.parametrize(
    ("name", "context"),
    [("llama3-8b", 8192), ("llama3-405b", 131072), ("tiny", 8192)],
)
def test_the_context_is_the_published_one(name, context):
    assert hf_names.context_of(PRESETS[name]) == context


def test_the_context_of_another_model_is_what_scaling_makes_it():
    shape = dataclasses.replace(PRESETS["llama3-405b"], num_layers=2)
    assert hf_names.context_of(shape) == 8 * 8192


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("tied", [False, True])
def test_names_differ_and_count_every_parameter(name, tied):
    shape = dataclasses.replace(PRESETS[name], tie_embeddings=tied)
    sizes = {n: param.numel() for n, param in build(shape).named_parameters()}
    assert sorted(names_of(shape).values()) == sorted(sizes)
    assert sum(sizes.values()) == shape.num_params()


def test_names_are_those_of_published_checkpoints():
    theirs = {ours: theirs for theirs, ours in names_of(PRESETS["tiny-qwen3"]).items()}
    assert theirs["layers.3.ffn.w1.weight"] == "model.layers.3.mlp.gate_proj.weight"
    assert theirs["layers.3.ffn.w2.weight"] == "model.layers.3.mlp.down_proj.weight"
    assert theirs["layers.3.ffn.w3.weight"] == "model.layers.3.mlp.up_proj.weight"
    assert theirs["layers.3.attention.wq.bias"] == "model.layers.3.self_attn.q_proj.bias"
    assert theirs["layers.3.attention.k_norm.weight"] == "model.layers.3.self_attn.k_norm.weight"
    assert theirs["head.weight"] == "lm_head.weight"


def test_only_rotary_buffers_are_derived():
    assert hf_names.is_derived("model.layers.12.self_attn.rotary_emb.inv_freq")
    assert hf_names.is_derived("model.rotary_emb.inv_freq")
    assert not hf_names.is_derived("model.layers.12.self_attn.rotary_emb.weight")


@given(st.lists(st.integers(0, 50), min_size=1), st.integers(1, 60))
def test_files_keep_the_order_and_the_cap(sizes, cap):
    sizes_bytes = {str(i): size for i, size in enumerate(sizes)}
    file_of = hf_names.pack(sizes_bytes, cap)
    files = [[n for n in file_of if file_of[n] == i + 1] for i in range(max(file_of.values()))]
    assert [name for names in files for name in names] == list(sizes_bytes)
    for names, following in zip(files, [*files[1:], None], strict=True):
        held = sum(sizes_bytes[name] for name in names)
        assert names
        assert held <= cap or sizes_bytes[names[0]] > cap
        if following is not None:  # none is closed while the next tensor still fits
            assert held + sizes_bytes[following[0]] > cap
