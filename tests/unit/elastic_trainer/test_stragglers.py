from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_sim import Cluster
from test_membership import coordinator, settings

from elastic_trainer.agent.membership.notices import RankPace, WorkersPaced
from elastic_trainer.agent.membership.stragglers import FACTOR, TIMES, Slow, Stragglers

USUAL = (0.01, 0.1, 0.2, 0.05)


def pace(rank: int, *, lane: int = 0, factor: float = 1.0, part: int = 2) -> RankPace:
    own = tuple(s * (factor if i == part else 1.0) for i, s in enumerate(USUAL))
    return RankPace(rank=rank, lane=lane, own_s=own)


def report(watch: Stragglers, paces: list[RankPace]) -> list[Slow]:
    """Report two ranks a node."""
    return [
        slow
        for node in range(0, len(paces), 2)
        for slow in watch.take(f"node{node // 2}", paces[node : node + 2])
    ]


def test_a_rank_that_stays_slow_is_found_once() -> None:
    watch = Stragglers()
    paces = [pace(rank, factor=2.0 if rank == 5 else 1.0) for rank in range(8)]
    found = [report(watch, paces) for _ in range(3 * TIMES)]
    # At the first report its later peers are not known yet, its earlier ones are.
    assert [len(slow) for slow in found] == [0] * (TIMES - 1) + [1] + [0] * (2 * TIMES)
    assert found[TIMES - 1] == [Slow(5, "node2", "backward", 2.0, 0.4)]


def test_now_and_then_is_not_a_while() -> None:
    watch = Stragglers()
    slow = [pace(rank, factor=3.0 if rank == 1 else 1.0) for rank in range(4)]
    well = [pace(rank) for rank in range(4)]
    for _ in range(5):
        assert report(watch, slow) == []
        assert report(watch, slow) == []
        assert report(watch, well) == []


def test_a_part_that_hardly_counts_is_let_be() -> None:
    """The loader takes twice as long, but that is a twentieth of a step."""
    watch = Stragglers()
    paces = [pace(rank, factor=2.0 if rank == 1 else 1.0, part=0) for rank in range(4)]
    assert not any(report(watch, paces) for _ in range(2 * TIMES))


def test_stages_of_a_pipeline_are_not_compared_with_each_other() -> None:
    watch = Stragglers()
    paces = [pace(rank, lane=rank // 4, factor=1.0 + 2.0 * (rank // 4)) for rank in range(8)]
    assert not any(report(watch, paces) for _ in range(2 * TIMES))


def test_a_rank_without_peers_is_not_slow() -> None:
    watch = Stragglers()
    assert not any(watch.take("node0", [pace(0, factor=9.0)]) for _ in range(2 * TIMES))


@given(st.lists(st.floats(1.0, FACTOR - 0.01), min_size=2, max_size=16))
def test_what_differs_by_less_than_the_factor_is_no_straggler(factors: list[float]) -> None:
    watch = Stragglers()
    paces = [pace(rank, factor=factor) for rank, factor in enumerate(factors)]
    assert not any(report(watch, paces) for _ in range(TIMES + 1))


@pytest.mark.parametrize("what", ["off", "report", "swap"])
def test_a_slow_node_gives_its_place_to_a_spare(what: str) -> None:
    cluster = Cluster(settings(3, straggler=what))
    for i in range(4):  # one more than the largest rung
        cluster.add(f"node{i}")
    cluster.run(cluster.now + 3.0)
    epoch = max(cluster.published)
    members = [m.node for m in cluster.published[epoch].members]
    slow = members[1]
    for _ in range(TIMES + 1):
        for node in cluster.up:
            if node.working is not None:
                rank = members.index(node.me.node)
                paces = (pace(rank, factor=3.0 if node.me.node == slow else 1.0),)
                cluster.report(node, WorkersPaced(epoch=epoch, ranks=paces))
        cluster.run(cluster.now + 0.01)
    cluster.run(cluster.now + 3.0)
    events = [f for n in cluster.up for _, e, f in n.events if e == "worker.slow"]
    if what == "off":
        assert not events
    else:
        (event,) = events
        assert (event["member"], event["section"], event["ratio"]) == (slow, "backward", 3.0)
        assert event["swap"] == (what == "swap")
    after = [m.node for m in cluster.published[max(cluster.published)].members]
    assert (slow in after) == (what != "swap")
    assert len(after) == 3
    assert slow not in coordinator(cluster).machine.ctx.excluded
