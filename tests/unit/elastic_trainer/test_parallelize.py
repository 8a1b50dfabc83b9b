from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from elastic_trainer.model.decoder import Block, Decoder, rope_table
from elastic_trainer.parallel.apply import _recomputed
from elastic_trainer.parallel.tensor import _cut_block
from elastic_trainer.plan.models import ModelShape

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
        block = _recomputed(block, recompute, scattered=False)
    x = torch.randn(2, 8, SHAPE.dim, requires_grad=True)
    loss = block(x, rope_table(SHAPE, torch.arange(8), "cpu")).sum()
    with Operators() as operators:
        loss.backward()
    assert x.grad is not None
    return operators.seen


@pytest.mark.parametrize(
    ("recompute", "products", "attention", "activation"),
    [("none", 14, 0, 0), ("selective", 18, 0, 1), ("full", 20, 1, 1)],
)
def test_recompute_repeats_what_it_says(recompute, products, attention, activation):
    """Seven projections: two products each in backward, one more where forward runs again.

    Selective keeps those of queries and of the gate. The last one's result is no input of
    anything, so it is never computed again.
    """
    seen = operators_of_backward(recompute)
    assert seen["mm"] == products
    assert seen[SDPA] == attention
    assert seen["silu"] == activation


@pytest.fixture
def tensor_mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_recompute_repeats_no_reduce_scatter(tensor_mesh, recompute):
    """Forward reduces two branches, backward the gradients of what they gathered."""
    torch.manual_seed(0)
    block = Block(SHAPE)
    _cut_block(block, tensor_mesh, Decoder.tensor_plan)
    if recompute != "none":
        block = _recomputed(block, recompute, scattered=True)
    x = torch.randn(2, 4, SHAPE.dim, requires_grad=True)
    with Operators() as forward:
        loss = block(x, rope_table(SHAPE, torch.arange(8), "cpu")).sum()
    with Operators() as backward:
        loss.backward()
    assert forward.seen["reduce_scatter_tensor"] == 2
    assert backward.seen["reduce_scatter_tensor"] == 2
