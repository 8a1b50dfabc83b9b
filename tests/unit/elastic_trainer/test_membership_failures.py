"""What failures cost a job: bad nodes, crash loops and shared faults, in virtual time."""

from __future__ import annotations

import pytest
from membership_sim import Cluster
from test_membership import coordinator, others, started

from elastic_trainer.agent.cause import COLLATERAL_SETTLE_S, SETTLE_S
from elastic_trainer.agent.notices import StopAsked
from elastic_trainer.failures import Kind

CRASH = (Kind.CRASH, "IndexError: index 513 is out of range")
STORAGE = (Kind.INFRASTRUCTURE, "OSError: [Errno 5] Input/output error")
STALE = (Kind.NODE_FAULT, "OSError: [Errno 116] Stale file handle")


def events(cluster: Cluster, name: str) -> list[dict]:
    found = [(t, f) for n in cluster.nodes for t, event, f in n.events if event == name]
    return [fields for _, fields in sorted(found, key=lambda item: item[0])]


def epochs(cluster: Cluster) -> int:
    return max(cluster.published)


def next_epoch(cluster: Cluster, within: float) -> float:
    before = epochs(cluster)
    return cluster.run_until(lambda: epochs(cluster) > before and cluster.settled(), within)


def named(cluster: Cluster, name: str):
    return next(n for n in cluster.up if n.me.node == name)


def test_the_same_error_everywhere_stops_at_the_first():
    cluster = started(4)
    for i, node in enumerate(list(cluster.up)):
        cluster.fail_worker(node, Kind.CRASH, f"IndexError: index {i} is out of range")
        cluster.run(cluster.now + 0.05)
    cluster.run(cluster.now + 1.0)
    assert {n.stopped.code for n in cluster.nodes} == {93}
    assert "4 of 4 nodes at step" in cluster.nodes[0].stopped.reason
    assert epochs(cluster) == 1


@pytest.mark.parametrize("nodes", [2, 3, 7])
def test_most_nodes_are_enough_and_their_peers_say_only_consequences(nodes):
    cluster = started(nodes)
    up = list(cluster.up)
    for node in up[: nodes // 2 + 1]:
        cluster.fail_worker(node, *CRASH)
    for node in up[nodes // 2 + 1 :]:
        cluster.fail_worker(node, Kind.COLLATERAL, "connection reset")
    cluster.run(cluster.now + 1.0)
    assert {n.stopped.code for n in cluster.nodes} == {93}


def test_all_workers_of_the_only_node():
    cluster = started(1)
    cluster.fail_worker(cluster.up[0], *CRASH, alike=8, of=8)
    cluster.run(cluster.now + 1.0)
    assert cluster.nodes[0].stopped.code == 93
    assert "all 8 workers" in cluster.nodes[0].stopped.reason


def test_an_error_of_one_node_restarts_and_costs_no_more_than_the_wait():
    cluster = started(4)
    cluster.fail_worker(cluster.up[1], *CRASH)
    took = next_epoch(cluster, 5.0)
    assert SETTLE_S < took < SETTLE_S + 0.1
    cluster.run(cluster.now + 2.0)
    for node in cluster.up:  # all have spoken: nothing to wait for
        kind = CRASH if node.me.node == "node1" else (Kind.COLLATERAL, "reset")
        cluster.fail_worker(node, *kind)
    assert next_epoch(cluster, 5.0) < 0.1
    assert [f["member"] for f in events(cluster, "member.evicted")] == ["node1"]


def test_a_consequence_waits_for_its_cause():
    cluster = started(4)
    cluster.fail_worker(cluster.up[1], Kind.COLLATERAL, "connection reset")
    cluster.run(cluster.now + COLLATERAL_SETTLE_S / 2)
    cluster.fail_worker(cluster.up[2], Kind.KILLED, "SIGKILL")
    assert next_epoch(cluster, 1.0) < 0.1
    (aborted,) = events(cluster, "epoch.aborted")
    assert aborted["victims"] == [cluster.up[2].me.node]


def test_a_death_while_errors_are_gathered_ends_the_epoch_at_once():
    cluster = started(4)
    cluster.fail_worker(cluster.up[1], *CRASH)
    cluster.run(cluster.now + 0.05)
    cluster.kill(others(cluster)[-1])
    assert next_epoch(cluster, 1.0) < 0.1


@pytest.mark.parametrize("kind", [STORAGE, STALE])
def test_shared_storage_that_is_gone_costs_no_node_and_is_given_time(kind):
    cluster = started(4, max_restarts=9)
    pauses = []
    for _ in range(5):
        for node in cluster.up:
            cluster.fail_worker(node, *kind, committed=7)
        pauses.append(round(next_epoch(cluster, 60.0)))
        cluster.run(cluster.now + 1.0)
    assert pauses == [0, 2, 4, 8, 16]
    assert len(cluster.up) == 4
    assert events(cluster, "member.evicted") == []
    assert [f["seconds"] for f in events(cluster, "epoch.delayed")] == [2, 4, 8, 16]


def test_a_stop_does_not_wait_for_storage():
    cluster = started(3)
    for _ in range(6):
        for node in cluster.up:
            cluster.fail_worker(node, *STORAGE, committed=7)
        cluster.run(cluster.now + 1.0)
        if not cluster.settled():
            break
    cluster.report(cluster.up[0], StopAsked(reason="SIGTERM"))
    cluster.run(cluster.now + 1.0)
    assert {n.stopped.code for n in cluster.nodes} == {91}


def test_no_progress_stops_early_with_93_and_a_commit_in_between_does_not():
    for committed, code in ([3, 3, 3], 93), ([3, 4, 5], None):
        cluster = started(6)
        for i, step in enumerate(committed):
            victim = named(cluster, f"node{i}")
            cluster.fail_worker(victim, Kind.CRASH, f"{'ABC'[i]}Error: x", committed=step)
            cluster.run(cluster.now + 3.0)
        assert {getattr(n.stopped, "code", None) for n in cluster.nodes} == {code}
    assert coordinator(cluster).machine.ctx.history.progress == 5


def test_checkpoints_on_the_board_are_progress():
    cluster = started(6)
    for i in range(4):
        victim = named(cluster, f"node{i}")
        cluster.fail_worker(victim, Kind.CRASH, f"{'ABCD'[i]}Error: x", committed=0)
        cluster.run(cluster.now + 3.0)
        cluster.commit_checkpoint(step=10 * i + 10)
        cluster.run(cluster.now + 1.0)
    assert len(cluster.up) == 6
    assert coordinator(cluster).machine.ctx.history.progress == 30


def test_what_was_committed_is_remembered_by_a_successor():
    cluster = started(6)
    for i, kill in enumerate((True, True, False)):
        victim = others(cluster)[-1 - i]
        cluster.fail_worker(victim, Kind.CRASH, f"{'ABC'[i]}Error: x", committed=3)
        cluster.run(cluster.now + 3.0)
        if kill:
            cluster.kill(coordinator(cluster))
            cluster.run(cluster.now + 5.0)
    assert sorted(n.stopped.code for n in cluster.nodes if n.stopped) == [93] * 4


def test_a_node_where_workers_die_at_every_start_leaves_after_two():
    cluster = started(4, max_restarts=1, max_crashes=1, no_progress=2)
    for _ in range(2):
        cluster.fail_worker(named(cluster, "node2"), Kind.USER_ERROR, "ImportError: libcuda.so.1")
        cluster.run(cluster.now + 3.0)
    assert {m.node for m in cluster.up[0].formed.members} == {"node0", "node1", "node3"}
    gone = next(n for n in cluster.nodes if n.me.node == "node2")
    assert gone.machine.is_coordinator or gone.stopped.code == 92


def test_a_rack_that_dies_at_once_costs_one_restart():
    cluster = started(20, max_restarts=1)
    for node in others(cluster)[:8]:
        cluster.kill(node)
    cluster.run(cluster.now + 3.0)
    assert cluster.settled()
    assert len(cluster.up) == 12


def test_two_bad_nodes_leave_together():
    cluster = started(5)
    bad = others(cluster)[:2]
    for node in bad:
        cluster.fail_worker(node, Kind.NODE_FAULT, f"Xid 79 on {node.me.node[:4]}")
    cluster.run(cluster.now + 2.0)
    assert {n.stopped.code for n in bad} == {92}
    assert epochs(cluster) == 2
