"""Which part of the state a rank holds, and which node keeps the copy of it. Pure."""

from __future__ import annotations

import dataclasses

from elastic_trainer.layout import ParallelLayout


def shard_of(layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """Return (which part of the state `rank` holds, how many parts there are).

    Replicas of HSDP hold the same part; without it every rank has a part of its own.
    """
    here = layout.coordinate(rank)
    inside = dataclasses.replace(layout, dp=layout.dp_shard, dp_replicate=1)
    return inside.rank({**here, "dp": here["dp"] % layout.dp_shard}), inside.world_size


def copy_node(layout: ParallelLayout, rank: int, workers: int) -> int | None:
    """Return the node (its index in the rung) that keeps a copy of what `rank` holds.

    Another dp replica's node before any other, since what takes a node often takes its
    neighbours in the same replica (a rack, a switch). The next dp index is a permutation
    of the ranks, so every node keeps as much as it gives away.

    Args:
        layout: of the epoch.
        rank: whose state it is.
        workers: per node; node i has ranks i * workers ... (i + 1) * workers - 1.

    Returns:
        None when nothing is to be sent: a replica on another node holds the same already, or
        there is no other node.
    """
    num_nodes = layout.world_size // workers
    node, here = rank // workers, layout.coordinate(rank)
    shard, _ = shard_of(layout, rank)
    along_dp = [other for other in layout.ranks_along("dp", rank) if other // workers != node]
    if num_nodes == 1 or any(shard_of(layout, other)[0] == shard for other in along_dp):
        return None
    after = [other for other in along_dp if layout.coordinate(other)["dp"] > here["dp"]]
    if along_dp:
        return (after or along_dp)[0] // workers
    return (node + 1) % num_nodes
