"""Layout -> DeviceMesh; the only place that makes process groups for the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from elastic_trainer.layout import ParallelLayout
from elastic_trainer.rank_grid import connected_when_used

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True)
class Meshes:
    """The views of one mesh that parallelisation works on; None where the degree is one."""

    fsdp: DeviceMesh
    """Parameters are sharded over its last axis (dp_shard x cp), replicated over a first."""
    tp: DeviceMesh | None
    pp: DeviceMesh | None
    cp: DeviceMesh | None


def build_meshes(layout: ParallelLayout, device_type: str, timeout: timedelta) -> Meshes:
    """Make the process groups of `layout`, ranks in its order.

    dp becomes `dp_replicate` x `dp_shard` where it is split (HSDP), else `dp_shard`.
    Context-parallel ranks hold the same parameters, so FSDP shards over them as well.
    Collective. The default group must exist and may be unconnected.

    Args:
        layout: of as many ranks as the default group has.
        device_type: `cuda` or `cpu`.
        timeout: how long operations of every group wait for their peers.
    """
    sizes = _axis_sizes(layout)
    backend = "fake" if dist.get_backend() == "fake" else _BACKENDS[device_type]
    with connected_when_used(max(*sizes.values(), layout.dp_shard * layout.cp)):
        mesh = init_device_mesh(
            device_type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(sizes),
            backend_override=dict.fromkeys(sizes, backend),
        )
        shard_axes = tuple(axis for axis in sizes if axis in ("dp_shard", "cp"))
        shard = mesh[shard_axes]
        if len(shard_axes) > 1:
            # As torchtitan; there is no public way.
            shard = shard._flatten("fsdp", backend)  # noqa: SLF001
    fsdp = shard
    if "dp_replicate" in sizes:
        fsdp = DeviceMesh._concatenate([mesh["dp_replicate"], shard])  # noqa: SLF001
    # torch gives new groups its own default: 30 min on gloo, 10 on NCCL. Options in
    # `backend_override` would say it at once, but gloo's groups then never come up.
    for group in {*mesh.get_all_groups(), *fsdp.get_all_groups()}:
        _set_pg_timeout(timeout, group)
    views = {axis: mesh[axis] if axis in sizes else None for axis in ("tp", "pp", "cp")}
    return Meshes(fsdp=fsdp, **views)


def _axis_sizes(layout: ParallelLayout) -> dict[str, int]:
    """Return axis -> degree, outermost first; of axes of one only a needed dp_shard stays."""
    sizes = {}
    for axis in reversed(layout.order):
        if axis == "dp":
            if layout.dp_replicate > 1:
                sizes["dp_replicate"] = layout.dp_replicate
            if layout.dp_shard > 1 or layout.cp == 1:
                sizes["dp_shard"] = layout.dp_shard
        elif getattr(layout, axis) > 1:
            sizes[axis] = getattr(layout, axis)
    return sizes
