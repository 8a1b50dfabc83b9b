"""One product of all experts' rows is what each expert's own would be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_trainer.model import grouped
from elastic_trainer.model.decoder import build, rope_table
from elastic_trainer.parallel.apply import _recomputed, initialise
from elastic_trainer.plan.models import Mixtral

ROWS = st.lists(st.integers(0, 5), min_size=1, max_size=6)
SHAPE = Mixtral(
    num_layers=1, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=50,
    num_experts=6, experts_per_token=2,
)  # fmt: skip


def made(counts, dtype):
    """Return rows, a weight for each expert, where its rows end, and a gradient of the output."""
    generator = torch.Generator().manual_seed(sum(counts))

    def values(*size):
        return torch.randn(size, generator=generator).to(dtype)

    weights = [values(8, 16).requires_grad_() for _ in counts]
    rows = values(sum(counts), 16).requires_grad_()
    return rows, weights, torch.tensor(counts).cumsum(0), values(sum(counts), 8)


def results(out, grad, rows, weights):
    return [out, *torch.autograd.grad(out, [rows, *weights], grad)]


@given(ROWS, st.sampled_from([torch.float32, torch.bfloat16]))
@example([0, 0], torch.float32)
@example([0, 5, 0], torch.bfloat16)
def test_each_expert_multiplies_its_own_rows(counts, dtype):
    rows, weights, ends, grad = made(counts, dtype)
    ours = results(grouped.grouped_linear(rows, weights, ends), grad, rows, weights)
    each = [F.linear(part, w) for part, w in zip(rows.split(counts), weights, strict=True)]
    theirs = results(torch.cat(each), grad, rows, weights)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


@given(ROWS.filter(any), st.sampled_from([torch.float32, torch.bfloat16]))
@example([0, 5, 0], torch.bfloat16)
def test_torchs_grouped_product_is_the_same(counts, dtype):
    """What GPUs do; torch has it on processors too."""
    rows, weights, ends, grad = made(counts, dtype)
    results = []
    for forward, backward, given_ends in (
        (grouped._at_once, grouped._at_once_backward, ends.int()),
        (grouped._one_by_one, grouped._one_by_one_backward, ends),
    ):
        with torch.no_grad():
            rows_grad, weight_grads = backward(grad, rows, weights, given_ends)
            results.append([forward(rows, weights, given_ends), rows_grad, *weight_grads])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_operators_keep_what_torch_asks_of_them():
    """What they say of sizes is true, and they change and share nothing."""
    rows, weights, ends, grad = made([2, 0, 3], torch.float32)
    rows, weights = rows.detach(), [w.detach() for w in weights]
    tests = ("test_schema", "test_faketensor")
    ops = torch.ops.holdfast
    for op, args in (
        (ops.grouped_linear, (rows, weights, ends)),
        (ops.grouped_linear_backward, (grad, rows, weights, ends)),
    ):
        found = torch.library.opcheck(op.default, args, test_utils=tests)
        assert found == dict.fromkeys(tests, "SUCCESS")


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")  # torch warns of what it does itself
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_layer_of_experts_is_compiled_whole(recompute):
    """Without inductor, whose part takes a C++ compiler and minutes."""

    def trained(*, compiled):
        model = build(SHAPE).to_empty(device="cpu")
        initialise(model, seed=3)
        if recompute != "none":
            model.layers["0"] = _recomputed(model.layers["0"], recompute, scattered=False)
        if compiled:
            model.layers["0"].compile(fullgraph=True, backend="aot_eager")
        tokens = torch.arange(14).view(2, 7)
        model(tokens, rope_table(SHAPE, torch.arange(7), "cpu")).square().sum().backward()
        return [param.grad for param in model.parameters()]

    for ours, theirs in zip(trained(compiled=True), trained(compiled=False), strict=True):
        assert torch.equal(ours, theirs)


class Products(TorchDispatchMode):
    """Counts the products of experts, in forward's direction."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.holdfast.grouped_linear.default
        return func(*args, **(kwargs or {}))


def test_selective_recompute_keeps_one_half_of_every_experts_swiglu():
    """The other half is multiplied again, and the output, which the router's gradient needs."""
    model = build(SHAPE).to_empty(device="cpu")
    initialise(model, seed=3)
    block = _recomputed(model.layers["0"], "selective", scattered=False)
    y = block(torch.randn(2, 7, SHAPE.dim), rope_table(SHAPE, torch.arange(7), "cpu"))
    with Products() as again:
        y.sum().backward()
    assert again.count == 2
