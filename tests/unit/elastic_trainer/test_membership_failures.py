"""What failures cost a job: bad nodes, crash loops and shared faults, in virtual time."""

from __future__ import annotations

import pytest
from membership_sim import Cluster
from test_membership import coordinator, others, settings, started

from elastic_trainer.agent.membership.attribution import COLLATERAL_SETTLE_S, SETTLE_S
from elastic_trainer.agent.membership.effects import SERVE_S
from elastic_trainer.agent.membership.notices import NodeLeaving, StopAsked, WorkersReady
from elastic_trainer.record.failures import Kind

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
    assert "4 of 4" in cluster.nodes[0].stopped.reason
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
    assert " 8 " in cluster.nodes[0].stopped.reason


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
    assert events(cluster, "member.evicted") == []


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
        cluster.board.commit(step=10 * i + 10)
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
        cluster.fail_worker(named(cluster, "node2"), Kind.FAULT, "SIGILL")
        cluster.run(cluster.now + 3.0)
    assert {m.node for m in cluster.up[0].formed.members} == {"node0", "node1", "node3"}
    gone = next(n for n in cluster.nodes if n.me.node == "node2")
    assert gone.machine.is_coordinator or gone.stopped.code == 92


@pytest.mark.parametrize(
    ("kind", "detail"),
    [
        (Kind.CRASH, "ValueError: 3 labels for 4 rows"),
        (Kind.USER_ERROR, "ModuleNotFoundError: No module named 'wandb'"),
        (Kind.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_a_program_that_fails_on_one_node_again_and_again_ends_the_job_and_puts_out_nobody(
    kind, detail
):
    for committed, code in (7, 93), (None, 94):
        cluster = started(4, max_crashes=5)
        fields = {} if committed is None else {"committed": committed}
        for _ in range(6):
            for victim in [n for n in cluster.up if n.me.node == "node2"]:
                cluster.fail_worker(victim, kind, detail, **fields)
            cluster.run(cluster.now + 3.0)
        assert {n.stopped.code for n in cluster.nodes} == {code}
        assert events(cluster, "member.evicted") == []


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


# --- excluded, and back -----------------------------------------------------------------


def test_the_operator_lets_a_node_come_back_and_it_starts_afresh():
    cluster = started(4, max_restarts=3)
    leaving = others(cluster)[0]
    for _ in range(2):
        cluster.fail_worker(leaving)
        cluster.run(cluster.now + 2.0)
    assert leaving.stopped.code == 92
    refused = cluster.add(leaving.me.node)
    cluster.run(cluster.now + 1.0)
    assert refused.stopped.code == 92
    assert events(cluster, "member.refused")[-1]["member"] == leaving.me.node
    again = cluster.add(leaving.me.node, readmit=True)
    cluster.run_until(cluster.settled, 5.0)
    assert [f["member"] for f in events(cluster, "member.readmitted")] == [leaving.me.node]
    cluster.run(cluster.now + 1.0)
    cluster.fail_worker(again)
    next_epoch(cluster, 2.0)
    assert again in cluster.up  # one failure, not the third


def test_a_node_that_is_not_excluded_may_say_so_too():
    cluster = started(3)
    cluster.kill(others(cluster)[0])
    cluster.add("node9", readmit=True)
    cluster.run_until(cluster.settled, 2.0)
    assert events(cluster, "member.readmitted") == []


@pytest.mark.parametrize("first", [True, False])
def test_a_node_with_seven_of_eight_accelerators_is_refused_and_nobody_waits_for_it(first):
    cluster = Cluster(settings(4, workers=8))
    if first:
        unfit = cluster.add("node3", workers=7)
        cluster.run(1.0)
    for i in range(3):
        cluster.add(f"node{i}", workers=8)
    if not first:
        unfit = cluster.add("node3", workers=7)
    cluster.run_until(lambda: unfit.stopped is not None, 5.0)
    assert cluster.run_until(cluster.settled, 5.0) < 1.0
    assert unfit.stopped.code == 92
    assert " 7 " in unfit.stopped.reason
    assert [f["member"] for f in events(cluster, "member.refused")] == ["node3"]
    assert len(cluster.up[0].formed.members) == 3


def test_unfit_nodes_alone_leave_in_the_end():
    cluster = Cluster(settings(2, workers=8, join_timeout_s=5.0))
    nodes = [cluster.add(f"node{i}", workers=7) for i in range(2)]
    cluster.run(7.0)
    assert {n.stopped.code for n in nodes} == {92}


# --- joined but cold -------------------------------------------------------------------


def cold(nodes: int, ready: int, **kwargs) -> Cluster:
    cluster = Cluster(settings(nodes, **kwargs))
    for i in range(nodes):
        cluster.add(f"node{i}", ready=i < ready)
    cluster.run(1.0)
    return cluster


def warm(cluster: Cluster, *nodes) -> None:
    for node in nodes:
        cluster.report(node, WorkersReady())


@pytest.mark.parametrize("ready", [0, 1, 3])
def test_the_first_epoch_waits_for_all_to_be_warm(ready):
    cluster = cold(4, ready)
    cluster.run(10.0)
    assert not cluster.published
    warm(cluster, *cluster.nodes)
    assert cluster.run_until(cluster.settled, 1.0) < 0.1
    assert len(cluster.up[0].formed.members) == 4


def test_a_cold_node_that_dies_holds_nobody_up():
    for victim in range(4):
        cluster = cold(4, 0)
        limit_s = 1.5 if cluster.nodes[victim].machine.is_coordinator else 0.1
        cluster.kill(cluster.nodes[victim])
        warm(cluster, *cluster.up)
        assert cluster.run_until(cluster.settled, 5.0) < limit_s
        assert len(cluster.up[0].formed.members) == 3


def test_a_node_that_does_not_get_warm_is_left_out_in_the_end():
    cluster = cold(4, 3, join_timeout_s=10.0)
    cluster.run(9.0)
    assert not cluster.published
    cluster.run_until(lambda: bool(cluster.published), 2.0)
    cluster.run(cluster.now + 3.0)
    assert len(cluster.published[1].members) == 3
    warm(cluster, *cluster.nodes)
    cluster.run_until(cluster.settled, 2.0)
    assert len(cluster.up[0].formed.members) == 4


def test_expected_nodes_do_not_wait_for_a_cold_spare():
    cluster = Cluster(settings(3))
    for i in range(4):
        cluster.add(f"node{i}", ready=i != 2)
    cluster.run(2.0)
    assert len(cluster.published[1].members) == 3


def test_a_cold_newcomer_holds_up_nobody():
    cluster = started(3)
    newcomer = cluster.add("node9", ready=False)
    cluster.run(cluster.now + 5.0)
    assert epochs(cluster) == 1
    cluster.kill(others(cluster)[0] if others(cluster)[0] is not newcomer else others(cluster)[1])
    cluster.run(cluster.now + 2.0)
    assert newcomer.me not in cluster.up[0].formed.members
    warm(cluster, newcomer)
    cluster.run_until(cluster.settled, 3.0)
    assert newcomer.me in cluster.up[0].formed.members


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.003, 0.01, 0.5])
def test_readiness_is_not_lost_whoever_coordinates(after_s):
    cluster = cold(4, 2)
    cluster.kill(coordinator(cluster))
    cluster.run(cluster.now + after_s)
    warm(cluster, *cluster.up)
    cluster.run_until(cluster.settled, 30.0)
    assert len(cluster.up[0].formed.members) == 3


def test_a_cold_coordinator_leads_the_others_and_is_succeeded():
    cluster = Cluster(settings(4, join_timeout_s=3.0))
    first = cluster.add("node0", ready=False)
    cluster.run(0.5)
    for i in range(1, 4):
        cluster.add(f"node{i}")
    cluster.run_until(lambda: bool(cluster.published), 5.0)
    assert coordinator(cluster) is first
    cluster.run(cluster.now + 2.0)
    assert first.me not in cluster.up[0].formed.members
    cluster.kill(first)
    assert cluster.run_until(cluster.settled, 3.0) < 0.5


def test_a_bad_node_does_not_end_a_job_whose_others_are_still_cold():
    cluster = Cluster(settings(2, least=1, join_timeout_s=1.0))
    bad = cluster.add("node0")
    other = cluster.add("node1", ready=False)
    cluster.run(3.0)
    cluster.report(bad, NodeLeaving(reason="a failed check"))
    cluster.run(cluster.now + 2.0)
    assert other.stopped is None
    warm(cluster, other)
    cluster.run_until(lambda: other.working is not None, 2.0)


def test_who_is_lost_is_remembered_as_long_as_it_may_serve():
    cluster = started(4)
    first, second, *_ = others(cluster)
    cluster.kill(first)
    next_epoch(cluster, within=10.0)
    assert {m.agent_id for m in second.formed.lost} == {first.me.agent_id}
    cluster.add("node9")
    next_epoch(cluster, within=20.0)
    assert {m.agent_id for m in second.formed.lost} == {first.me.agent_id}
    cluster.run(cluster.now + SERVE_S)
    cluster.kill(named(cluster, "node9"))
    next_epoch(cluster, within=10.0)
    assert [m.node for m in second.formed.lost] == ["node9"]
