"""Layout -> DeviceMesh; the only place that makes process groups for the mesh."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from elastic_trainer.layout import ParallelLayout

FSDP_AXES = ("dp_replicate", "dp_shard")


class UnsupportedLayoutError(Exception):
    """The trainer cannot run this layout: the user's mistake, not to be retried."""


def build_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Return the mesh of `layout`, outermost axis first.

    dp becomes `dp_replicate` x `dp_shard` where it is split (HSDP), else `dp_shard`.
    Every group of the mesh has the time-out of the default group, which must exist.

    Raises:
        UnsupportedLayoutError: an axis other than dp is larger than one.
    """
    beyond = [axis for axis in ("tp", "cp", "pp") if getattr(layout, axis) > 1]
    if beyond:
        raise UnsupportedLayoutError(
            f"HF710 layout: {layout} uses {', '.join(beyond)}; this version trains with data "
            "parallelism only (dp and dp_replicate): set the others to 1"
        )
    if layout.dp_replicate > 1:
        mesh = init_device_mesh(
            device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=FSDP_AXES
        )
    else:
        mesh = init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=FSDP_AXES[1:])
    # torch gives new groups its own default: 30 min on gloo, 10 on NCCL. Options in
    # `backend_override` would say it at once, but gloo's groups then never come up.
    timeout = group_timeout(dist.group.WORLD, device_type)
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def group_timeout(group: dist.ProcessGroup, device_type: str) -> timedelta:
    """Return how long operations of `group` on `device_type` wait for their peers."""
    options = group._get_backend(torch.device(device_type)).options  # noqa: SLF001
    timeout: timedelta = options._timeout  # noqa: SLF001
    return timeout
