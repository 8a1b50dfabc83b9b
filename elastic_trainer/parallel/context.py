"""Context parallelism: zigzag halves, and attention over all-gathered keys and values.

Llama 3's scheme (arXiv 2407.21783, section 3.3.2): the sequence is cut into 2 cp
chunks and rank r holds chunks r and 2 cp - 1 - r, so that the causal mask gives every
rank the same work. Queries stay, keys and values are gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F  # noqa: N812

from elastic_trainer.model import FLASH_DTYPES, attend_in_window


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
    """

    def __init__(self, mesh: DeviceMesh, window: int | None = None) -> None:
        super().__init__()
        self.window = window
        self._group = mesh.get_group()
        self._size, self._rank = mesh.size(), mesh.get_local_rank()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Map q (B, H, T, E) and k, v (B, K, T, E) to (B, H, T, E); T is this rank's part."""
        k, v = self._gather(k, v)
        length = q.shape[2] // 2
        chunks = (self._rank, 2 * self._size - 1 - self._rank)
        out = [
            _attend(part, k, v, length * (chunk + 1), self.window)
            for part, chunk in zip(q.split(length, dim=2), chunks, strict=True)
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


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: int, window: int | None = None) -> Tensor:
    """Attend to the first `visible` keys; the last query sees them all, or the last `window`.

    What torch's `causal_lower_right` does, which cannot be made under activation
    checkpointing: this operator's causal mask ends at the lower right corner.
    """
    if window is not None and window < visible:
        begin = max(0, visible - q.shape[2] - window + 1)  # the first key that the first query sees
        return attend_in_window(q, k[:, :, begin:visible], v[:, :, begin:visible], window)
    k, v = k[:, :, :visible], v[:, :, :visible]
    if q.is_cuda and q.dtype in FLASH_DTYPES and q.shape[-1] % 8 == 0:
        flash = torch.ops.aten._scaled_dot_product_flash_attention  # noqa: SLF001
        out: Tensor = flash(q, k, v, is_causal=True)[0]
        return out
    length = q.shape[2]
    mask = torch.ones(length, visible, dtype=torch.bool, device=q.device)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.tril(visible - length), enable_gqa=q.shape[1] != k.shape[1]
    )
