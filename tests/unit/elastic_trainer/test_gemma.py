from __future__ import annotations

import pytest
import torch

from elastic_trainer.model.decoder import CausalAttention, build, rope_table
from elastic_trainer.model.gemma import GemmaBlock, GemmaDecoder, GemmaNorm
from elastic_trainer.plan.models import PRESETS

SHAPE = PRESETS["tiny-gemma3"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_by_one_plus_the_weight_in_fp32(dtype):
    """In bf16 1 + w itself would round a small w away."""
    norm, generator = GemmaNorm(8, eps=1e-6), torch.Generator().manual_seed(0)
    norm.weight.data.normal_(0.0, 1e-3, generator=generator)
    norm, x = norm.to(dtype), torch.randn(5, 8, generator=generator).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (expected * (1 + norm.weight.double())).to(dtype)
    out = norm(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=0)
    assert (out == expected).float().mean() > (0.5 if dtype == torch.float32 else 0.95)


def test_norms_begin_as_the_identity():
    decoder = GemmaDecoder(SHAPE)
    assert decoder.initial("layers.0.attention.q_norm.weight") == (0.0, 0.0)
    assert decoder.initial("norm.weight") == (0.0, 0.0)
    assert decoder.initial("layers.0.ffn.w1.weight")[1] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_are_scaled_once_by_what_the_type_makes_of_the_root(dtype):
    """As Gemma 3 was trained: in bf16 the root of 3072 is 55.5."""
    decoder = GemmaDecoder(SHAPE)
    scales = [layer.input_scale for layer in decoder.layers.values()]
    assert scales == [8.0, 1.0, 1.0, 1.0]
    block = GemmaBlock(SHAPE).to(dtype)
    seen, x = [], torch.ones(1, 1, 64, dtype=dtype)
    block.attention_norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    block.input_scale = 3072**0.5
    block(x, rope_table(SHAPE, torch.arange(1), "cpu")[:2])
    assert seen[0].unique().item() == torch.tensor(3072**0.5).to(dtype)


@pytest.mark.parametrize("name", ["tiny-gemma3", "tiny-olmo3", "tiny-mistral"])
def test_each_layer_has_its_window(name):
    windows = [
        module.window
        for module in build(PRESETS[name]).modules()
        if isinstance(module, CausalAttention)
    ]
    assert windows == [PRESETS[name].layer_window(layer) for layer in range(4)]


def test_each_layer_is_given_its_rope():
    decoder = GemmaDecoder(SHAPE)
    rope, seen = rope_table(SHAPE, torch.arange(3), "cpu"), []
    assert rope.shape == (4, 3, SHAPE.head_size // 2)
    for layer in decoder.layers.values():
        layer.register_forward_pre_hook(lambda _module, args: seen.append(args[1]))
    decoder(torch.zeros(1, 3, dtype=torch.int64), rope)
    assert [torch.equal(each, rope[2:]) for each in seen] == [True, False, True, False]
    assert [torch.equal(each, rope[:2]) for each in seen] == [False, True, False, True]
