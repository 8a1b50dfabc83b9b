from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_trainer.model import Block, rope_table
from elastic_trainer.models import ModelShape
from elastic_trainer.parallel.apply import _recomputed

SHAPE = ModelShape(num_layers=2, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40, vocab_size=50)
SDPA = "_scaled_dot_product_flash_attention_for_cpu"


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators_of_backward(recompute):
    torch.manual_seed(0)
    block = Block(SHAPE)
    if recompute != "none":
        block = _recomputed(block, recompute)
    x = torch.randn(2, 8, SHAPE.dim, requires_grad=True)
    loss = block(x, rope_table(SHAPE, torch.arange(8), "cpu")).sum()
    with Operators() as operators:
        loss.backward()
    assert x.grad is not None
    return operators.seen


@pytest.mark.parametrize(
    ("recompute", "products", "attention", "activation"),
    [("none", 14, 0, 0), ("selective", 14, 0, 1), ("full", 20, 1, 1)],
)
def test_recompute_repeats_what_it_says(recompute, products, attention, activation):
    """Seven projections: two products each in backward, one more where forward runs again.

    The last one's result is no input of anything, so it is never computed again.
    """
    seen = operators_of_backward(recompute)
    assert seen["mm"] == products
    assert seen[SDPA] == attention
    assert seen["silu"] == activation
