"""Layout -> DeviceMesh; the only place that makes process groups for the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.worker.rank_grid import connected_when_used
from elastic_trainer.worker.torch_private import concatenate, connect_nccl, flatten, set_timeout

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Meshes:
    """The views of one mesh that parallelisation works on; None where the degree is one."""

    fsdp: DeviceMesh
    """Parameters are sharded over its last axis (dp_shard x cp), replicated over a first."""
    tp: DeviceMesh | None
    pp: DeviceMesh | None
    cp: DeviceMesh | None
    ep: DeviceMesh | None
    experts: DeviceMesh
    """As `fsdp`, of the ranks that keep the same experts: dp_shard / ep x cp."""

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Those that are used, in the same order on every rank: not parts of a flattened axis."""
        views = (self.fsdp, self.experts, self.tp, self.pp, self.cp, self.ep)
        used = [view for view in views if view is not None]
        return tuple(dict.fromkeys(group for view in used for group in view.get_all_groups()))


def build_meshes(layout: ParallelLayout, device: torch.device, timeout: timedelta) -> Meshes:
    """Make the process groups of `layout`, ranks in its order.

    dp becomes `dp_replicate` x `dp_shard` where it is split (HSDP), else `dp_shard`; of that the
    innermost part is `ep`, and `dp_shard` what is left.
    Context-parallel ranks hold the same parameters, so FSDP shards over them as well.
    Collective. The default group must exist and may be unconnected: no group has all ranks, unless
    an axis has. Groups are connected when they are returned.

    Args:
        layout: of as many ranks as the default group has.
        device: that this rank computes on.
        timeout: how long operations of every group wait for their peers.
    """
    sizes = _axis_sizes(layout)
    backend = "fake" if dist.get_backend() == "fake" else _BACKENDS[device.type]
    with connected_when_used(max(*sizes.values(), layout.dp_shard * layout.cp)):
        mesh = init_device_mesh(
            device.type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override=dict.fromkeys(sizes, backend),
        )
        fsdp = _sharded_over(mesh, ("dp_shard", "ep", "cp"), "fsdp", backend)
        experts = fsdp
        if layout.ep > 1:
            experts = _sharded_over(mesh, ("dp_shard", "cp"), "experts", backend)
    # torch gives new groups its own default: 30 min on gloo, 10 on NCCL. Options in
    # `backend_override` would say it at once, but gloo's groups then never come up.
    for group in {*mesh.get_all_groups(), *fsdp.get_all_groups(), *experts.get_all_groups()}:
        set_timeout(group, timeout)
    views = {axis: mesh[axis] if axis in sizes else None for axis in ("tp", "pp", "cp", "ep")}
    meshes = Meshes(fsdp=fsdp, experts=experts, **views)
    for group in meshes.groups:  # in another order they would wait in a ring
        connect(group, device)
    return meshes


def connect(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make NCCL's communicator of `group` now, not in the first step; collective.

    gloo's are connected already. torch does so only below an NCCL default group with a `device_id`,
    which would have a communicator of all ranks.
    """
    if dist.get_backend(group) == "nccl":
        connect_nccl(group, device)


def _sharded_over(mesh: DeviceMesh, axes: tuple[str, ...], name: str, backend: str) -> DeviceMesh:
    """Return the mesh of FSDP over those of `axes` that `mesh` has, with HSDP's before it."""
    names = mesh.mesh_dim_names or ()
    found = tuple(axis for axis in names if axis in axes)
    shard = mesh[found]
    if len(found) > 1:
        shard = flatten(shard, name, backend)
    if "dp_replicate" in names:
        return concatenate([mesh["dp_replicate"], shard])
    return shard


def _axis_sizes(layout: ParallelLayout) -> dict[str, int]:
    """Return axis -> degree, outermost first; of axes of one only a needed dp_shard stays."""
    sizes = {}
    for axis in reversed(layout.order):
        if axis == "dp":
            if layout.dp_replicate > 1:
                sizes["dp_replicate"] = layout.dp_replicate
            if layout.dp_shard > layout.ep or layout.cp == 1:
                sizes["dp_shard"] = layout.dp_shard // layout.ep
            if layout.ep > 1:
                sizes["ep"] = layout.ep
        elif getattr(layout, axis) > 1:
            sizes[axis] = getattr(layout, axis)
    return sizes
