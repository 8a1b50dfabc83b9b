"""What `transformers` makes of an export, and an import of what it saves. Never online."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from unittest import mock

import pytest
import torch
from hf_models import equal_bits, export_run, names_of, random_weights, read_hf, write_hf
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model.decoder import build, rope_frequencies, rope_table
from elastic_trainer.plan.hf_config import parse_hf_config
from elastic_trainer.plan.models import (
    FULL,
    PRESETS,
    SLIDING,
    Gemma3,
    Granite,
    Mistral,
    Mixtral,
    ModelShape,
    Olmo2,
    Olmo3,
    Qwen2,
    Qwen3,
    Qwen3Moe,
)
from elastic_trainer.state.hf_convert import import_hf

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    # Of its imports, not of what is tested.
    warnings.simplefilter("ignore", DeprecationWarning)
    transformers = pytest.importorskip("transformers", reason="needs the dev extra")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

pytestmark = pytest.mark.usefixtures("one_thread")
SEQ_LEN = 96
TOKENS = torch.randint(200, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
DIMENSIONS = {"num_layers": 3, "dim": 64, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 96,
              "vocab_size": 200}  # fmt: skip
SCALES = {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22,
          "logits_scaling": 3.0}  # fmt: skip
LAYERS = {"sliding_window": 16, "layer_types": (SLIDING, SLIDING, FULL)}
BASE = ModelShape(**DIMENSIONS)
SCALED = dataclasses.replace(
    PRESETS["llama3-405b"],
    **{f: getattr(BASE, f) for f in ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim")},
    vocab_size=200,
)
# Old contexts so short that every band of a scaling shows within SEQ_LEN.
YARN = dataclasses.replace(
    BASE,
    rope_scaling="yarn",
    rope_scaling_factor=4.0,
    rope_theta=100.0,
    rope_original_context=32,
    rope_beta_fast=4.0,
)
SHAPES = {
    "gqa": BASE,
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "head_dim": dataclasses.replace(BASE, head_dim=16),
    "theta": dataclasses.replace(BASE, rope_theta=10000.0, norm_eps=1e-6),
    "llama3-405b's rope": SCALED,
    "strong rope": dataclasses.replace(SCALED, rope_theta=100.0, rope_original_context=32),
    "linear": dataclasses.replace(BASE, rope_scaling="linear", rope_scaling_factor=4.0),
    "yarn": YARN,
    "yarn, other bounds": dataclasses.replace(
        YARN, rope_beta_fast=8.0, rope_beta_slow=0.5, rope_truncate=False, rope_attention_factor=0.9
    ),
    "qwen2": Qwen2(**DIMENSIONS),
    "qwen2 tied": Qwen2(**DIMENSIONS, tie_embeddings=True, head_dim=24, rope_theta=1e6),
    "qwen3": Qwen3(**DIMENSIONS, head_dim=24, attention_bias=True),
    "qwen3 tied": Qwen3(**DIMENSIONS, tie_embeddings=True, rope_theta=1e6),
    "mistral": Mistral(**DIMENSIONS, sliding_window=16),
    "mistral, all": Mistral(**DIMENSIONS, head_dim=16),
    "mixtral": Mixtral(**DIMENSIONS, num_experts=5, experts_per_token=3),
    "granite": Granite(**DIMENSIONS, **SCALES),
    "granite tied": Granite(**DIMENSIONS, **SCALES, tie_embeddings=True),
    "qwen3_moe": Qwen3Moe(**DIMENSIONS, head_dim=24, num_experts=5, experts_per_token=3),
    "qwen3_moe, rescaled": Qwen3Moe(
        **DIMENSIONS, num_experts=5, experts_per_token=3, norm_topk_prob=True, attention_bias=True
    ),
    "qwen2, layers": Qwen2(**DIMENSIONS, sliding_window=16, layer_types=(FULL, SLIDING, SLIDING)),
    "qwen3, layers": Qwen3(**DIMENSIONS, sliding_window=16, layer_types=(SLIDING, FULL)),
    "olmo2": Olmo2(**DIMENSIONS),
    "olmo2 tied": Olmo2(**DIMENSIONS, head_dim=24, tie_embeddings=True),
    "olmo3": Olmo3(
        **DIMENSIONS,
        **LAYERS,
        rope_local_theta=1e4,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_original_context=32,
    ),
    "olmo3, all": Olmo3(**DIMENSIONS),
    "gemma3": Gemma3(
        **DIMENSIONS,
        **LAYERS,
        head_dim=24,
        tie_embeddings=True,
        query_pre_attn_scalar=11,
        rope_theta=1e6,
        rope_local_theta=100.0,
        rope_scaling="linear",
        rope_scaling_factor=8.0,
    ),
    "gemma3, not tied": Gemma3(**DIMENSIONS, **LAYERS),
}


def logits_of_ours(shape, path):
    with torch.no_grad():
        return loaded(shape, path)(TOKENS, rope_table(shape, torch.arange(SEQ_LEN), "cpu"))


def same_logits(theirs, shape, path):
    """See that transformers' model and ours with the weights at `path` give the same."""
    with torch.no_grad():
        expected = theirs.eval()(TOKENS).logits
    ours = logits_of_ours(shape, path)
    assert 0.1 < ours.std() < 10
    assert (ours - expected).abs().max() < 1e-5


def loaded(shape, path):
    model, names = build(shape).to_empty(device="cpu"), names_of(shape)
    if shape.tie_embeddings:
        model.head.weight = model.embedding.weight
    state = {names[name]: tensor for name, tensor in read_hf(path).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["head.weight"] * shape.tie_embeddings, [])
    return model


def weights_of(shape):
    """Values of the size that training gives, so that logits are of order one."""
    return {name: norm_mean(shape) + 0.1 * t if "norm" in name else 0.1 * t
            for name, t in random_weights(shape, torch.float32).items()}  # fmt: skip


def norm_mean(shape):
    return build(shape).initial("norm.weight")[0]


@pytest.mark.process
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_an_export_gives_the_same_logits_in_transformers(tmp_path, shape):
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    import_hf(hf, tmp_path / "run", run_id="r")
    export_run(tmp_path / "run", shape, tmp_path / "out", max_file_bytes=50_000)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, local_files_only=True
    )
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    assert sum(p.numel() for p in theirs.parameters()) == shape.num_params()
    same_logits(theirs, shape, tmp_path / "out")


@pytest.mark.parametrize("name", ["strong rope", "linear", "yarn"])
def test_the_scaling_makes_a_difference_that_the_test_would_see(tmp_path, name):
    shape = SHAPES[name]
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    plain = dataclasses.replace(shape, rope_scaling_factor=1.0)
    change = logits_of_ours(shape, hf) - logits_of_ours(plain, hf)
    assert change.abs().max() > 1e-2


FACTORS = st.floats(1.5, 64.0)
OLD = st.fixed_dictionaries({"original_max_position_embeddings": st.integers(64, 32768)})
ROPES = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": FACTORS}),
    st.builds(
        dict.__or__,
        OLD,
        st.fixed_dictionaries(
            {
                "rope_type": st.just("llama3"),
                "factor": FACTORS,
                "low_freq_factor": st.floats(0.5, 2.0),
                "high_freq_factor": st.floats(2.5, 8.0),
            }
        ),
    ),
    st.builds(
        dict.__or__,
        OLD,
        st.fixed_dictionaries(
            {"rope_type": st.just("yarn"), "factor": FACTORS},
            optional={
                "beta_fast": st.floats(8.0, 64.0),
                "beta_slow": st.floats(0.5, 4.0),
                "truncate": st.booleans(),
                "attention_factor": st.floats(0.5, 2.0),
                "mscale": st.sampled_from([0, 0.7, 1.0]),
                "mscale_all_dim": st.sampled_from([0, 1.0, 1.5]),
            },
        ),
    ),
)


@given(ROPES, st.sampled_from([100.0, 1e4, 1e6]), st.sampled_from([24, 64, 128]))
def test_frequencies_and_factor_are_those_of_transformers(rope, theta, size):
    theirs = transformers.LlamaConfig(
        hidden_size=4 * size, num_attention_heads=4, intermediate_size=64, num_hidden_layers=1,
        head_dim=size, rope_parameters={**rope, "rope_theta": theta},
    )  # fmt: skip
    shape = parse_hf_config(json.dumps(theirs.to_dict()))
    with mock.patch.multiple(torch, float=torch.float64, float32=torch.float64):  # they round
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs)
    assert shape.rope_magnitude == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(rope_frequencies(shape), frequencies, rtol=1e-9, atol=0)


def test_the_window_makes_a_difference_that_the_test_would_see(tmp_path):
    shape = SHAPES["mistral"]
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    ours = logits_of_ours(shape, hf)
    for other in (15, 17, None):
        changed = dataclasses.replace(shape, sliding_window=other)
        change = logits_of_ours(changed, hf) - ours
        assert change[:, :15].abs().max() < 1e-5
        assert change.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("qwen3, layers", {"sliding_window": 17}),
        ("qwen3, layers", {"layer_types": (FULL, SLIDING)}),
        ("olmo3", {"layer_types": (SLIDING, FULL, SLIDING)}),
        ("olmo3", {"rope_local_theta": 5e5}),
        ("olmo3", {"rope_scaling_factor": 1.0, "rope_scaling": "llama3"}),
        ("gemma3", {"rope_local_theta": 1e6}),
        ("gemma3", {"query_pre_attn_scalar": 12}),
    ],
)
def test_what_differs_from_layer_to_layer_makes_a_difference_too(tmp_path, name, others):
    shape = SHAPES[name]
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    changed = dataclasses.replace(shape, **others)
    change = logits_of_ours(changed, hf) - logits_of_ours(shape, hf)
    assert change.abs().max() > 1e-2


ROPES_OF_LAYERS = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
}
CONFIGS = {
    "olmo2": ({}, Olmo2(**DIMENSIONS, rope_theta=1e6)),
    "olmo3": ({"sliding_window": 16, "rope_parameters": ROPES_OF_LAYERS},
              Olmo3(**DIMENSIONS, sliding_window=16, rope_theta=1e6, rope_local_theta=100.0,
                    rope_scaling="linear", rope_scaling_factor=8.0)),
    "gemma3_text": ({"sliding_window": 16, "sliding_window_pattern": 2, "head_dim": 24,
                     "query_pre_attn_scalar": 30, "rope_parameters": ROPES_OF_LAYERS},
                    Gemma3(**DIMENSIONS, sliding_window=16, layer_types=(SLIDING, FULL),
                           head_dim=24, query_pre_attn_scalar=30, tie_embeddings=True,
                           norm_eps=1e-6, rope_theta=1e6, rope_local_theta=100.0,
                           rope_scaling="linear", rope_scaling_factor=8.0)),
    "qwen3 of two kinds of layers": (
        {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16, "head_dim": 24},
        Qwen3(**DIMENSIONS, sliding_window=16, layer_types=(FULL, SLIDING, SLIDING), head_dim=24,
              norm_eps=1e-6, rope_theta=1e6)),
    "granite": (SCALES, Granite(**DIMENSIONS, **SCALES, norm_eps=1e-6, rope_theta=1e6)),
    "qwen2": ({"tie_word_embeddings": True},
              Qwen2(**DIMENSIONS, tie_embeddings=True, norm_eps=1e-6, rope_theta=1e6)),
    "qwen3": ({"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
              Qwen3(**DIMENSIONS, head_dim=24, attention_bias=True, tie_embeddings=True,
                    norm_eps=1e-6, rope_theta=1e6)),
    "mistral": ({"sliding_window": 16}, Mistral(**DIMENSIONS, head_dim=8, sliding_window=16,
                                                norm_eps=1e-6, rope_theta=1e6)),
    "mixtral": ({"num_local_experts": 5, "num_experts_per_tok": 3},
                Mixtral(**DIMENSIONS, rope_theta=1e6, num_experts=5, experts_per_token=3)),
    "qwen3_moe": ({"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 96},
                  Qwen3Moe(**DIMENSIONS, rope_theta=1e6, norm_eps=1e-6, num_experts=5,
                           experts_per_token=3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_transformers_saves_of_a_family_gives_its_logits_here(tmp_path, kind):
    own, shape = CONFIGS[kind]
    given = {
        "vocab_size": 200, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(shape.family, **{**given, **own})
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            param.normal_(norm_mean(shape) if "norm" in name else 0.0, 0.1)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    done = import_hf(tmp_path / "hf", tmp_path / "run", run_id="r")
    assert done.shape == shape
    export_run(tmp_path / "run", done.shape, tmp_path / "out")
    assert equal_bits(read_hf(tmp_path / "out"), read_hf(tmp_path / "hf"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == shape.family
    same_logits(theirs, shape, tmp_path / "out")


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [
        *("yarn", "qwen2 tied", "qwen3", "mistral", "mixtral", "qwen3_moe", "granite tied"),
        *("qwen3, layers", "olmo2", "olmo3", "gemma3"),
    ],
)
def test_training_has_the_losses_of_transformers(tmp_path, name):
    """SGD, whose steps are proportional to the gradients: the next loss shows wrong ones."""
    shape = SHAPES[name]
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, local_files_only=True
    )
    ours, rope = loaded(shape, hf), rope_table(shape, torch.arange(SEQ_LEN), "cpu")
    losses = []
    for model, logits_of in (
        (theirs.train(), lambda: theirs(TOKENS).logits),
        (ours, lambda: ours(TOKENS, rope)),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss = F.cross_entropy(logits_of()[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[0] - losses[2] > 0.001 * losses[0]
    assert losses[3:] == pytest.approx(losses[:3], rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_what_transformers_saves_is_imported(tmp_path, tied):
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=2, tie_word_embeddings=tied,
        max_position_embeddings=256,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    done = import_hf(tmp_path / "hf", tmp_path / "run", run_id="r")
    assert done.shape == ModelShape(
        num_layers=2, dim=64, num_heads=8, num_kv_heads=2, ffn_dim=96, vocab_size=200,
        head_dim=8, norm_eps=1e-6, rope_theta=5e5, rope_scaling_factor=8.0,
        rope_original_context=32, tie_embeddings=tied,
    )  # fmt: skip
    export_run(tmp_path / "run", done.shape, tmp_path / "out", dtype="bfloat16")
    assert equal_bits(read_hf(tmp_path / "out"), read_hf(tmp_path / "hf"))


def test_an_export_has_what_save_pretrained_writes(tmp_path):
    """Model, generation settings, tokenizer and chat template; the same tokens end a text."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))  # noqa: S106
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="?", bos_token="<s>", eos_token="</s>",  # noqa: S106
        chat_template="{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}",
    )  # fmt: skip
    config = transformers.LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, max_position_embeddings=256, bos_token_id=3, eos_token_id=[4, 1],
        pad_token_id=2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    theirs.generation_config.temperature = 0.6
    theirs.generation_config.do_sample = True
    theirs.save_pretrained(tmp_path / "hf")
    tokenizer.save_pretrained(tmp_path / "hf")
    done = import_hf(tmp_path / "hf", tmp_path / "run", run_id="r")
    kept = tmp_path / "run" / "hf"
    export_run(tmp_path / "run", done.shape, tmp_path / "out", dtype="bfloat16", beside=kept)
    saved, ours = (
        {each.name: each.read_bytes() for each in (tmp_path / name).iterdir()}
        for name in ("hf", "out")
    )
    assert ours.keys() == saved.keys()
    changed = {"config.json", "model.safetensors"}
    assert all(ours[name] == saved[name] for name in saved.keys() - changed)
    before, after = (json.loads(each["config.json"]) for each in (saved, ours))
    assert set(before) - set(after) == {
        "attention_bias",
        "dtype",
        "mlp_bias",
        "pretraining_tp",
        "rope_parameters",
        "transformers_version",
    }  # fmt: skip  of which the first ones are false or 1, and two have their older names
    assert after["torch_dtype"] == before["dtype"] == "bfloat16"
    options = {"local_files_only": True}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", **options)
    assert again.dtype == torch.bfloat16
    assert again.generation_config.to_dict() == theirs.generation_config.to_dict()
    known = {"transformers_version", "_name_or_path", "architectures"}
    one, other = ({k: v for k, v in each.items() if k not in known} for each in (
        theirs.config.to_dict(), again.config.to_dict(),
    ))  # fmt: skip
    assert one == other
    loaded_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", **options)
    chat = [{"role": "user", "content": "a"}]
    assert loaded_tokenizer.apply_chat_template(chat, tokenize=False) == "a</s>"
    assert loaded_tokenizer.get_vocab() == tokenizer.get_vocab()
