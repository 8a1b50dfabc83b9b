from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.checkpoint import hf_names
from elastic_trainer.hf_config import parse_hf_config
from elastic_trainer.model import Llama
from elastic_trainer.models import PRESETS, ModelShape

TINY = PRESETS["tiny"]
shapes = st.builds(
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
    rope_low_freq_factor=st.sampled_from([1.0, 2.0]),
    rope_high_freq_factor=st.sampled_from([4.0, 8.0]),
    rope_original_context=st.sampled_from([4096, 8192]),
    tie_embeddings=st.booleans(),
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head_dim", [0, 24])
def test_sizes_are_those_of_the_model(tied, head_dim):
    shape = dataclasses.replace(TINY, tie_embeddings=tied, head_dim=head_dim)
    with torch.device("meta"):
        model = Llama(shape)
    expected = {name: tuple(param.shape) for name, param in model.named_parameters()}
    sizes = hf_names.param_sizes(shape)
    assert sizes == expected
    assert sum(map(math.prod, sizes.values())) == shape.num_params()


@pytest.mark.parametrize("shape", [TINY, PRESETS["llama3-405b"]])
def test_names_go_there_and_back(shape):
    theirs = [hf_names.to_hf(name) for name in hf_names.param_sizes(shape)]
    assert len(set(theirs)) == len(theirs)
    assert [hf_names.from_hf(name) for name in theirs] == list(hf_names.param_sizes(shape))


def test_names_are_those_of_published_checkpoints():
    assert hf_names.to_hf("layers.7.ffn.w1.weight") == "model.layers.7.mlp.gate_proj.weight"
    assert hf_names.to_hf("layers.7.ffn.w2.weight") == "model.layers.7.mlp.down_proj.weight"
    assert hf_names.to_hf("layers.7.ffn.w3.weight") == "model.layers.7.mlp.up_proj.weight"
    assert hf_names.to_hf("head.weight") == "lm_head.weight"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "lm_head.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.00.self_attn.q_proj.weight",
        "model.layers.-1.self_attn.q_proj.weight",
        "layers.0.attention.wq.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "xmodel.norm.weight",
    ],
)
def test_other_names_are_none_of_ours(name):
    assert hf_names.from_hf(name) is None


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
