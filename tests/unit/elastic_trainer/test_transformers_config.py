"""What follows from a config.json and from what transformers says of it; without transformers."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.hf_config import ConfigError
from elastic_trainer.plan.models import Transformers, raw_of, shape_of
from elastic_trainer.plan.transformers_config import (
    DIMENSIONS,
    TP_STYLES,
    Answer,
    Facts,
    dimensions,
    own_class,
    read_config,
    refusal,
    unasked,
)

RAW = {"model_type": "gpt_neox", "num_hidden_layers": 4, "hidden_size": 64,
       "num_attention_heads": 8, "intermediate_size": 256, "vocab_size": 512}  # fmt: skip
FACTS = Facts(
    architecture="GPTNeoXForCausalLM",
    params=1000,
    active=900,
    sizes={"num_layers": 4, "dim": 64, "num_heads": 8, "vocab_size": 512},
    tie_embeddings=True,
    attention="sdpa",
    attentions=("eager", "sdpa"),
    tp_plan={"layers.*.q": "colwise"},
    tp_sizes={"attention heads": 8},
    recurrent=False,
)


def test_the_shape_has_the_counts_of_the_class_and_the_nearest_dimensions():
    shape = own_class(RAW, FACTS)
    assert (shape.num_params(), shape.active_params()) == (1000, 900)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_size) == (8, 8, 8)
    assert (shape.ffn_dim, shape.tie_embeddings) == (4 * 64, True)
    assert shape.architecture == "GPTNeoXForCausalLM"
    assert json.loads(shape.config) == {**RAW, "architectures": ["GPTNeoXForCausalLM"]}
    assert own_class(dict(reversed(RAW.items())), FACTS).config == shape.config


def test_job_json_has_what_nodes_need_and_not_what_the_launcher_asks():
    shape = own_class(RAW, FACTS)
    raw = raw_of(shape)
    assert not {"tp_sizes", "refused"} & raw.keys()
    assert shape_of(json.loads(json.dumps(raw))) == shape
    assert hash(shape) == hash(shape_of(raw))


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({}, set()),
        ({"tp_plan": None}, {"layout.tp"}),
        ({"tp_plan": {"a": "colwise", "b": "moe_tp_experts"}}, {"layout.tp"}),
        ({"tp_plan": dict.fromkeys("ab", min(TP_STYLES))}, set()),
        ({"recurrent": True}, {"data.format", "train.lora"}),
    ],
)
def test_what_a_class_does_not_take(changes, keys):
    always = own_class(RAW, FACTS).refused.keys()
    assert {"layout.cp", "layout.ep"} <= always
    assert own_class(RAW, dataclasses.replace(FACTS, **changes)).refused.keys() == always | keys


def test_the_style_that_forbids_tp_is_named():
    facts = dataclasses.replace(FACTS, tp_plan={"a": "colwise", "b": "moe_tp_experts"})
    assert "moe_tp_experts" in own_class(RAW, facts).refused["layout.tp"]


def test_an_attention_must_be_one_of_the_class():
    assert own_class(RAW, FACTS, "eager").attention == "eager"
    with pytest.raises(ConfigError, match="flash_attention_2") as caught:
        own_class(RAW, FACTS, "flash_attention_2")
    assert caught.value.code == "HF022"


@pytest.mark.parametrize("missing", ["num_hidden_layers", "hidden_size", "vocab_size"])
def test_without_transformers_the_dimensions_must_be_there(missing):
    raw = {key: value for key, value in RAW.items() if key != missing}
    with pytest.raises(ConfigError, match=missing) as caught:
        unasked(raw, 7)
    assert caught.value.code == "HF021"


def test_without_transformers_the_parameters_are_those_stated():
    shape = unasked({**RAW, "architectures": ["X"]}, 7)
    assert (shape.params, shape.active, shape.num_layers) == (7, 7, 4)
    assert "layout.tp" in shape.refused


@pytest.mark.parametrize(
    ("raw", "complete", "refused"),
    [
        ({"auto_map": {"AutoConfig": "x.Y"}}, {}, False),
        ({"experts_per_token": 4}, {"num_experts_per_tok": 4}, False),
        ({"experts_per_token": 2}, {"num_experts_per_tok": 4}, True),
        ({"moe_layer_freq": 1}, {}, False),
        ({"moe_layer_freq": 2}, {}, True),
        ({"d_inner": 128}, {"intermediate_size": 128}, False),
        ({"my_switch": 7}, {}, True),
    ],
    ids=str,
)
def test_a_key_that_the_class_lacks_passes_only_where_it_changes_nothing(raw, complete, refused):
    found = refusal(raw, {**raw, **complete}, frozenset(complete), "some class")
    assert (found is not None) == refused


@pytest.mark.parametrize(
    "raw",
    [
        {"quantization_config": {"bits": 4}},
        {"is_encoder_decoder": True},
        {"add_cross_attention": True},
        {"output_router_logits": True},
        {"use_bidirectional_attention": True},
        {"attention_dropout": 0.1},
        {"resid_pdrop": 0.1},
        {"layerdrop": 0.1},
        {"router_jitter_noise": 0.01},
        {"causal": False},
    ],
    ids=lambda raw: next(iter(raw)),
)
def test_what_is_not_trained_is_refused_by_its_key(raw):
    (key,) = raw
    assert key in (refusal({}, raw) or "")
    with pytest.raises(ConfigError, match=key) as caught:
        unasked({**RAW, **raw}, 7)
    assert caught.value.code == "HF022"


@pytest.mark.parametrize("key", ["classifier_dropout", "summary_first_dropout"])
def test_what_is_of_classifiers_is_in_no_class_here(key):
    assert refusal({key: 0.1}, {key: 0.1}, frozenset({key})) is None


def test_a_key_that_the_config_class_does_not_know_is_refused_unless_it_has_no_effect():
    known = frozenset({"hidden_size"})
    raw = {"hidden_size": 4, "torch_dtype": "float32", "image_token_id": 3, "of_other_code": None}
    raw |= {"off": False, "fused_norm": True, "n_ctx": 1024}
    assert refusal(raw, {}, known) is None
    assert "scale_emb" in (refusal({**raw, "scale_emb": 12}, {}, known, "XConfig") or "")


@pytest.mark.parametrize(
    ("kind", "key"),
    [("sliding_attention", "sliding_window"), ("chunked_attention", "attention_chunk_size")],
)
def test_windows_need_their_size(kind, key):
    complete = {"layer_types": ["full_attention", kind], key: None}
    assert kind in (refusal({}, complete, frozenset()) or "")
    assert refusal({}, {**complete, key: 8}, frozenset()) is None


@pytest.mark.parametrize(
    ("text", "code"),
    [("{", "HF021"), ("[]", "HF021"), ("{}", "HF022"), ('{"model_type": 3}', "HF022"),
     ('{"model_type": "gpt2", "n_layer": 1000000000}', "HF021")],
)  # fmt: skip
def test_what_is_no_config_is_refused(text, code):
    with pytest.raises(ConfigError) as caught:
        read_config(text)
    assert caught.value.code == code


def test_dimensions_have_many_names():
    gpt2 = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_inner": None}
    assert dimensions(gpt2) == {"num_layers": 12, "dim": 768, "num_heads": 12, "vocab_size": 50257}
    assert dimensions({"intermediate_size": [8, 16], "num_key_value_heads": [2, 4]}) == {
        "num_kv_heads": 4,
        "ffn_dim": 16,
    }


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
_keys = st.sampled_from([key for keys in DIMENSIONS.values() for key in keys])


@given(raw=st.dictionaries(_keys | st.text(max_size=8), _json))
def test_any_config_gives_dimensions_above_0_or_none_and_a_reason_or_none(raw):
    assert all(type(size) is int and size > 0 for size in dimensions(raw).values())
    assert refusal(raw, raw) is None or refusal(raw, raw)
    try:
        shape = unasked({"model_type": "x", **raw}, 7)
    except ConfigError:
        return
    assert isinstance(shape, Transformers)
    assert min(shape.num_heads, shape.num_kv_heads, shape.head_size, shape.ffn_dim) > 0
    assert shape.flops_per_token(16) == shape.flops_per_token(16)


def test_answers_come_back_as_they_were_sent():
    for answer in (Answer(facts=FACTS), Answer(refused="x"), Answer(error="y")):
        assert Answer.from_json(json.dumps(dataclasses.asdict(answer))) == answer


@pytest.mark.parametrize("text", ["", "[]", "7", '{"facts": {}}', '{"facts": 7}', '{"other": 1}'])
def test_what_is_no_answer_is_not_taken_for_one(text):
    with pytest.raises((ValueError, TypeError)):
        Answer.from_json(text)
