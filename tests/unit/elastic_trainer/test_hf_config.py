from __future__ import annotations

import json
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_trainer.plan.hf_config import (
    _OFF,
    _USED,
    WITHOUT_EFFECT,
    ConfigError,
    parse_hf_config,
)
from elastic_trainer.plan.models import FAMILIES, PRESETS

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 32,
         "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
KNOWN = _OFF | _USED | WITHOUT_EFFECT
LLAMA_31_405B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "hidden_act": "silu",
    "hidden_size": 16384, "intermediate_size": 53248, "max_position_embeddings": 131072,
    "mlp_bias": False, "model_type": "llama", "num_attention_heads": 128,
    "num_hidden_layers": 126, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": 128256,
}  # fmt: skip


ROPE = LLAMA_31_405B["rope_scaling"]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def parse(**changes):
    return parse_hf_config(json.dumps({**LLAMA_31_405B, **changes}))


def test_the_published_config_is_the_preset():
    assert parse() == PRESETS["llama3-405b"]


def test_the_newer_form_of_rope_is_read():
    rope = {**ROPE, "rope_theta": 500000.0}
    assert parse(rope_scaling=None, rope_theta=None, rope_parameters=rope) == PRESETS["llama3-405b"]


def test_keys_without_effect_are_passed_over():
    same = {
        "attention_dropout": 0.0, "quantization_config": None, "transformers_version": "4.51.0",
        "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": [2, 3], "use_cache": True,
        "pretraining_tp": 4, "partial_rotary_factor": 1.0, "initializer_range": 0.01,
        "layer_types": ["full_attention"] * 126, "id2label": {"0": "x"}, "temperature": 0.6,
        "rope_scaling": {**ROPE, "finetuned": True}, "never_heard_of": None,
    }  # fmt: skip
    assert parse(**same) == PRESETS["llama3-405b"]


def test_yarn_is_read_as_transformers_does():
    plain = parse(rope_scaling=YARN)
    assert (plain.rope_scaling, plain.rope_scaling_factor) == ("yarn", 4.0)
    assert (plain.rope_original_context, plain.rope_attention_factor) == (32768, None)
    assert plain.rope_magnitude == pytest.approx(0.1 * math.log(4.0) + 1)
    # Null and 0 are absent, and so is a scale that is given alone.
    assert parse(rope_scaling={**YARN, "beta_fast": None, "beta_slow": 0, "mscale": 2.0}) == plain
    scales = {"mscale": 2.0, "mscale_all_dim": 1.0}
    both = parse(rope_scaling={**YARN, **scales}).rope_magnitude
    assert both == pytest.approx((0.2 * math.log(4.0) + 1) / (0.1 * math.log(4.0) + 1))
    direct = parse(rope_scaling={**YARN, **scales, "attention_factor": 1})
    assert direct.rope_magnitude == 1.0
    without = {key: value for key, value in YARN.items() if "original" not in key}
    assert parse(rope_scaling=without).rope_original_context == 131072
    outer = parse(rope_scaling=YARN, original_max_position_embeddings=4096)
    assert outer.rope_original_context == 4096


@given(
    st.text(st.characters(codec="ascii"), min_size=1), st.sampled_from([False, 0, 1, "x", [], {}])
)
def test_any_other_key_is_refused_by_name(key, value):
    assume(key not in LLAMA_31_405B and not key.endswith("_token_id") and key not in KNOWN)
    with pytest.raises(ConfigError) as caught:
        parse(**{key: value})
    assert caught.value.code == "HF022"
    assert key in str(caught.value)


def test_whatever_transformers_gives_a_family_is_read_or_refused():
    """Of its keys none is unknown where it says what transformers says by default."""
    transformers = pytest.importorskip("transformers", reason="needs the dev extra")
    for kind, family in FAMILIES.items():
        theirs = transformers.AutoConfig.for_model(kind, **SMALL).to_dict()
        assert type(parse_hf_config(json.dumps(theirs))) is family


def test_defaults_are_those_of_the_format():
    small = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
             "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    shape = parse_hf_config(json.dumps(small))
    assert (shape.num_kv_heads, shape.norm_eps, shape.rope_theta) == (4, 1e-6, 10000.0)
    assert shape.rope_scaling_factor == 1.0


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"model_type": "gemma2"}, "HF022", "'gemma2' is none of llama, qwen2, qwen3"),
        ({"model_type": ["llama"]}, "HF022", "model_type"),
        ({"attention_bias": True}, "HF022", "attention_bias"),
        ({"hidden_act": "gelu"}, "HF022", "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "HF022", "sliding_window"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "HF022", "RoPE scaling 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "HF021", "RoPE scaling 'linear' lacks factor"),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 1}}, "HF022", "llama_4_scaling_beta 1"),
        ({"rope_scaling": {**YARN, "truncate": 0}}, "HF021", "truncate is 0"),
        ({"rope_scaling": {**YARN, "beta_fast": "x"}}, "HF021", "beta_fast is 'x'"),
        ({"rope_scaling": {"type": "su", "factor": 2}}, "HF022", "RoPE scaling 'su'"),
        ({"rope_scaling": "big"}, "HF021", "rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "HF021", "factor, low_freq_factor, high_freq_"),
        (
            {"rope_scaling": {**ROPE, "original_max_position_embeddings": None}},
            "HF021",
            "lacks ori",
        ),
        ({"rope_scaling": {**ROPE, "factor": 0.5}}, "HF021", "factor is 0.5; expected 1 or more"),
        ({"rope_scaling": {**ROPE, "short_factor": [1]}}, "HF022", "short_factor [1]"),
        ({"rope_parameters": {"rope_type": "default"}}, "HF021", "differ"),
        ({"partial_rotary_factor": 0.5}, "HF022", "partial_rotary_factor 0.5"),
        (
            {"rope_scaling": {**ROPE, "partial_rotary_factor": 0.5}},
            "HF022",
            "partial_rotary_factor",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "HF022", "LlamaForSequenceClass"),
        ({"architectures": ["LlamaModel"]}, "HF022", "only LlamaForCausalLM"),
        ({"attention_dropout": 0.1}, "HF022", "attention_dropout 0.1"),
        ({"resid_pdrop": 0.1}, "HF022", "resid_pdrop 0.1"),
        ({"quantization_config": {"quant_method": "awq"}}, "HF022", "quantization_config"),
        ({"auto_map": {"AutoModel": "mine.Mine"}}, "HF022", "auto_map"),
        ({"embedding_multiplier": 12}, "HF022", "embedding_multiplier 12 is not known of llama"),
        ({"use_rope": False}, "HF022", "use_rope False is not known"),
        ({"layer_types": ["sliding_attention"] * 126}, "HF022", "layer_types"),
        ({"layer_types": ["full_attention"]}, "HF022", "layer_types"),
        ({"tie_word_embeddings": "yes"}, "HF021", "tie_word_embeddings is 'yes'"),
        ({"hidden_size": "64"}, "HF021", "hidden_size is '64'; expected a whole number"),
        ({"hidden_size": True}, "HF021", "hidden_size is True"),
        ({"vocab_size": None}, "HF021", "vocab_size is None"),
        ({"rms_norm_eps": 0}, "HF021", "rms_norm_eps is 0; expected a number above 0"),
    ],
)
def test_other_models_are_refused_clearly(changes, code, message):
    with pytest.raises(ConfigError) as caught:
        parse(**changes)
    assert caught.value.code == code
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "5"])
def test_what_is_no_json_object(text):
    with pytest.raises(ConfigError) as caught:
        parse_hf_config(text)
    assert caught.value.code == "HF021"


def small(kind, **changes):
    return parse_hf_config(json.dumps({**SMALL, "model_type": kind, **changes}))


def test_what_a_family_leaves_out_is_transformers_default():
    transformers = pytest.importorskip("transformers", reason="needs the dev extra")
    for kind in ("qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "granite"):
        theirs = transformers.AutoConfig.for_model(kind, **SMALL)
        ours = small(kind)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_size == (getattr(theirs, "head_dim", None) or theirs.hidden_size // 32)
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.norm_eps == theirs.rms_norm_eps
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_a_family_has_fields_of_its_own():
    assert small("qwen3", attention_bias=True).attention_bias
    assert small("qwen3", sliding_window=4096, use_sliding_window=False).sliding_window is None
    assert small("mistral", sliding_window=None).sliding_window is None
    assert small("mistral", sliding_window=8).sliding_window == 8
    mixtral = small("mixtral", router_aux_loss_coef=0.02, output_router_logits=False)
    assert (mixtral.num_experts, mixtral.experts_per_token) == (8, 2)
    assert small("mixtral", num_local_experts=4, num_experts_per_tok=1).num_experts == 4
    qwen3_moe = small("qwen3_moe", norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    assert (qwen3_moe.num_experts, qwen3_moe.experts_per_token) == (128, 8)
    assert (qwen3_moe.ffn_dim, qwen3_moe.norm_topk_prob) == (768, True)
    # transformers 5 writes one name, the published files have the other.
    for key in ("num_experts", "num_local_experts"):
        assert small("qwen3_moe", **{key: 16}).num_experts == 16


@pytest.mark.parametrize(
    ("kind", "changes", "code", "message"),
    [
        ("qwen2", {"use_sliding_window": True}, "HF022", "use_sliding_window True"),
        ("qwen2", {"attention_bias": False}, "HF022", "attention_bias False is not known"),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "HF022", "layer_types"),
        ("qwen3", {"use_sliding_window": True}, "HF022", "use_sliding_window True"),
        ("mistral", {"attention_bias": True}, "HF022", "attention_bias True"),
        ("mistral", {"sliding_window": 0}, "HF021", "sliding_window is 0"),
        ("mistral", {"sliding_window": True}, "HF021", "sliding_window is True"),
        ("mixtral", {"output_router_logits": True}, "HF022", "output_router_logits True"),
        ("mixtral", {"router_jitter_noise": 0.1}, "HF022", "router_jitter_noise 0.1"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "HF022", "decoder_sparse_step 2"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "HF022", "mlp_only_layers [0]"),
        ("qwen3_moe", {"output_router_logits": True}, "HF022", "output_router_logits True"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 5}, "HF022", "is not known of qwen3_moe"),
        ("qwen3_moe", {"num_experts": 4, "num_local_experts": 5}, "HF021", "differ"),
        ("granite", {"logits_scaling": 0}, "HF021", "logits_scaling is 0"),
        ("granite", {"attention_bias": True}, "HF022", "attention_bias True"),
        ("mixtral", {"num_local_experts": None}, "HF021", "num_local_experts is None"),
        ("mixtral", {"num_local_experts": 10**6}, "HF021", "from 1 to 1,024"),
    ],
)
def test_what_a_family_does_not_have_here_is_refused(kind, changes, code, message):
    with pytest.raises(ConfigError) as caught:
        small(kind, **changes)
    assert caught.value.code == code
    assert message in str(caught.value)
