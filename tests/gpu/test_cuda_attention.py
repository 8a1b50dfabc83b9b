"""Context parallelism's attention on CUDA: flash, with a mask that ends lower right."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.model import CausalAttention, attend_in_window
from elastic_trainer.parallel.context import _attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_a_later_chunk_of_queries_sees_what_causal_attention_sees(dtype, num_kv_heads):
    torch.manual_seed(0)
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(2, num_kv_heads, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    expected = CausalAttention()(q, k, v)[:, :, 128:192]
    found = _attend(q[:, :, 128:192], k, v, 192)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    ours = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [1, 40, 200])
def test_a_window_is_what_its_mask_says(dtype, num_kv_heads, window):
    """Flash's window, of all queries and of a later chunk's, against the mask on the CPU."""
    torch.manual_seed(0)
    q = torch.randn(2, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(2, num_kv_heads, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    slow = [x.detach().cpu().float().requires_grad_() for x in (q, k, v)]
    expected = attend_in_window(*slow, window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = CausalAttention(window)(q, k, v)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    part = _attend(q[:, :, 128:192], k, v, 192, window)
    torch.testing.assert_close(part, found[:, :, 128:192], rtol=tolerance, atol=tolerance)
    wanted = torch.autograd.grad(expected.square().sum(), slow)
    ours = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(
            one.cpu().float(), other, rtol=10 * tolerance, atol=10 * tolerance
        )
