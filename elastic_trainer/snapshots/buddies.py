"""Which part of the state a rank holds, and which node keeps the copy of it. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from elastic_trainer.layout import ParallelLayout


def shard_of(layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """Return (which part of the state `rank` holds, how many parts there are).

    Replicas of HSDP hold the same part; without it every rank has a part of its own.
    """
    here = layout.coordinate(rank)
    inside = dataclasses.replace(layout, dp=layout.dp_shard, dp_replicate=1)
    return inside.rank({**here, "dp": here["dp"] % layout.dp_shard}), inside.world_size


def copy_node(
    layout: ParallelLayout, rank: int, workers: int, machines: Sequence[str]
) -> int | None:
    """Return the node that keeps a copy of what `rank` holds: its index in `machines`.

    On another machine wherever there is one; another dp replica's before any other, since what
    takes a node often takes its neighbours in the same replica (a rack, a switch); a spare's only
    where all members share a machine. Where everything is on one machine, nodes count as machines.

    Args:
        layout: of the epoch.
        rank: whose state it is.
        workers: per node; node i has ranks i * workers ... (i + 1) * workers - 1.
        machines: of each node that keeps snapshots: the rung's in rank order, then spares.

    Returns:
        None when nothing is to be sent: a replica on another machine holds the same already, or
        there is no other node.
    """
    num_nodes = layout.world_size // workers
    if num_nodes == 1:
        return None
    if on_one_machine(machines):
        machines = [str(node) for node in range(num_nodes)]
    node, (shard, _) = rank // workers, shard_of(layout, rank)
    along_dp = layout.ranks_along("dp", rank)
    replicas = along_dp if layout.dp_replicate > 1 else ()
    if any(
        machines[other // workers] != machines[node] and shard_of(layout, other)[0] == shard
        for other in replicas
    ):
        return None
    in_replicas = [other // workers for other in along_dp]
    keeper = _further_on(in_replicas, along_dp.index(rank), machines)
    if keeper is None:
        keeper = _further_on(range(num_nodes), node, machines)
    if keeper is None:
        off = [other for other, machine in enumerate(machines) if machine != machines[node]]
        off = [other for other in off if other < num_nodes] or off
        keeper = off[machines[:node].count(machines[node]) % len(off)]
    return keeper


def on_one_machine(machines: Sequence[str]) -> bool:
    """Whether all these nodes share a machine, so that no copy outlives it."""
    return len(set(machines)) == 1 < len(machines)


def _further_on(nodes: Sequence[int], index: int, machines: Sequence[str]) -> int | None:
    """Return which of `nodes` keeps the copy of the one at `index`, on another machine.

    The nodes of a machine stand side by side in a circle, and everybody's keeper as many places
    further on as the largest machine has nodes. So nobody's keeper is on its own machine, and
    everybody keeps as much as it gives away; None where a machine has more than half of them.
    """
    places: dict[str, list[int]] = {}
    for place, node in enumerate(nodes):
        places.setdefault(machines[node], []).append(place)
    largest = max(map(len, places.values()))
    if 2 * largest > len(nodes):
        return None
    circle = [place for group in places.values() for place in group]
    return nodes[circle[(circle.index(index) + largest) % len(circle)]]
