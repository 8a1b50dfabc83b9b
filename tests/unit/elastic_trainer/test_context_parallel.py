from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.model.decoder import CausalAttention
from elastic_trainer.parallel import context as context_parallel
from elastic_trainer.parallel.context import GatheredAttention, zigzag_positions


@given(cp=st.integers(1, 9), chunk=st.integers(1, 7))
def test_every_position_is_held_once(cp, chunk):
    seq_len = 2 * cp * chunk
    parts = [zigzag_positions(seq_len, cp, rank) for rank in range(cp)]
    assert sorted(torch.cat(parts).tolist()) == list(range(seq_len))
    assert {len(part) for part in parts} == {2 * chunk}


@given(cp=st.integers(2, 9), chunk=st.integers(1, 7))
def test_the_causal_mask_gives_every_rank_the_same_work(cp, chunk):
    parts = [zigzag_positions(2 * cp * chunk, cp, rank) for rank in range(cp)]
    assert len({int((part + 1).sum()) for part in parts}) == 1


class Mesh:
    """Rank `rank` of a group whose other ranks are simulated."""

    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def get_group(self):
        return self

    def size(self):
        return self._size

    def get_local_rank(self):
        return self._rank


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("cp", [2, 3])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 100])
def test_gathered_attention_is_attention(cp, num_kv_heads, window, separate, monkeypatch):
    """Each rank's rows of the output and, summed over ranks, the gradients."""
    torch.manual_seed(0)
    seq_len = 4 * cp * 3
    documents = None
    if separate:  # over ranks' borders, and of one position
        rows = [[0] * 7 + [7] * 9 + [16] * (seq_len - 16), [0] + [1] * (seq_len - 1)]
        documents = torch.tensor(rows)
    q = torch.randn(2, 4, seq_len, 8, dtype=torch.float64, requires_grad=True)
    k, v = (
        torch.randn(2, num_kv_heads, seq_len, 8, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    expected = CausalAttention(window)(q, k, v, documents)
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    parts = [zigzag_positions(seq_len, cp, rank) for rank in range(cp)]
    every = torch.stack([torch.stack([k[:, :, part], v[:, :, part]]) for part in parts])

    def gather(mine, gather_dim, group):
        assert gather_dim == 0
        torch.testing.assert_close(mine[0], every[group.get_local_rank()])
        return every

    monkeypatch.setattr(context_parallel, "all_gather_single_autograd", gather)
    total = torch.zeros((), dtype=torch.float64)
    for rank, part in enumerate(parts):
        attention = GatheredAttention(Mesh(cp, rank), window)
        mine = None if documents is None else documents[:, part]
        out = attention(q[:, :, part], k[:, :, part], v[:, :, part], mine)
        torch.testing.assert_close(out, expected[:, :, part])
        total = total + out.square().sum()
    for ours, theirs in zip(torch.autograd.grad(total, (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert math.isclose(total.item(), expected.square().sum().item())
