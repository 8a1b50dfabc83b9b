"""A router, its experts, and what does not count them twice."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model.decoder import build, rope_table
from elastic_trainer.model.mixture import Mixture
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan.layout import split_layers
from elastic_trainer.plan.models import PRESETS, Mistral, Mixtral

SHAPE = Mixtral(
    num_layers=2, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=50,
    num_experts=6, experts_per_token=2,
)  # fmt: skip


def made(shape=SHAPE):
    model = build(shape).to_empty(device="cpu")
    initialise(model, seed=3)
    return model


def one_token(mixture, token):
    """What transformers' MixtralSparseMoeBlock does, for one token."""
    shares = F.softmax(mixture.router(token).float(), dim=-1)
    values, chosen = torch.topk(shares, 2)
    out = torch.zeros_like(token)
    for value, number in zip(values / values.sum(), chosen.tolist(), strict=True):
        expert = mixture.experts[str(number)]
        out += value * expert.w2(F.silu(expert.w1(token)) * expert.w3(token))
    return out


def test_a_token_is_the_weighted_sum_of_its_experts():
    mixture = made().layers["0"].ffn
    assert isinstance(mixture, Mixture)
    x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = mixture(x)
        expected = torch.stack([one_token(mixture, token) for token in x.flatten(0, 1)])
    assert y.std() > 1e-5
    torch.testing.assert_close(y.flatten(0, 1), expected, rtol=1e-5, atol=1e-8)


def test_an_expert_that_no_token_chose_has_a_gradient_of_zeros():
    """Ranks reduce an expert's gradient together: none may leave it out."""
    model = made()
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    model(tokens, rope_table(SHAPE, torch.arange(1), "cpu")).sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters() if "experts" in name}
    assert all(grad is not None for grad in grads.values())
    idle = [name for name, grad in grads.items() if not grad.any()]
    assert len(idle) == 2 * 4 * 3  # layers, experts, matrices


def test_what_experts_add_to_the_residual_stream_starts_as_small_as_a_feed_forwards():
    assert made().initial("layers.0.ffn.experts.4.w2.weight") == (0.0, 0.02 / (2 * 2) ** 0.5)
    assert made().initial("layers.0.ffn.experts.4.w1.weight") == (0.0, 0.02)
    assert made().initial("layers.0.ffn.router.weight") == (0.0, 0.02)


def test_all_experts_count_in_bytes_and_those_of_a_token_in_flops():
    shape = PRESETS["mixtral-8x7b"]
    assert shape.num_params() == 46_702_792_704
    assert shape.active_params() == 12_879_925_248
    fields = {f.name: getattr(shape, f.name) for f in dataclasses.fields(Mistral)}
    dense = Mistral(**{**fields, "ffn_dim": 2 * shape.ffn_dim})
    routers = 6 * 32 * 8 * 4096
    assert shape.flops_per_token(8192) == dense.flops_per_token(8192) + routers


def test_stages_are_cut_by_what_a_token_meets():
    """By all parameters a table would weigh next to nothing beside a layer of 64 experts."""
    shape = dataclasses.replace(SHAPE, num_layers=8, vocab_size=400, num_experts=64)
    spans = split_layers(shape, 2)
    assert [len(span.layers) for span in spans] == [4, 4]
    first, *_, last = split_layers(shape, 4)
    assert (len(first.layers), len(last.layers)) == (1, 1)


@pytest.mark.parametrize("name", ["tiny-mixtral", "mixtral-8x7b"])
def test_the_model_has_as_many_parameters_as_its_shape_says(name):
    count = sum(param.numel() for param in build(PRESETS[name]).parameters())
    assert count == PRESETS[name].num_params()
