"""Who keeps a copy of what, and which snapshot a restore takes."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.layout import AXES, ParallelLayout
from elastic_trainer.state.placement import copy_node, kept_apart, on_one_machine, shard_of
from elastic_trainer.state.snapshots.choice import (
    Holding,
    describe_missing,
    everybody_got_there,
    extent,
    gone,
    marks,
    newest_first,
    packed,
    unpacked,
)
from elastic_trainer.state.snapshots.image import Header

DEGREES = st.sampled_from([1, 2, 3, 4])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[ParallelLayout, int]:
    """A layout and workers per node that divide its world."""
    dp, tp, pp, cp = (draw(DEGREES) for _ in range(4))
    replicate = draw(st.sampled_from([n for n in (1, 2, 3, 4) if dp % n == 0]))
    order = tuple(draw(st.permutations(AXES)))
    layout = ParallelLayout(dp=dp, tp=tp, pp=pp, cp=cp, dp_replicate=replicate, order=order)
    divisors = [n for n in range(1, layout.world_size + 1) if layout.world_size % n == 0]
    return layout, draw(st.sampled_from(divisors))


def apart(layout: ParallelLayout, workers: int) -> list[str]:
    """Every node a machine of its own."""
    return [f"m{node}" for node in range(layout.world_size // workers)]


@given(layouts(), st.data())
def test_every_shard_outlives_any_one_machine(
    given_: tuple[ParallelLayout, int], data: st.DataObject
) -> None:
    """However nodes and spares lie on machines; on one machine, any one node."""
    layout, workers = given_
    num_nodes, spares = layout.world_size // workers, data.draw(st.integers(0, 2))
    names = st.sampled_from(["m0", "m1", "m2", "m3"])
    machines = data.draw(
        st.one_of(
            st.lists(names, min_size=num_nodes + spares, max_size=num_nodes + spares),
            st.just([f"m{node}" for node in range(num_nodes + spares)]),
        )
    )
    one = on_one_machine(machines)
    held: dict[int, set[object]] = {}
    for rank in range(layout.world_size):
        shard, num_shards = shard_of(layout, rank)
        assert 0 <= shard < num_shards
        assert num_shards * layout.dp_replicate == layout.world_size
        copy = copy_node(layout, rank, workers, machines)
        assert copy is None or 0 <= copy < num_nodes + spares
        for node in {rank // workers, copy} - {None}:
            held.setdefault(shard, set()).add(node if one else machines[node])
    assert len(held) == num_shards
    if num_nodes > 1:
        assert all(len(places) > 1 for places in held.values())


@given(layouts(), st.integers(1, 4), st.randoms(use_true_random=False))
def test_no_node_keeps_much_more_than_it_gives(
    given_: tuple[ParallelLayout, int], on_each: int, random: Random
) -> None:
    """As long as no machine has more than half of the nodes."""
    layout, workers = given_
    num_nodes = layout.world_size // workers
    machines = [f"m{node // on_each}" for node in range(num_nodes)]
    random.shuffle(machines)
    kept: dict[int, int] = {}
    for rank in range(layout.world_size):
        copy = copy_node(layout, rank, workers, machines)
        if copy is not None:
            kept[copy] = kept.get(copy, 0) + 1
    if 2 * max(map(machines.count, machines)) <= num_nodes:
        assert max(kept.values(), default=0) <= 2 * workers


def test_the_copy_goes_to_another_replica_first() -> None:
    # Two nodes a replica: its neighbour would often be lost with it.
    layout = ParallelLayout(dp=2, pp=2, tp=2)
    copies = [copy_node(layout, rank, 2, apart(layout, 2)) for rank in range(8)]
    assert copies == [2, 2, 3, 3, 0, 0, 1, 1]


@pytest.mark.parametrize("layout", [ParallelLayout(dp=8), ParallelLayout(dp=4, pp=2)])
@pytest.mark.parametrize("domains", ["aabbccdd", "aaaabbbb", "abababab", "aaabbbcc"])
def test_a_whole_failure_domain_is_lost_and_nothing_with_it(
    layout: ParallelLayout, domains: str
) -> None:
    places = kept_apart([f"m{i}" for i in range(8)], domains, 8)
    kept = [copy_node(layout, rank, 1, places) for rank in range(8)]
    for domain in set(domains):
        for rank, keeper in enumerate(kept):
            assert keeper is not None
            assert {domains[rank], domains[keeper]} != {domain}
    assert max(kept.count(node) for node in range(8)) <= 2


@pytest.mark.parametrize(
    ("domains", "places"),
    [
        (["", "", "", ""], "wxyz"),
        (["a", "a", "b", "b"], "aabb"),
        (["a", "a", "", "b"], "aayb"),
        (["a", "a", "a", "b"], "wxyz"),  # one node cannot keep what three give away
        (["a", "a", "a", "a"], "wxyz"),
    ],
)
def test_where_domains_are_unknown_or_too_large_machines_count(
    domains: list[str], places: str
) -> None:
    assert kept_apart("wxyz", domains, 4) == list(places)


def test_one_replica_copies_to_the_next_node() -> None:
    layout = ParallelLayout(pp=4)
    assert [copy_node(layout, rank, 1, apart(layout, 1)) for rank in range(4)] == [1, 2, 3, 0]


@pytest.mark.parametrize(
    ("machines", "copies"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("abba", [1, 0, 3, 2]),
        ("aabc", [2, 3, 0, 1]),
        ("aaab", [3, 3, 3, 0]),
        ("aaaa", [1, 2, 3, 0]),  # nothing is better than the next node
        ("aaaab", [4, 4, 4, 4]),  # a spare
    ],
)
@pytest.mark.parametrize("layout", [ParallelLayout(dp=4), ParallelLayout(pp=4)])
def test_the_copy_goes_to_another_machine(
    layout: ParallelLayout, machines: str, copies: list[int]
) -> None:
    assert [copy_node(layout, rank, 1, machines) for rank in range(4)] == copies


def test_replicas_of_hsdp_need_no_copy_but_on_the_same_machine() -> None:
    layout = ParallelLayout(dp=4, dp_replicate=2)
    assert [shard_of(layout, rank) for rank in range(4)] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [copy_node(layout, rank, 1, "abcd") for rank in range(4)] == [None] * 4
    assert [copy_node(layout, rank, 1, "aabb") for rank in range(4)] == [None] * 4
    # Rank 0 and its replica, rank 2, share a machine; so do 1 and 3.
    assert [copy_node(layout, rank, 1, "abab") for rank in range(4)] == [1, 0, 3, 2]
    # Both replicas of a shard on one node are lost together.
    assert [copy_node(layout, rank, 4, "a") for rank in range(4)] == [None] * 4  # one node only
    wide = ParallelLayout(dp=4, dp_replicate=2, tp=2, order=("dp", "tp", "cp", "pp"))
    assert all(copy_node(wide, rank, 4, "ab") is not None for rank in range(8))


def holding(
    step: int,
    shard: int,
    *,
    epoch: int = 1,
    num: int = 2,
    node: str = "a",
    replica: int = 0,
    replicas: int = 1,
    committed: bool = False,
) -> Holding:
    header = Header(
        epoch=epoch,
        step=step,
        rank=shard + num * replica,
        shard=shard,
        num_shards=num,
        num_ranks=num * replicas,
        index_bytes=0,
        payload_bytes=0,
    )
    return Holding(
        header=header,
        file=f"f{shard}",
        node=node,
        address="127.0.0.1",
        port=1,
        committed=committed,
    )


def test_the_newest_step_goes_first_and_then_the_newest_epoch() -> None:
    held = [holding(5, 0, epoch=2), holding(7, 0), holding(5, 1, epoch=3), holding(7, 1)]
    assert newest_first(held) == [(7, 1), (5, 3), (5, 2)]


def agreed(nodes: list[list[Holding]], key: tuple[int, int]) -> tuple[list[int], bool]:
    """What nodes that know their own agree on: (shards gone, whether everybody got there)."""
    extents = [extent(held, key) for held in nodes]
    num_shards, num_ranks, committed = (max(column) for column in zip(*extents, strict=True))
    flags = [marks(held, key, num_shards, num_ranks) for held in nodes]
    everything = [max(column) for column in zip(*flags, strict=True)]
    there = everybody_got_there(everything, num_shards, committed=bool(committed))
    return gone(everything, num_shards), there


def test_a_snapshot_is_whole_when_every_shard_is_there() -> None:
    nodes = [[holding(7, 0), holding(8, 0)], [holding(7, 1, node="b")], []]
    assert agreed(nodes, (7, 1)) == ([], True)
    assert agreed(nodes, (8, 1)) == ([1], False)
    assert re.findall(r"\d+", describe_missing((8, 1), [1], 2)) == ["8", "1", "1", "2", "1"]


def test_a_whole_replica_is_not_enough_where_another_may_lack_the_step() -> None:
    one = [holding(7, shard, replicas=2) for shard in (0, 1)]
    assert agreed([one], (7, 1)) == ([], False)
    third = holding(7, 0, replicas=2, replica=1)
    assert agreed([one, [third]], (7, 1)) == ([], False)
    fourth = holding(7, 1, replicas=2, replica=1)
    assert agreed([one, [third], [fourth]], (7, 1)) == ([], True)
    known = holding(7, 1, replicas=2, committed=True)
    assert agreed([one[:1], [known]], (7, 1)) == ([], True)
    older = holding(6, 0, replicas=2, committed=True)
    assert agreed([one, [older]], (7, 1)) == ([], False)
    assert agreed([[holding(7, 0)], [holding(7, 1)]], (7, 1)) == ([], True)


ROWS = st.tuples(
    st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.integers(0, 3), st.booleans()
)


@given(st.lists(ROWS))
def test_nodes_agree_on_what_one_that_knew_all_would_say(
    rows: list[tuple[int, int, int, int, bool]],
) -> None:
    nodes: list[list[Holding]] = [[] for _ in range(4)]
    for step, shard, epoch, node, committed in rows:
        nodes[node].append(holding(step, shard, epoch=epoch, num=3, committed=committed))
    everything = [held for node in nodes for held in node]
    for key in newest_first(everything):
        mine = [held for held in everything if held.key == key]
        missing, there = agreed(nodes, key)
        assert missing == [s for s in range(3) if s not in {held.header.shard for held in mine}]
        assert there == (missing == [] or any(held.committed for held in mine))


def test_keys_are_packed_in_their_order() -> None:
    keys = [(0, 0), (0, 1), (5, 2), (5, 2**24 - 1), (6, 1), (2**39 - 1, 2**24 - 1)]
    numbers = [packed(key) for key in keys]
    assert numbers == sorted(numbers)
    assert [unpacked(number) for number in numbers] == keys
    assert numbers[-1] < 2**63
