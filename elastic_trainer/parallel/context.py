"""Context parallelism: zigzag halves, and attention over all-gathered keys and values.

Llama 3's scheme (arXiv 2407.21783, section 3.3.2): the sequence is cut into 2 cp
chunks and rank r holds chunks r and 2 cp - 1 - r, so that the causal mask gives every
rank the same work. Queries stay, keys and values are gathered.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastic_trainer.model.decoder import attend
from elastic_trainer.worker.torch_private import all_gather_single_autograd


def zigzag_positions(seq_len: int, cp: int, cp_rank: int) -> Tensor:
    """Return the positions rank `cp_rank` holds, in its order: int64, shape (T / cp,)."""
    positions = torch.arange(seq_len)
    if cp == 1:
        return positions
    assert seq_len % (2 * cp) == 0, f"{seq_len} positions, cp {cp}"
    chunks = positions.chunk(2 * cp)
    return torch.cat([chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]])


class GatheredAttention(nn.Module):
    """Causal attention of this rank's queries over everybody's keys and values.

    Args:
        mesh: of the context-parallel ranks.
        window: tokens a position sees, itself included; None: all before it.
        scale: of the scores; None: 1 / sqrt(E).
    """

    def __init__(
        self, mesh: DeviceMesh, window: int | None = None, scale: float | None = None
    ) -> None:
        super().__init__()
        self.window, self.scale = window, scale
        self._group = mesh.get_group()
        self._size, self._rank = mesh.size(), mesh.get_local_rank()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map q (B, H, T, E) and k, v (B, K, T, E) to (B, H, T, E); T is this rank's part.

        `documents` (B, T) counts positions of the whole sequence, see `Decoder`.
        """
        k, v = self._gather(k, v)
        length = q.shape[2] // 2
        stops = length * (self._rank + 1), length * (2 * self._size - self._rank)
        begins = (None, None) if documents is None else documents.split(length, dim=1)
        attends = partial(attend, window=self.window, scale=self.scale)
        out = [
            attends(part, k[:, :, :stop], v[:, :, :stop], documents=begin)
            for part, stop, begin in zip(q.split(length, dim=2), stops, begins, strict=True)
        ]
        return torch.cat(out, dim=2)

    def _gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the whole sequence's keys and values, in the order of positions."""
        mine = torch.stack([k, v]).unsqueeze(0)  # (1, 2, B, K, T, E)
        every = all_gather_single_autograd(mine.contiguous(), gather_dim=0, group=self._group)
        early, late = every.unflatten(4, (2, -1)).unbind(4)  # each (cp, 2, B, K, T/2, E)
        whole = torch.cat([early, late.flip(0)])  # chunk 2 cp - 1 - r is rank r's late one
        k, v = whole.movedim(0, 3).flatten(3, 4)  # (2, B, K, 2 cp, T/2, E) and joined
        return k, v
