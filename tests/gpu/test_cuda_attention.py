"""Context parallelism's attention on CUDA: flash, with a mask that ends lower right."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.model.decoder import CausalAttention, attend


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_packed_documents_are_computed_as_if_alone(dtype, num_kv_heads):
    torch.manual_seed(0)
    q = torch.randn(1, 4, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(1, num_kv_heads, 256, 64, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    documents = torch.tensor([[0] * 100 + [100] * 156], device="cuda")
    alone = [
        CausalAttention()(q[:, :, part], k[:, :, part], v[:, :, part])
        for part in (slice(0, 100), slice(100, 256))
    ]
    expected = torch.cat(alone, dim=2)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    whole = CausalAttention()(q, k, v, documents)
    chunk = attend(q[:, :, 128:192], k[:, :, :192], v[:, :, :192], documents=documents[:, 128:192])
    torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(chunk, expected[:, :, 128:192], rtol=tolerance, atol=tolerance)
    wanted = torch.autograd.grad(expected.float().square().sum(), (q, k, v))
    ours = torch.autograd.grad(whole.float().square().sum(), (q, k, v))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)


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
    found = attend(q[:, :, 128:192], k[:, :, :192], v[:, :, :192])
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
    expected = attend(*slow, window=window)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = CausalAttention(window)(q, k, v)
    torch.testing.assert_close(found.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    part = attend(q[:, :, 128:192], k[:, :, :192], v[:, :, :192], window=window)
    torch.testing.assert_close(part, found[:, :, 128:192], rtol=tolerance, atol=tolerance)
    wanted = torch.autograd.grad(expected.square().sum(), slow)
    ours = torch.autograd.grad(found.float().square().sum(), (q, k, v))
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(
            one.cpu().float(), other, rtol=10 * tolerance, atol=10 * tolerance
        )
