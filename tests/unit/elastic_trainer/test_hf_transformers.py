"""What `transformers` makes of an export, and an import of what it saves. Never online."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings

import pytest
import torch
from hf_models import equal_bits, export_run, names_of, random_weights, read_hf, write_hf

from elastic_trainer.model.decoder import build, rope_table
from elastic_trainer.plan.models import PRESETS, Mistral, Mixtral, ModelShape, Qwen3
from elastic_trainer.state.hf_convert import import_hf

os.environ["HF_HUB_OFFLINE"] = "1"
with warnings.catch_warnings():
    # Of its imports, not of what is tested.
    warnings.simplefilter("ignore", DeprecationWarning)
    transformers = pytest.importorskip("transformers", reason="needs the dev extra")

SEQ_LEN = 96
DIMENSIONS = {"num_layers": 3, "dim": 64, "num_heads": 8, "num_kv_heads": 2, "ffn_dim": 96,
              "vocab_size": 200}  # fmt: skip
BASE = ModelShape(**DIMENSIONS)
SCALED = dataclasses.replace(
    PRESETS["llama3-405b"],
    **{f: getattr(BASE, f) for f in ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim")},
    vocab_size=200,
)
SHAPES = {
    "gqa": BASE,
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "head_dim": dataclasses.replace(BASE, head_dim=16),
    "theta": dataclasses.replace(BASE, rope_theta=10000.0, norm_eps=1e-6),
    "llama3-405b's rope": SCALED,
    # An old context so short that every band of the scaling shows within SEQ_LEN.
    "strong rope": dataclasses.replace(SCALED, rope_theta=100.0, rope_original_context=32),
    "qwen3": Qwen3(**DIMENSIONS, head_dim=24, attention_bias=True),
    "qwen3 tied": Qwen3(**DIMENSIONS, tie_embeddings=True, rope_theta=1e6),
    "mistral": Mistral(**DIMENSIONS, sliding_window=16),
    "mistral, all": Mistral(**DIMENSIONS, head_dim=16),
    "mixtral": Mixtral(**DIMENSIONS, num_experts=5, experts_per_token=3),
}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_of_ours(shape, path, tokens):
    model, names = build(shape).to_empty(device="cpu"), names_of(shape)
    state = {names[name]: tensor for name, tensor in read_hf(path).items()}
    if shape.tie_embeddings:
        state["head.weight"] = state["embedding.weight"]
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model(tokens, rope_table(shape, torch.arange(tokens.shape[1]), "cpu"))


def weights_of(shape):
    """Values of the size that training gives, so that logits are of order one."""
    return {name: 1 + 0.1 * t if "norm" in name else 0.1 * t
            for name, t in random_weights(shape, torch.float32).items()}  # fmt: skip


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
    tokens = torch.randint(200, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    ours = logits_of_ours(shape, tmp_path / "out", tokens)
    assert 0.1 < ours.std() < 10
    assert (ours - expected).abs().max() < 1e-5


def test_the_scaling_makes_a_difference_that_the_test_would_see(tmp_path):
    shape = SHAPES["strong rope"]
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    tokens = torch.randint(200, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    plain = dataclasses.replace(shape, rope_scaling_factor=1.0)
    change = logits_of_ours(shape, hf, tokens) - logits_of_ours(plain, hf, tokens)
    assert change.abs().max() > 1e-2


def test_the_window_makes_a_difference_that_the_test_would_see(tmp_path):
    shape = SHAPES["mistral"]
    hf = write_hf(tmp_path / "hf", shape, weights_of(shape))
    tokens = torch.randint(200, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    ours = logits_of_ours(shape, hf, tokens)
    for other in (15, 17, None):
        changed = dataclasses.replace(shape, sliding_window=other)
        change = logits_of_ours(changed, hf, tokens) - ours
        assert change[:, :15].abs().max() < 1e-5
        assert change.abs().max() > 1e-2


CONFIGS = {
    "qwen3": ({"head_dim": 24, "attention_bias": True, "tie_word_embeddings": True},
              Qwen3(**DIMENSIONS, head_dim=24, attention_bias=True, tie_embeddings=True,
                    norm_eps=1e-6, rope_theta=1e6)),
    "mistral": ({"sliding_window": 16}, Mistral(**DIMENSIONS, head_dim=8, sliding_window=16,
                                                norm_eps=1e-6, rope_theta=1e6)),
    "mixtral": ({"num_local_experts": 5, "num_experts_per_tok": 3},
                Mixtral(**DIMENSIONS, rope_theta=1e6, num_experts=5, experts_per_token=3)),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_transformers_saves_of_a_family_gives_its_logits_here(tmp_path, kind):
    own, shape = CONFIGS[kind]
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, param in theirs.named_parameters():
            param.normal_(1.0 if "norm" in name else 0.0, 0.1)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="50KB")
    done = import_hf(tmp_path / "hf", tmp_path / "run", run_id="r")
    assert done.shape == shape
    export_run(tmp_path / "run", done.shape, tmp_path / "out")
    assert equal_bits(read_hf(tmp_path / "out"), read_hf(tmp_path / "hf"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    tokens = torch.randint(200, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
    ours = logits_of_ours(shape, tmp_path / "out", tokens)
    assert 0.1 < ours.std() < 10
    assert (ours - expected).abs().max() < 1e-5


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
