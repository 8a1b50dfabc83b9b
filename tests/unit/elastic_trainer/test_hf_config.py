from __future__ import annotations

import json

import pytest

from elastic_trainer.plan.models import PRESETS, ConfigError, parse_hf_config

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


def parse(**changes):
    return parse_hf_config(json.dumps({**LLAMA_31_405B, **changes}))


def test_the_published_config_is_the_preset():
    assert parse() == PRESETS["llama3-405b"]


def test_the_newer_form_of_rope_is_read():
    rope = {**LLAMA_31_405B["rope_scaling"], "rope_theta": 500000.0}
    assert parse(rope_scaling=None, rope_theta=None, rope_parameters=rope) == PRESETS["llama3-405b"]


def test_defaults_are_those_of_the_format():
    small = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
             "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}  # fmt: skip
    shape = parse_hf_config(json.dumps(small))
    assert (shape.num_kv_heads, shape.norm_eps, shape.rope_theta) == (4, 1e-6, 10000.0)
    assert shape.rope_scaling_factor == 1.0


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"model_type": "gemma2"}, "HF022", "'gemma2' is none of llama, qwen3, mistral"),
        ({"model_type": ["llama"]}, "HF022", "model_type"),
        ({"attention_bias": True}, "HF022", "attention_bias"),
        ({"hidden_act": "gelu"}, "HF022", "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "HF022", "sliding_window"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "HF022", "RoPE scaling 'yarn'"),
        ({"rope_scaling": "big"}, "HF021", "rope_scaling"),
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


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 32,
         "intermediate_size": 128, "vocab_size": 100}  # fmt: skip


def small(kind, **changes):
    return parse_hf_config(json.dumps({**SMALL, "model_type": kind, **changes}))


def test_what_a_family_leaves_out_is_transformers_default():
    transformers = pytest.importorskip("transformers", reason="needs the dev extra")
    for kind in ("qwen3", "mistral", "mixtral"):
        theirs = transformers.AutoConfig.for_model(kind, **SMALL)
        ours = small(kind)
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_size == (theirs.head_dim or theirs.hidden_size // 32)
        assert ours.sliding_window == theirs.sliding_window
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


@pytest.mark.parametrize(
    ("kind", "changes", "code", "message"),
    [
        ("qwen3", {"use_sliding_window": True}, "HF022", "use_sliding_window True"),
        ("mistral", {"attention_bias": True}, "HF022", "attention_bias True"),
        ("mistral", {"sliding_window": 0}, "HF021", "sliding_window is 0"),
        ("mistral", {"sliding_window": True}, "HF021", "sliding_window is True"),
        ("mixtral", {"output_router_logits": True}, "HF022", "output_router_logits True"),
        ("mixtral", {"router_jitter_noise": 0.1}, "HF022", "router_jitter_noise 0.1"),
        ("mixtral", {"num_local_experts": None}, "HF021", "num_local_experts is None"),
        ("mixtral", {"num_local_experts": 10**6}, "HF021", "from 1 to 1,024"),
    ],
)
def test_what_a_family_does_not_have_here_is_refused(kind, changes, code, message):
    with pytest.raises(ConfigError) as caught:
        small(kind, **changes)
    assert caught.value.code == code
    assert message in str(caught.value)
