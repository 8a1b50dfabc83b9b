"""Are replicas of a shard bitwise equal? Finds silent data corruption while training continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from elastic_trainer.plan.anomalies import Odd, odd_ones_out

_CHUNK = 1 << 20
"""Elements digested at a time; bounds the temporary memory to 16 MiB."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)
"""Odd: 2**64 over the golden ratio, as a signed 64-bit number."""


class ReplicaMismatchError(Exception):
    """Replicas of a shard differ and no majority says which is wrong; they may all restart."""


class SilentCorruptionError(Exception):
    """This rank's state differs from that of most of its replicas: its node must leave."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Replicas that differ, and how."""

    ranks: tuple[int, ...]
    """Global ranks of the suspects."""
    group: tuple[int, ...]
    """Global ranks of all that hold the shard."""
    tensor: str
    """Name of the first tensor that differs."""
    named: bool
    """Whether a majority says that the suspects are wrong."""
    process_group: dist.ProcessGroup

    def __str__(self) -> str:
        """Return it in words."""
        suspects = ", ".join(map(str, self.ranks))
        if self.named:
            return (
                f"{self.tensor} of rank {suspects} differs from that of the other replicas "
                f"(ranks {', '.join(map(str, self.group))})"
            )
        return (
            f"{self.tensor} differs between ranks {suspects}, and no majority says whose is wrong"
        )


class Digester:
    """Makes 64-bit digests of tensors' bits, on their device."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, Tensor] = {}

    def digest(self, tensor: Tensor) -> Tensor:
        """Return sum(w[i] * x[i]) modulo 2**64 over the bit patterns x, an int64 scalar.

        The weights w are odd and differ from place to place: any single bit that flips changes
        the sum, and so do two values that change places. A sum of integers is the same in any
        order, so the digest is exact.
        """
        flat = tensor.detach().contiguous().view(-1)
        bits = flat.view(_INTEGERS[flat.element_size()])
        weights = self._weights_on(bits.device)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for begin in range(0, bits.numel(), _CHUNK):
            part = bits[begin : begin + _CHUNK]
            # int64 products and sums wrap around; an odd factor loses no bit.
            total = total * _MULTIPLIER + (weights[: part.numel()] * part).sum()
        return total

    def _weights_on(self, device: torch.device) -> Tensor:
        weights = self._weights.get(device)
        if weights is None:
            places = torch.arange(1, _CHUNK + 1, dtype=torch.int64, device=device)
            weights = self._weights[device] = (places * _MULTIPLIER) | 1
        return weights


class ReplicaCheck:
    """Compares the tensors that other ranks hold alike; one for the life of a trainer."""

    def __init__(self) -> None:
        self._digester = Digester()

    @torch.no_grad()
    def run(self, tensors: Mapping[str, Tensor]) -> Mismatch | None:
        """Compare `tensors` with their replicas; collective over each group of replicas.

        Ranks of another group do not learn what is found here.

        Args:
            tensors: by name. Those that are DTensors and replicated over some axis of their
                mesh are compared over that axis: all ranks of it call with the same names.
        """
        by_group: dict[dist.ProcessGroup, list[str]] = {}
        for name, tensor in tensors.items():
            for group in replica_groups(tensor):
                by_group.setdefault(group, []).append(name)
        for group, names in by_group.items():
            odd = self._compare(group, [tensors[name] for name in names])
            if odd is not None:
                members = dist.get_process_group_ranks(group)
                return Mismatch(
                    ranks=tuple(members[i] for i in odd.ranks),
                    group=tuple(members),
                    tensor=names[odd.column],
                    named=odd.named,
                    process_group=group,
                )
        return None

    def _compare(self, group: dist.ProcessGroup, tensors: list[Tensor]) -> Odd | None:
        mine = torch.stack([self._digester.digest(_local(tensor)) for tensor in tensors])
        everybody = mine.new_empty(dist.get_world_size(group) * len(tensors))
        dist.all_gather_into_tensor(everybody, mine, group=group)
        return odd_ones_out(everybody.view(-1, len(tensors)).tolist())


def replica_groups(tensor: Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks that hold the same part of `tensor` as this one."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    return [
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate() and mesh.size(axis) > 1
    ]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
