"""Which part of the state a rank holds, and which node keeps its copy. Pure."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from elastic_trainer.plan.layout import ParallelLayout


def shard_of(layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """Return (which part of the state `rank` holds, how many parts the state has).

    Replicas of HSDP hold the same part; without HSDP every rank has a different one.
    """
    here = layout.coordinate(rank)
    inside = dataclasses.replace(layout, dp=layout.dp_shard, dp_replicate=1)
    return inside.rank({**here, "dp": here["dp"] % layout.dp_shard}), inside.world_size


def kept_apart(machines: Sequence[str], domains: Sequence[str], num_members: int) -> list[str]:
    """Return, for each node, the unit that must not hold both it and its copy.

    The failure domain, where domains are known and none has more than half of the members: else the
    others would keep more than they give away. Otherwise the machine. `machines` and `domains` are
    of members, then spares; an unknown domain is empty, and its machine counts.
    """
    places = [domain or machine for domain, machine in zip(domains, machines, strict=True)]
    largest = max(Counter(places[:num_members]).values(), default=0)
    return places if any(domains) and 2 * largest <= num_members else list(machines)


def copy_node(
    layout: ParallelLayout, rank: int, workers: int, machines: Sequence[str]
) -> int | None:
    """Return the node that keeps a copy of `rank`'s part: its index in `machines`.

    On another machine wherever possible; preferably another dp replica's, since what takes a node
    often takes its neighbours in the same replica (a rack, a switch); a spare's only where all
    members share a machine. Where everything is on one machine, nodes count as machines.

    Node i has ranks i * `workers` ... (i + 1) * `workers` - 1; `machines` are of the rung's nodes
    in rank order, then of spares.

    Returns:
        None when nothing is to be sent: a replica on another machine holds the same, or this is the
            only node.
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


def single_machine(seen: Sequence[int], num_machines: int) -> list[int | None]:
    """Return for each shard the only machine that holds it, by its index; None: several do.

    -1: no machine of the epoch does, only nodes that have left. `seen`: maxima of all ranks'
    `sightings`.
    """
    half = len(seen) // 2
    last = [most - 1 for most in seen[:half]]
    first = [num_machines - most if most else -1 for most in seen[half:]]
    return [a if a == b else None for a, b in zip(last, first, strict=True)]


def sightings(held: Iterable[tuple[int, int]], num_shards: int, num_machines: int) -> list[int]:
    """Return numbers whose maxima over all ranks say which machines hold a shard: last, first.

    `held`: (shard, index of the machine, below `num_machines`) of images that this rank knows of.
    """
    seen = [0] * (2 * num_shards)
    for shard, machine in held:
        seen[shard] = max(seen[shard], machine + 1)
        seen[num_shards + shard] = max(seen[num_shards + shard], num_machines - machine)
    return seen


def on_one_machine(machines: Sequence[str]) -> bool:
    """Return whether all nodes share a machine, so that no copy outlives it."""
    return len(set(machines)) == 1 < len(machines)


def _further_on(nodes: Sequence[int], index: int, machines: Sequence[str]) -> int | None:
    """Return the node, on another machine, that keeps the copy of the one at `index`.

    The nodes of a machine are side by side in a circle, and everybody's keeper as many places
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
