"""Jobs that stand still: which worker the coordinator finds, and how soon; in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_sim import Cluster, Node
from test_membership import coordinator, others, started

from elastic_trainer.agent.membership.notices import EpochAborted
from elastic_trainer.record.failures import Kind


def stand_still_until(cluster: Cluster, reached, *, within: float) -> float:
    """Report the standstill every half second, as agents do."""
    begin = cluster.now
    while not reached():
        assert cluster.now - begin < within, cluster.describe()
        cluster.stand_still()
        cluster.run(cluster.now + 0.5, stop=reached)
    return cluster.now - begin


def aborted(node: Node) -> EpochAborted:
    (found,) = [notice for notice in node.notices if isinstance(notice, EpochAborted)]
    return found


def over(cluster: Cluster):
    return lambda: max(cluster.published) > 1 and cluster.settled()


def test_the_worker_that_does_not_wait_is_blamed_and_stacks_come_first() -> None:
    cluster = started(4)
    hung_node = others(cluster)[1]
    hung_node.view = {"part": "data", "place": 3, "state": "R"}
    assert stand_still_until(cluster, over(cluster), within=1.0) < 0.3
    for node in cluster.up:
        notice = aborted(node)
        assert notice.stacks
        assert notice.victims == (hung_node.me.node,)
    (entry,) = [past for _, past in coordinator(cluster).machine.ctx.history.entries]
    assert (entry.node, entry.kind, entry.step) == (hung_node.me.node, Kind.HANG, 7)
    hung = [f for n in cluster.up for _, e, f in n.events if e == "worker.hung"]
    assert [event["member"] for event in hung] == [hung_node.me.node]


def test_nobody_is_blamed_while_the_one_they_wait_for_may_be_at_work() -> None:
    cluster = started(4)
    saving = others(cluster)[0]
    saving.view = {"section": "saving", "part": "other", "place": 0, "limit_s": 1800.0}
    for _ in range(20):
        cluster.stand_still()
        cluster.run(cluster.now + 0.5)
    assert max(cluster.published) == 1
    saving.view["idle_s"] = 1801.0
    stand_still_until(cluster, over(cluster), within=1.0)
    assert aborted(saving).victims == (saving.me.node,)


def test_when_nobody_stands_out_the_job_restarts_without_blame() -> None:
    cluster = started(4)
    stand_still_until(cluster, over(cluster), within=1.0)
    assert aborted(cluster.up[0]).victims == ()
    (entry,) = [past for _, past in coordinator(cluster).machine.ctx.history.entries]
    assert (entry.node, entry.kind) == (None, Kind.HANG)


@pytest.mark.parametrize("late_first", [False, True])
@pytest.mark.parametrize("nodes", [3, 16])
def test_a_stopped_node_is_left_out_in_a_second_and_comes_back(
    nodes: int, late_first: bool
) -> None:
    cluster = started(nodes)
    stopped = others(cluster)[-1]
    cluster.pause(stopped)
    cluster.run(cluster.now + 2.0)
    left = [n for n in cluster.up if n is not stopped]

    def without_it() -> bool:
        return all(n.formed and len(n.formed.members) == nodes - 1 for n in left)

    assert stand_still_until(cluster, without_it, within=2.0) < 0.7
    cluster.run(cluster.now + 5.0)
    cluster.resume(stopped, late_first=late_first)
    assert cluster.run_until(cluster.settled, within=20.0) < 2.0
    assert len(cluster.up) == nodes


@pytest.mark.parametrize("pause_s", [0.0, 60.0])
@pytest.mark.parametrize("nodes", [3, 16])
def test_a_stopped_coordinator_is_succeeded_and_comes_back(nodes: int, pause_s: float) -> None:
    cluster = started(nodes)
    stopped = coordinator(cluster)
    cluster.pause(stopped)
    cluster.run(cluster.now + 2.0)
    left = [n for n in cluster.up if n is not stopped]

    def without_it() -> bool:
        return all(n.formed and len(n.formed.members) == nodes - 1 for n in left)

    assert stand_still_until(cluster, without_it, within=5.0) < 1.6
    cluster.run(cluster.now + pause_s)
    cluster.resume(stopped)
    assert cluster.run_until(cluster.settled, within=30.0) < 3.0
    assert len(cluster.up) == nodes


def test_a_node_that_beats_but_does_not_answer_is_not_taken_for_dead() -> None:
    """Its agent's loop may wait for storage; its peers' thread never does."""
    cluster = started(4)
    mute = others(cluster)[0]
    mute.working = None  # nobody answers `ShowWorkers`
    for _ in range(20):
        cluster.stand_still()
        cluster.run(cluster.now + 0.5)
    assert max(cluster.published) == 1
    assert len(cluster.up) == 4


@pytest.mark.parametrize("earlier_s", [0.0, 0.4, 1.1, 2.0])
@pytest.mark.parametrize("nodes", [4, 16])
def test_a_coordinator_cut_off_leaves_the_job_to_the_others(nodes: int, earlier_s: float) -> None:
    """The workers stand still at once, on both sides: long before anybody counts as silent."""
    cluster = started(nodes)
    old = coordinator(cluster)
    rest = others(cluster)
    cluster.network.cut |= {(node.me.node, old.me.node) for node in rest}
    cluster.run(cluster.now + earlier_s)
    cluster.partition({old.me.node})

    def gone_on() -> bool:
        return all(n.formed and len(n.formed.members) == nodes - 1 for n in rest)

    assert stand_still_until(cluster, gone_on, within=20.0) < 8.0
    cluster.run(cluster.now + 20.0)
    assert old.formed is not None
    assert old.formed.epoch == 1
    cluster.heal()
    cluster.run_until(cluster.settled, within=60.0)


def watch_standstill(cluster: Cluster, since: float, until: float) -> None:
    """Have agents tell as they do: half a second before the limit of 2 s, then at it, then on."""
    told = {}
    while cluster.now < until:
        idle_s = cluster.now - since
        for node in cluster.up:
            node.view = {"idle_s": idle_s}
            last = told.get(node, 0.0)
            if idle_s > 1.5 and (idle_s - last >= 0.5 or idle_s > 2.0 >= last):
                told[node] = idle_s
                if node.working is not None and not node.paused:
                    cluster.report(node, cluster.seen(node, node.working, stalled=True))
        cluster.run(cluster.now + 0.1)


@pytest.mark.parametrize("which", ["coordinator", "member"])
@pytest.mark.parametrize("nodes", [3, 16])
def test_a_silent_node_is_lost_as_soon_as_the_limit_is_reached(nodes: int, which: str) -> None:
    cluster = started(nodes)
    stopped = coordinator(cluster) if which == "coordinator" else others(cluster)[-1]
    since = cluster.now
    cluster.pause(stopped)
    watch_standstill(cluster, since, since + 3.0)
    lost = [t for n in cluster.up for t, e, f in n.events if e == "member.lost"]
    assert since + 2.0 < min(lost) < since + 2.2 + (which == "coordinator") * 0.1
    left = [n for n in cluster.up if n is not stopped]
    cluster.run(since + 3.5)
    assert all(n.formed and len(n.formed.members) == nodes - 1 for n in left)


@given(st.floats(0.1, 1.9), st.integers(0, 3), st.integers(0, 10))
def test_nobody_is_lost_before_the_limit(paused_s: float, which: int, again: int) -> None:
    """A node that everybody waits for, silent too, but that goes on in time."""
    cluster = started(4)
    for _ in range(1 + again % 3):
        node, since = cluster.up[which], cluster.now
        cluster.pause(node)
        watch_standstill(cluster, since, since + paused_s)
        cluster.resume(node)
        cluster.run(cluster.now + 0.1 * again)
    cluster.run(cluster.now + 5.0)
    assert max(cluster.published) == 1
    assert not [e for n in cluster.up for _, e, f in n.events if e == "member.lost"]


def stopped_after_a_renewal(nodes: int, stopped: int, age_s: float) -> tuple[Cluster, list[Node]]:
    """Stop the coordinator and others `age_s` after it has renewed its lease; return the rest."""
    cluster = started(nodes)
    cluster.run(3 * cluster.settings.lease_renew_s + 0.5)
    lead = coordinator(cluster)
    beat = cluster.board.content[0].lease.beat
    cluster.run_until(lambda: cluster.board.content[0].lease.beat > beat, within=6.0)
    cluster.run(cluster.now + age_s)
    doomed = [lead, *others(cluster)][:stopped]
    for node in doomed:
        cluster.pause(node)
    cluster.run(cluster.now + 2.0)  # until the limit of a hang
    return cluster, [node for node in cluster.up if node not in doomed]


@pytest.mark.parametrize("age_s", [0.1, 2.5, 4.8])
@pytest.mark.parametrize(("nodes", "stopped"), [(2, 1), (3, 2), (4, 2), (6, 3)])
def test_without_a_majority_the_watch_counts_from_the_last_renewal(
    nodes: int, stopped: int, age_s: float
) -> None:
    cluster, left = stopped_after_a_renewal(nodes, stopped, age_s)

    def without_them() -> bool:
        return all(n.formed and len(n.formed.members) == len(left) for n in left)

    took = stand_still_until(cluster, without_them, within=20.0)
    # Stopped for 2 s already; who else is stopped is asked for, and passed over in the end.
    silent_s = cluster.settings.dial_timeout_s + 3.5 if stopped > 1 else 1.0
    watched_s = 1.5 * cluster.settings.lease_renew_s - age_s - 2.0
    assert took < 0.6 + max(watched_s, 0) + silent_s
    assert took > watched_s


@pytest.mark.parametrize(("nodes", "stopped"), [(5, 2), (7, 3), (32, 4)])
def test_members_stopped_with_the_coordinator_do_not_hold_up_a_majority(
    nodes: int, stopped: int
) -> None:
    cluster, left = stopped_after_a_renewal(nodes, stopped, 1.0)

    def without_them() -> bool:
        return all(n.formed and len(n.formed.members) == len(left) for n in left)

    assert stand_still_until(cluster, without_them, within=20.0) < 3.5
    for node in cluster.up:
        if node not in left:
            cluster.resume(node)
    cluster.run_until(cluster.settled, within=20.0)
    assert len(cluster.up) == nodes


@pytest.mark.parametrize("age_s", [0.1, 2.5, 4.8])
def test_a_coordinator_that_was_paused_with_all_others_keeps_its_lease(age_s: float) -> None:
    cluster, left = stopped_after_a_renewal(2, 1, age_s)
    for node in left:
        cluster.pause(node)
    cluster.run(cluster.now + 60.0)
    lead = next(node for node in cluster.up if node.machine.is_coordinator)
    for node in cluster.up:
        cluster.resume(node, late_first=node is not lead)
    cluster.run(cluster.now + 20.0)
    assert cluster.settled()
    assert coordinator(cluster) is lead


@given(st.lists(st.floats(0.0, 1.5), min_size=8, max_size=8), st.floats(6.0, 4000.0))
def test_a_job_that_is_suspended_as_a_whole_goes_on_in_its_epoch(gaps, stopped_s) -> None:
    """Each node is stopped and goes on at a time of its own, a little apart from the others'."""
    cluster = started(4)
    cluster.run(cluster.now + 7.0)
    lead, begin = coordinator(cluster), cluster.now
    for node, gap in zip(cluster.up, gaps[:4], strict=True):
        cluster.at(begin + gap, lambda node=node: cluster.pause(node))
    for node, gap in zip(cluster.up, gaps[4:], strict=True):
        cluster.at(begin + stopped_s + gap, lambda node=node: cluster.resume(node))
    cluster.run(begin + stopped_s + 2.0)
    beat = cluster.board.content[0].lease.beat
    cluster.run(cluster.now + 30.0)
    assert max(cluster.published) == 1, cluster.describe()
    assert not [e for n in cluster.up for _, e, _ in n.events if e == "member.lost"]
    assert coordinator(cluster) is lead
    assert cluster.board.content[0].lease.beat > beat


def test_a_coordinator_that_wakes_shows_at_once_that_it_holds_the_lease() -> None:
    cluster = started(2)
    lead = coordinator(cluster)
    for node in cluster.up:
        cluster.pause(node)
    cluster.run(cluster.now + 60.0)
    beat = cluster.board.content[0].lease.beat
    for node in cluster.up:
        cluster.resume(node)
    cluster.run(cluster.now + 0.5)
    assert cluster.board.content[0].lease.beat > beat
    assert coordinator(cluster) is lead


def test_a_renewal_that_is_a_little_late_costs_no_lease() -> None:
    """The way between the two is cut, and the board takes two seconds over a renewal."""
    cluster = started(2)
    lead = coordinator(cluster)
    cluster.run(3 * cluster.settings.lease_renew_s + 0.5)
    cluster.partition({lead.me.node})
    cluster.board.cut.add(lead.me.node)
    cluster.run(cluster.now + 2.0)
    cluster.board.cut.clear()
    cluster.run(cluster.now + 30.0)
    assert coordinator(cluster) is lead
