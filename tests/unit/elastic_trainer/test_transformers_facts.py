"""What transformers itself says of small configs of many kinds. Never online.

Each kind stands for published ones: what is taken has exactly transformers' count, what is not is
refused by the key or the class that says so.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import warnings

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    # Of its imports, not of what is tested.
    warnings.simplefilter("ignore", DeprecationWarning)
    transformers = pytest.importorskip("transformers", reason="needs the dev extra")
import torch

from elastic_trainer.model.transformers_facts import answer, main, read
from elastic_trainer.plan.transformers_config import TP_STYLES, Answer

transformers.logging.set_verbosity_error()

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
         "intermediate_size": 96, "vocab_size": 128, "pad_token_id": 0}  # fmt: skip
KV = {**SMALL, "num_key_value_heads": 2}
LLAMA = {"model_type": "llama", **KV}
MIXTURE = {**KV, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
NESTED = {"text_config": {"model_type": "llama", **KV}}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}

TAKEN = {
    "an old decoder with names of its own": (
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128,
         "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.1,
         "n_ctx": 1024},
        "GPT2LMHeadModel"),
    "keys that its class renames": ({"model_type": "gpt_neox", **SMALL, "rotary_pct": 0.5,
                                     "rotary_emb_base": 10000}, "GPTNeoXForCausalLM"),
    "rotation in part, in the older form": ({"model_type": "phi", **SMALL,
                                             "partial_rotary_factor": 0.5}, "PhiForCausalLM"),
    "fused projections": ({"model_type": "phi3", **KV}, "Phi3ForCausalLM"),
    "a scaling of RoPE that no family has": (
        {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "LlamaForCausalLM"),
    "biases that no family has": ({**LLAMA, "attention_bias": True}, "LlamaForCausalLM"),
    "layers that differ": ({"model_type": "qwen3", **KV, "head_dim": 16, **LAYERS,
                            "use_sliding_window": True, "sliding_window": 8}, "Qwen3ForCausalLM"),
    "experts": ({"model_type": "qwen2_moe", **MIXTURE, "shared_expert_intermediate_size": 48},
                "Qwen2MoeForCausalLM"),
    "experts, and layers without": (
        {"model_type": "glm4_moe", **KV, "moe_intermediate_size": 32, "n_routed_experts": 8,
         "num_experts_per_tok": 2, "head_dim": 16, "num_nextn_predict_layers": 1},
        "Glm4MoeForCausalLM"),
    "compressed keys": ({"model_type": "deepseek_v2", **SMALL, "n_routed_experts": 8,
                         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16,
                         "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                         "qk_head_dim": 16, "v_head_dim": 16}, "DeepseekV2ForCausalLM"),
    "no sdpa": ({"model_type": "gpt_oss", **KV, "head_dim": 16, "num_local_experts": 4,
                 "num_experts_per_tok": 2, "sliding_window": 8, **LAYERS}, "GptOssForCausalLM"),
    "a state instead of attention": (
        {"model_type": "mamba2", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 128,
         "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
         "time_step_limit": [0.0, {"__float__": "Infinity"}]}, "Mamba2ForCausalLM"),
    "a state beside attention": (
        {"model_type": "lfm2", **KV, "layer_types": ["conv", "full_attention"]},
        "Lfm2ForCausalLM"),
    "one kind of input of several, of a class for text": (
        {"model_type": "llama4", "text_config": {
            "model_type": "llama4_text", **KV, "head_dim": 16, "intermediate_size_mlp": 96,
            "num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 8}},
        "Llama4ForCausalLM"),
    "tied": ({"model_type": "gemma2", **KV, "head_dim": 16, "sliding_window": 8},
             "Gemma2ForCausalLM"),
}  # fmt: skip
REFUSED = {
    "dropout": ({**LLAMA, "attention_dropout": 0.1}, "attention_dropout 0.1"),
    "dropout by default": ({"model_type": "gpt2", "n_layer": 2}, "resid_pdrop 0.1"),
    "layers dropped": ({"model_type": "opt", **SMALL, "dropout": 0.0, "layerdrop": 0.1},
                       "layerdrop 0.1"),
    "noise": ({"model_type": "phimoe", **KV, "num_local_experts": 4, "router_jitter_noise": 0.01},
              "router_jitter_noise 0.01"),
    "quantised": ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config"),
    "remote code": ({"model_type": "x", "auto_map": {"AutoConfig": "a.B"}}, "auto_map"),
    "unknown type": ({"model_type": "minicpm", **KV}, "model_type 'minicpm'"),
    "classifier": ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
                   "architectures ['LlamaForSequenceClassification']"),
    "another's class": ({**LLAMA, "architectures": ["MineForCausalLM"]}, "architectures"),
    "router's loss": ({"model_type": "mixtral", **KV, "output_router_logits": True},
                      "output_router_logits True"),
    "encoder and decoder": ({"model_type": "bart"}, "is_encoder_decoder True"),
    "encoder": ({"model_type": "bert", **SMALL, "hidden_dropout_prob": 0.0,
                 "attention_probs_dropout_prob": 0.0}, "is_decoder false"),
    "encoder without a causal class": ({"model_type": "modernbert", **SMALL},
                                       "model_type modernbert"),
    "images": ({"model_type": "gemma3", "text_config": {**KV, "head_dim": 16}}, "vision_config"),
    "images without a causal class": ({"model_type": "llava", **NESTED}, "model_type llava"),
    "both sides": ({"model_type": "gemma3_text", **KV, "use_bidirectional_attention": True},
                   "use_bidirectional_attention True"),
    "of other code": ({**LLAMA, "scale_emb": 12}, "scale_emb 12"),
    "of other code, nested": (
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text", **KV, "zz": 1}},
        "zz 1"),
    "not read by its class": ({**LLAMA, "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "windows of no size": ({"model_type": "qwen3", **KV, "head_dim": 16, **LAYERS,
                            "sliding_window": 8}, "layer_types"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TAKEN)
def test_what_transformers_builds_has_exactly_its_count(kind):
    raw, name = TAKEN[kind]
    facts = answer(raw).facts
    assert facts is not None, answer(raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(read(raw))
    assert facts.architecture == type(model).__name__ == name
    assert facts.params == sum(each.numel() for each in model.parameters())
    assert 0 < facts.active <= facts.params
    assert {"num_layers", "dim", "vocab_size"} <= facts.sizes.keys()
    assert facts.sizes["num_layers"] == 2


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_trained_is_refused_by_the_key_or_class_that_says_so(kind):
    raw, key = REFUSED[kind]
    found = answer(raw)
    assert (found.facts, found.error) == (None, None)
    assert found.refused.partition(":")[0].startswith(key) or key in found.refused


def test_what_transformers_cannot_build_is_an_error_with_its_words():
    raw = {"model_type": "llama", **SMALL, "rope_scaling": {"rope_type": "llama3"}}
    assert "factor" in answer(raw).error
    assert "hidden_size" in answer({"model_type": "llama", "hidden_size": "wide"}).error


def test_a_null_that_a_class_does_not_bear_is_named():
    error = answer({"model_type": "nemotron", **SMALL, "num_key_value_heads": None}).error
    assert "num_key_value_heads" in error


def facts_of(kind, **changes):
    return answer({**TAKEN[kind][0], **changes}).facts


def test_of_experts_a_token_meets_those_it_goes_to():
    all_met = facts_of("experts", num_experts_per_tok=8)
    assert all_met.active == all_met.params
    some = facts_of("experts")
    # Two of eight, of three matrices of 64 x 32, in two layers.
    assert some.params - some.active == 2 * 6 * 3 * 64 * 32
    assert facts_of("fused projections").active == facts_of("fused projections").params


def test_a_state_from_token_to_token_is_known():
    recurrent = {kind for kind in TAKEN if answer(TAKEN[kind][0]).facts.recurrent}
    assert recurrent == {"a state instead of attention", "a state beside attention"}


def test_attention_is_what_transformers_takes():
    assert facts_of("no sdpa").attention == "eager"
    assert "sdpa" not in facts_of("no sdpa").attentions
    assert facts_of("fused projections").attention == "sdpa"
    assert {"eager", "sdpa"} <= {*facts_of("fused projections").attentions}


def test_tp_divides_heads_and_widths_that_the_plan_cuts():
    llama = answer(LLAMA).facts
    assert {*llama.tp_plan.values()} <= TP_STYLES
    assert {*llama.tp_sizes.values()} == {4, 2, 96}
    assert {*facts_of("fused projections").tp_sizes.values()} >= {96}
    assert facts_of("a state instead of attention").tp_plan is None


def test_tied_tables_are_counted_once():
    tied, apart = (answer({**LLAMA, "tie_word_embeddings": tie}).facts for tie in (True, False))
    assert (tied.tie_embeddings, apart.tie_embeddings) == (True, False)
    assert apart.params - tied.params == 128 * 64


@pytest.mark.parametrize("kind", ["experts", "keys that its class renames"])
def test_the_command_prints_one_answer(kind, monkeypatch, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TAKEN[kind][0]))
    monkeypatch.setattr(sys, "argv", ["facts", str(tmp_path / "config.json")])
    main()
    found = Answer.from_json(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["facts", "-"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(TAKEN[kind][0])))
    main()
    assert found == Answer.from_json(capsys.readouterr().out)
    assert found.facts == dataclasses.replace(facts_of(kind))
