"""Digests of tensors: every bit and every place counts."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.train.guard import _CHUNK, digest_of, replica_groups


def digest(tensor):
    return int(digest_of(tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_any_flipped_bit_changes_the_digest(dtype):
    tensor = torch.randn(3, 5).to(dtype)
    before = digest(tensor)
    assert digest(tensor.clone()) == before
    size = 8 * tensor.element_size()
    bits = tensor.view(-1).view(torch.uint8)
    for bit in range(15 * size):
        bits[bit // 8] ^= 1 << (bit % 8)
        assert digest(tensor) != before
        bits[bit // 8] ^= 1 << (bit % 8)
    assert digest(tensor) == before


def test_the_order_counts_also_across_chunks():
    tensor = torch.arange(2 * _CHUNK + 3, dtype=torch.float32)
    before = digest(tensor)
    for one, other in ((0, 1), (5, _CHUNK + 5), (7, 2 * _CHUNK + 2)):
        swapped = tensor.clone()
        swapped[[one, other]] = swapped[[other, one]]
        assert digest(swapped) != before
    assert digest(tensor.roll(_CHUNK)) != before


def test_bits_that_floats_call_equal_differ():
    zeros = torch.zeros(4)
    minus = zeros.clone()
    minus[2] = -0.0
    assert digest(zeros) != digest(minus)
    nan = torch.tensor([float("nan")])
    assert digest(nan) == digest(nan.clone())


def test_any_shape_and_stride_will_do():
    tensor = torch.randn(6, 4)
    assert digest(tensor.t()) == digest(tensor.t().contiguous())
    assert digest(torch.empty(0)) == 0
    assert digest(torch.tensor(2.0)) != digest(torch.tensor(3.0))


def test_a_plain_tensor_has_no_replicas():
    assert replica_groups(torch.ones(2)) == []
