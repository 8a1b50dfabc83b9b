"""A norm over columns of which each rank has some, against the norm of all of them."""

from __future__ import annotations

import threading
from typing import NamedTuple

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.parallel import tensor

EPS = 1e-6


class Mesh(NamedTuple):
    rank: int
    ranks: int

    def size(self):
        return self.ranks


class Ranks:
    """Ranks as threads: what each gives to a reduction is summed once all have come."""

    def __init__(self, size):
        self.given, self.barrier = [None] * size, threading.Barrier(size)

    def all_reduce(self, value, how, mesh):
        assert how == "sum"
        self.given[mesh.rank] = value
        self.barrier.wait(30)
        total = sum(self.given)
        self.barrier.wait(30)
        return total

    def run(self, function):
        threads = [threading.Thread(target=function, args=(r,)) for r in range(len(self.given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-6), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_is_the_norm_of_all_columns_and_so_is_its_gradient(size, dtype, within, monkeypatch):
    generator = torch.Generator().manual_seed(size)
    x, weight, after = (
        torch.randn(shape, generator=generator, dtype=dtype)
        for shape in ((2, 5, 12), (12,), (2, 5, 12))
    )
    x *= torch.tensor([1e-3, 1.0, 30.0, 1e-2, 5.0], dtype=dtype)[:, None]  # rows of all sizes
    whole = [each.clone().requires_grad_() for each in (x, weight)]
    expected = F.rms_norm(whole[0], (12,), whole[1], EPS)
    expected.backward(after)

    ranks, found = Ranks(size), [None] * size
    monkeypatch.setattr(tensor, "all_reduce", ranks.all_reduce)

    def rank(number):
        mine = [each.chunk(size, -1)[number].clone().requires_grad_() for each in (x, weight)]
        y = tensor._SplitNorm.apply(*mine, EPS, Mesh(number, size))
        y.backward(after.chunk(size, -1)[number])
        found[number] = (y.detach(), *(each.grad for each in mine))

    ranks.run(rank)
    theirs = (expected.detach(), *(each.grad for each in whole))
    for ours, want in zip(zip(*found, strict=True), theirs, strict=True):
        joined = torch.cat(ours, -1)
        assert joined.dtype == dtype
        assert (joined - want).norm() <= within * want.norm()
