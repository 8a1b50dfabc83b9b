"""torch's grouped product on CUDA beside one product an expert; experts without rows too."""

from __future__ import annotations

import pytest
import torch

from elastic_trainer.model.grouped import ends_for, grouped_linear


@pytest.mark.parametrize("counts", [[40, 0, 7, 0, 81], [0, 0, 0, 0, 3], [128, 128, 128, 128, 128]])
def test_grouped_products_are_those_of_each_expert(counts):
    torch.manual_seed(0)
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(sum(counts), 256, **kind, requires_grad=True)
    weights = [torch.randn(512, 256, **kind, requires_grad=True) for _ in counts]
    grad = torch.randn(sum(counts), 512, **kind)
    ends = torch.tensor(counts, device="cuda").cumsum(0)
    assert ends_for(rows, weights, ends).is_cuda
    results = []
    for each in (ends_for(rows, weights, ends), ends.cpu()):
        torch.full((1 << 24,), torch.nan, **kind)  # what is left in memory
        out = grouped_linear(rows, weights, each)
        results.append([out, *torch.autograd.grad(out, [rows, *weights], grad)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
