"""Expert parallelism: each rank of a group keeps some of the experts, tokens go to them and back.

Groups lie inside dp_shard, so a rank's own tokens are those of its dp index as ever, and all of an
expert's gradient is on the ranks that keep it: FSDP sums it over those.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from elastic_trainer.model.mixture import Experts
from elastic_trainer.worker.torch_private import all_to_all_single_autograd


class SplitExperts(Experts):
    """This rank's of `experts`, under their numbers.

    Args:
        experts: all of them; as many for each rank of `mesh`.
        mesh: of the ranks among which they are split.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        each = len(experts) // mesh.size()
        first = each * mesh.get_local_rank()
        mine = list(experts.items())[first : first + each]
        super().__init__(dict(mine))
        self._group, self._size = mesh.get_group(), mesh.size()

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return len(self) * self._size

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows (R, D), sorted by expert, to their experts' outputs (R, D)."""
        came = torch.empty_like(counts)  # (rank it is from, expert)
        dist.all_to_all_single(came, counts, group=self._group)
        came = came.view(self._size, -1)
        out_rows, in_rows = (each.view(self._size, -1).sum(1).tolist() for each in (counts, came))
        there = all_to_all_single_autograd(rows, in_rows, out_rows, self._group)
        numbers = torch.arange(len(self), device=rows.device).repeat(self._size)
        order = numbers.repeat_interleave(came.flatten()).argsort(stable=True)
        done = super().compute(there[order], came.sum(0))[order.argsort()]
        back: Tensor = all_to_all_single_autograd(done, out_rows, in_rows, self._group)
        return back


def split_experts(block: nn.Module, mesh: DeviceMesh) -> None:
    """Leave in `block`, on the meta device, this rank's experts of every mixture."""
    for parent in list(block.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Experts):
                setattr(parent, name, SplitExperts(child, mesh))
