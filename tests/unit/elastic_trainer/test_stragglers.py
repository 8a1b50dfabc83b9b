from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_sim import Cluster
from test_membership import coordinator, settings

from elastic_trainer.agent.membership.notices import RankPace, WorkersPaced
from elastic_trainer.agent.membership.stragglers import (
    FACTOR,
    ROUNDS,
    TIMES,
    Slow,
    Stragglers,
    apart_of,
    stages_of,
)

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
    if what == "swap":
        assert slow in cluster.published[max(cluster.published)].reason
    assert slow not in coordinator(cluster).machine.ctx.excluded


def timed(rank, *, lane=0, forward=1.0, tp=0.5, gather=0.2, known=True):
    """Return a pace whose backward takes twice its forward."""
    return RankPace(
        rank=rank,
        lane=lane,
        own_s=(0.1, forward, 2 * forward, 0.3),
        waits_s=(gather, 0.0),
        inside_s=(tp, 0.0, 0.0) if known else (),
    )


def test_parts_of_a_step_are_medians_of_each_stage():
    ranks = [("n1", timed(0)), ("n1", timed(1, tp=0.7)), ("n2", timed(2, lane=1, known=False))]
    first, second = stages_of(ranks)
    assert first == pytest.approx(
        {"compute": 2.4, "tp": 0.6, "cp": 0.0, "ep": 0.0, "dp": 0.2, "pp": 0.0, "data": 0.1}
    )
    # What is not known of one rank is not known of its stage.
    assert second == pytest.approx({"compute": 3.0, "dp": 0.2, "pp": 0.0, "data": 0.1})


def test_a_node_is_told_apart_from_the_others_of_its_stage():
    usual = [(f"n{rank}", timed(rank)) for rank in range(3)]
    assert apart_of(usual) == {}
    assert apart_of(usual[:1]) == {}
    # All of a stage are slower than those of another: that is no node's doing.
    assert apart_of([*usual, *((f"m{r}", timed(r, lane=1, tp=2.0)) for r in (3, 4))]) == {}
    assert apart_of([*usual, ("n3", timed(3, tp=1.0))]) == {"tp": "n3"}


def test_ranks_of_2048_nodes_are_looked_at_in_no_time():
    """The coordinator does nothing else meanwhile; 0.1 s on an idle core."""
    ranks = [(f"n{rank // 8}", timed(rank)) for rank in range(16384)]
    ranks += [("slow", timed(16384 + rank, tp=1.5)) for rank in range(8)]
    start = time.process_time()
    assert apart_of(ranks) == {"tp": "slow"}
    assert time.process_time() - start <= 1.0


def test_parts_are_recorded_once_all_have_come_and_then_seldom():
    watch, due = Stragglers(), []
    for round_ in range(2 * ROUNDS + 1):
        for node, rank in (("n1", 0), ("n2", 1)):
            watch.take(node, [timed(rank)])
            if watch.parts(node, of=2) is not None:
                due.append((round_, node))
    assert due == [(0, "n2"), (ROUNDS, "n2"), (2 * ROUNDS, "n2")]


def test_parts_of_a_script_or_of_unknown_members_are_not_recorded():
    for pace_, of in ((timed(0, forward=0.0, tp=0.0), 1), (timed(0), 0)):
        watch = Stragglers()
        watch.take("n1", [pace_])
        assert watch.parts("n1", of=of) is None
