from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model.decoder import (
    Decoder,
    apply_rope,
    initial_rows,
    rope_frequencies,
    rope_table,
)
from elastic_trainer.parallel.apply import initialise
from elastic_trainer.plan.models import PRESETS, ModelShape

SHAPE = ModelShape(num_layers=2, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=50)


def build(shape=SHAPE, seed=0):
    model = Decoder(shape)
    initialise(model, seed)
    return model


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", None),
        ("qwen3-8b", 8_190_735_360),
        ("mistral-7b", 7_241_732_096),
        ("tiny-qwen3", None),
    ],
)
def test_the_model_has_the_published_number_of_parameters(name, published):
    with torch.device("meta"):
        model = Decoder(PRESETS[name])
    count = sum(param.numel() for param in model.parameters())
    assert count == (published or PRESETS[name].num_params())


def test_tied_embeddings_are_one_parameter():
    shape = ModelShape(
        num_layers=1,
        dim=8,
        num_heads=2,
        num_kv_heads=1,
        ffn_dim=8,
        vocab_size=10,
        tie_embeddings=True,
    )
    model = Decoder(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.num_params()
    assert "head.weight" not in dict(model.named_parameters())


def hugging_face_frequencies(shape):
    """`_compute_llama3_parameters` of Hugging Face transformers, one frequency at a time."""
    out = []
    for i in range(0, shape.head_size, 2):
        frequency = 1.0 / shape.rope_theta ** (i / shape.head_size)
        wavelength = 2 * math.pi / frequency
        low = shape.rope_original_context / shape.rope_low_freq_factor
        high = shape.rope_original_context / shape.rope_high_freq_factor
        if wavelength > low:
            frequency /= shape.rope_scaling_factor
        elif wavelength >= high:
            smooth = (shape.rope_original_context / wavelength - shape.rope_low_freq_factor) / (
                shape.rope_high_freq_factor - shape.rope_low_freq_factor
            )
            scaled = frequency / shape.rope_scaling_factor
            frequency = (1 - smooth) * scaled + smooth * frequency
        out.append(frequency)
    return torch.tensor(out, dtype=torch.float64)


def test_long_context_scaling_is_llama_31s():
    shape = PRESETS["llama3-405b"]
    ours, theirs = rope_frequencies(shape), hugging_face_frequencies(shape)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    plain = rope_frequencies(PRESETS["llama3-8b"])
    ratios = plain / ours
    assert ratios[0] == 1.0  # short waves are left alone
    assert ratios[-1] == pytest.approx(8.0)  # long ones are stretched
    assert 1.0 < ratios[32] < 8.0  # those between are interpolated
    assert plain[1].item() == pytest.approx(500000 ** (-2 / 128))


def test_rotation_is_hugging_faces():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    shape = ModelShape(
        num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8, vocab_size=8, rope_theta=100.0
    )
    table = rope_table(shape, torch.arange(5), "cpu")
    assert table.shape == (2, 5, 4)
    cos, sin = (torch.cat([part, part], dim=-1) for part in table)
    rotated_half = torch.cat([-x[..., 4:], x[..., :4]], dim=-1)
    expected = x * cos + rotated_half * sin
    torch.testing.assert_close(apply_rope(x, table), expected, rtol=1e-5, atol=1e-6)
    assert apply_rope(x.bfloat16(), table).dtype == torch.bfloat16


def reference(model, tokens):
    """The same decoder written out with nothing but matrix products."""
    weights = dict(model.named_parameters())
    shape, size = model.shape, model.shape.head_size
    table = rope_table(shape, torch.arange(len(tokens)), "cpu")
    cos, sin = (torch.cat([part, part], dim=-1) for part in table)
    mask = torch.full((len(tokens), len(tokens)), -math.inf).triu(1)

    def norm(x, name):
        return x / (x.square().mean(-1, keepdim=True) + shape.norm_eps).sqrt() * weights[name]

    def rotated(x):
        return x * cos + torch.cat([-x[:, size // 2 :], x[:, : size // 2]], dim=-1) * sin

    x = weights["embedding.weight"][tokens]
    for i in range(shape.num_layers):
        at = f"layers.{i}."
        h = norm(x, at + "attention_norm.weight")
        q, k, v = (h @ weights[f"{at}attention.{w}.weight"].T for w in ("wq", "wk", "wv"))
        heads = []
        for head in range(shape.num_heads):
            kv = head * shape.num_kv_heads // shape.num_heads
            mine, shared = slice(head * size, (head + 1) * size), slice(kv * size, (kv + 1) * size)
            scores = rotated(q[:, mine]) @ rotated(k[:, shared]).T / math.sqrt(size)
            heads.append((scores + mask).softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, dim=-1) @ weights[at + "attention.wo.weight"].T
        h = norm(x, at + "ffn_norm.weight")
        gate, up, down = (weights[f"{at}ffn.{w}.weight"] for w in ("w1", "w3", "w2"))
        x = x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T
    return norm(x, "norm.weight") @ weights["head.weight"].T


@pytest.mark.process
def test_the_decoder_computes_what_a_plain_one_does():
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(5).add_(0.01)  # away from the start, where attention is uniform
    tokens = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
    logits = model(tokens, rope_table(SHAPE, torch.arange(8), "cpu"))
    for row, sequence in zip(logits, tokens, strict=True):
        torch.testing.assert_close(row, reference(model, sequence), rtol=1e-4, atol=1e-4)


def test_no_token_sees_a_later_one():
    model, rope = build(), rope_table(SHAPE, torch.arange(6), "cpu")
    one, other = torch.tensor([[1, 2, 3, 4, 5, 6]]), torch.tensor([[1, 2, 3, 9, 9, 9]])
    a, b = model(one, rope), model(other, rope)
    assert torch.equal(a[:, :3], b[:, :3])
    assert not torch.equal(a[:, 3:], b[:, 3:])


def packed(lengths):
    """Where the document of each position begins, of documents of `lengths` positions."""
    begins = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor([[b for b, n in zip(begins, lengths, strict=True) for _ in range(n)]])


def test_packed_documents_are_computed_as_if_alone():
    model, lengths = build(), [3, 1, 600, 40]  # longer than a block of the CPU's kernel, too
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(5).add_(0.01)
    tokens = torch.randint(50, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    rope = rope_table(SHAPE, torch.arange(sum(lengths)), "cpu")
    together = model(tokens, rope, packed(lengths))
    at = 0
    for length in lengths:
        part = slice(at, at + length)
        alone = model(tokens[:, part], rope[:, :length])  # at the positions of a window's start
        torch.testing.assert_close(together[:, part], alone, rtol=1e-4, atol=1e-4)
        at += length
    one = model(tokens, rope, packed([sum(lengths)]))
    torch.testing.assert_close(one, model(tokens, rope), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_document_changes_neither_the_logits_nor_the_gradient_of_another(changed):
    model, lengths = build(), [70, 530, 45]
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(50, (1, sum(lengths)), generator=generator)
    rope, documents = rope_table(SHAPE, torch.arange(sum(lengths)), "cpu"), packed(lengths)
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    parts = [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]
    other = tokens.clone()
    other[:, parts[changed]] = torch.randint(50, (1, lengths[changed]), generator=generator)
    results = []
    for each in (tokens, other):
        logits = model(each, rope, documents)
        found = []
        for i, part in enumerate(parts):
            if i != changed:
                loss = F.cross_entropy(logits[0, part], tokens[0, part])
                grads = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                found += [logits[:, part].detach(), *grads]
        results.append(found)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def rows_of(name, size, rows, seed):
    mean, deviation = Decoder(SHAPE).initial(name)
    return initial_rows(name, size, rows, seed, mean=mean, deviation=deviation)


def whole(name, size, seed):
    return rows_of(name, size, range(size[0]), seed)


def test_initial_values_depend_on_seed_and_name_alone():
    size = torch.Size([200, 100])
    name = "layers.0.ffn.w1.weight"
    value = whole(name, size, 1)
    torch.manual_seed(99)
    assert torch.equal(whole(name, size, 1), value)
    assert not torch.equal(whole(name, size, 2), value)
    assert not torch.equal(whole("layers.1.ffn.w1.weight", size, 1), value)
    assert value.std().item() == pytest.approx(0.02, rel=0.03)
    joined = whole("layers.0.attention.wo.weight", size, 1)
    assert joined.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.03)
    assert whole("layers.0.ffn_norm.weight", torch.Size([4]), 1).tolist() == [1] * 4


@given(st.integers(0, 200), st.integers(0, 200))
def test_any_rows_of_an_initial_value_are_those_of_the_whole(one, other):
    size = torch.Size([200, 3])
    first, stop = sorted([one, other])
    for name in ("embedding.weight", "norm.weight"):
        rows = rows_of(name, size, range(first, stop), 1)
        assert torch.equal(rows, whole(name, size, 1)[first:stop])
    assert not torch.equal(
        whole("head.weight", size, 1)[:64], whole("head.weight", size, 1)[64:128]
    )
