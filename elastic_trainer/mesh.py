"""Layout -> DeviceMesh; the only place that makes process groups for the mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic_trainer.layout import ParallelLayout

FSDP_AXES = ("dp_replicate", "dp_shard")


class UnsupportedLayoutError(Exception):
    """The trainer cannot run this layout: the user's mistake, not to be retried."""


def build_mesh(layout: ParallelLayout, device_type: str) -> DeviceMesh:
    """Return the mesh of `layout`, outermost axis first.

    dp becomes `dp_replicate` x `dp_shard` where it is split (HSDP), else `dp_shard`.

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
        return init_device_mesh(
            device_type, (layout.dp_replicate, layout.dp_shard), mesh_dim_names=FSDP_AXES
        )
    return init_device_mesh(device_type, (layout.dp_shard,), mesh_dim_names=FSDP_AXES[1:])
