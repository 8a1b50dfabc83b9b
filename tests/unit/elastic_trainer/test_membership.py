"""Membership, one behaviour a test, in virtual time."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from membership_sim import Cluster

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.messages import PROTOCOL, Join
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochFormed,
    NodeLeaving,
    StopAsked,
    Warned,
    WorkersEnded,
)
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.failures import Kind


def settings(nodes: int, *, least: int = 1, **kwargs) -> Settings:
    return Settings(
        ladder=Ladder.data_parallel(max_nodes=nodes, min_nodes=least, workers=1),
        join_timeout_s=kwargs.pop("join_timeout_s", 30.0),
        **kwargs,
    )


def started(nodes: int, **kwargs) -> Cluster:
    cluster = Cluster(settings(nodes, **kwargs))
    for i in range(nodes):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 1.0)
    return cluster


def coordinator(cluster: Cluster):
    (found,) = [n for n in cluster.up if n.machine.is_coordinator]
    return found


def others(cluster: Cluster):
    return [n for n in cluster.up if not n.machine.is_coordinator]


@pytest.mark.parametrize("nodes", [1, 2, 4, 16])
def test_all_nodes_share_one_epoch(nodes):
    cluster = started(nodes)
    assert max(cluster.published) == 1


def test_the_first_epoch_waits_for_all_then_goes_on_with_fewer():
    cluster = Cluster(settings(4, join_timeout_s=10.0))
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run(9.9)
    assert not cluster.published
    cluster.run_until(cluster.settled, within=1.0)


def warnings(node) -> list[str]:
    return [notice.text for notice in node.notices if isinstance(notice, Warned)]


def test_an_agent_whose_workers_are_otherwise_is_refused_before_anything_trains():
    cluster = Cluster(settings(2, terms={"workers per node": "2", "script": "a.py"}))
    first = cluster.add("node0")
    cluster.run(1.0)
    odd = settings(2, terms={"workers per node": "1", "script": "b.py"})
    second = cluster.add("node1", settings=odd)
    cluster.run_until(lambda: second.stopped is not None, within=2.0)
    assert second.stopped.code == 93
    for text in (second.stopped.reason, *warnings(first)):
        assert "HF527" in text
        assert re.findall(r"(\d) on (\w+)", text) == [("1", "node1"), ("2", "node0")]
    assert len(warnings(first)) == 1
    assert not cluster.published
    cluster.add("node1")
    cluster.run_until(cluster.settled, within=2.0)


def test_an_agent_with_other_arguments_is_told_so_once_and_trains():
    cluster = Cluster(settings(3, terms={"nodes": "1:3", "arguments": "--seed 1"}))
    cluster.add("node0")
    cluster.run(1.0)
    other = settings(3, terms={"nodes": "1:3", "arguments": "--seed 2"})
    odd = cluster.add("node1", settings=other)
    alike = cluster.add("node2")
    cluster.run_until(cluster.settled, within=2.0)
    cluster.reset(odd)
    cluster.run_until(cluster.settled, within=5.0)
    cluster.kill(coordinator(cluster))  # its successor, too, has other terms than one of them
    cluster.run_until(cluster.settled, within=5.0)
    (text,) = warnings(cluster.nodes[0])
    assert warnings(odd)[0] == text
    assert re.match(r"HF528 .*\barguments\b", text)
    said = re.findall(r"--seed \d on \w+", text)
    assert said == ["--seed 2 on node1", "--seed 1 on node0"]
    assert all("--seed 1 on node2" in text for text in warnings(alike))
    assert {n.stopped for n in cluster.nodes} == {None}


def test_an_agent_of_another_protocol_is_refused_with_both():
    cluster = Cluster(settings(2))
    first = cluster.add("node0")
    cluster.run(1.0)
    member = replace(first.me, agent_id="x", node="node1", host="node1", port=9)
    join = Join(member=member, job="job", last_epoch=0, protocol=7)
    cluster.feed(first, first.hearing(lambda role: role.received(1, join)))
    (said,) = warnings(first)
    assert re.findall(r"(\d) on (\w+)", said) == [("7", "node1"), (str(PROTOCOL), "node0")]


def test_the_first_epoch_does_not_wait_for_a_node_that_has_died():
    cluster = Cluster(settings(4))
    nodes = [cluster.add(f"node{i}") for i in range(3)]
    cluster.run(1.0)
    cluster.kill(next(n for n in nodes if not n.machine.is_coordinator))
    cluster.add("node3")
    assert cluster.run_until(cluster.settled, within=2.0) < 0.5


def test_too_few_at_the_start_ends_with_92():
    cluster = Cluster(settings(4, least=3, join_timeout_s=10.0))
    nodes = [cluster.add("node0"), cluster.add("node1")]
    cluster.run(12.0)
    assert {n.stopped.code for n in nodes} == {92}


@pytest.mark.parametrize("silent", [False, True])
def test_a_dead_member_is_left_out(silent):
    cluster = started(4)
    cluster.kill(others(cluster)[0], silent=silent)
    took = cluster.run_until(cluster.settled, within=10.0)
    limits = cluster.settings
    assert took < (limits.dead_after_s + 2 * limits.heartbeat_s if silent else 0.1)


@pytest.mark.parametrize("silent", [False, True])
def test_a_dead_coordinator_is_succeeded(silent):
    cluster = started(4)
    cluster.kill(coordinator(cluster), silent=silent)
    took = cluster.run_until(cluster.settled, within=20.0)
    limits = cluster.settings
    assert took < (limits.dead_after_s + limits.dial_timeout_s + 3 if silent else 0.2)


def test_the_coordinator_and_the_first_in_line_die_together():
    cluster = started(5)
    cluster.kill(coordinator(cluster))
    cluster.kill(cluster.up[0])
    assert cluster.run_until(cluster.settled, within=20.0) < 2.0


def test_all_but_one_die_together():
    cluster = started(5)
    for node in cluster.up[:4]:
        cluster.kill(node)
    cluster.run_until(cluster.settled, within=20.0)
    assert len(cluster.up[0].formed.members) == 1


def test_two_members_die_together():
    cluster = started(4)
    for node in others(cluster)[:2]:
        cluster.kill(node)
    assert cluster.run_until(cluster.settled, within=5.0) < 0.2


def test_below_the_last_rung_the_job_parks_and_goes_on_with_a_replacement():
    cluster = started(3, least=3)
    cluster.kill(others(cluster)[0])
    cluster.run(cluster.now + 20)
    assert max(cluster.published) == 1
    assert any(event == "membership.parked" for _, event, _ in coordinator(cluster).events)
    cluster.add("node9")
    cluster.run_until(cluster.settled, within=1.0)


def test_a_parked_job_ends_with_92_once_no_node_has_come_for_long():
    """So that its scheduler finds others; a fixed number of nodes would else wait for its limit."""
    cluster = started(3, least=3, join_timeout_s=60.0)
    cluster.kill(others(cluster)[0])
    cluster.run(cluster.now + 50)
    node = cluster.add("node9")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 30)
    assert all(node.stopped is None for node in cluster.up), "it was parked for 50 s only"
    cluster.kill(node)
    cluster.run(cluster.now + 50)
    assert all(node.stopped is None for node in cluster.up)
    up = cluster.up
    cluster.run(cluster.now + 15)
    assert {node.stopped.code for node in up} == {92}
    assert re.findall(r"\d+", up[0].stopped.reason)[:2] == ["2", "3"]  # left, needed


def test_a_coordinator_that_is_excluded_while_it_is_cut_off_waits_for_the_others():
    cluster = started(2)
    leader, other = coordinator(cluster), others(cluster)[0]
    cluster.partition({leader.me.node})
    cluster.run_until(lambda: other not in leader.formed.members, within=1.0)
    cluster.run_until(lambda: max(cluster.published) == 2, within=20.0)
    cluster.report(leader, NodeLeaving(reason="a failed check"))
    cluster.run(cluster.now + 5.0)
    assert leader.stopped is None
    cluster.heal()
    cluster.run_until(lambda: other.working == max(cluster.published) > 2, within=15.0)
    assert leader.working is None


def test_a_member_left_behind_follows_a_newcomer_that_leads_before_it_begins_an_epoch():
    """The coordinator's machine lost power and is back: what it trained on, only the other has."""
    cluster = started(2)
    leader, member = coordinator(cluster), others(cluster)[0]
    cluster.kill(leader, silent=True)
    cluster.run(cluster.now + 1.0)
    again = cluster.add(leader.me.node)
    cluster.run_until(lambda: again.machine.is_coordinator, within=30.0)
    assert cluster.run_until(lambda: member.machine.ctx.term == 2, within=10.0) < 1.0
    cluster.run_until(cluster.settled, within=5.0)
    cluster.run(cluster.now + 1.0)
    assert cluster.training.lost == []


def test_growth_waits_for_the_boundary_and_costs_no_failure():
    cluster = started(3)
    cluster.kill(others(cluster)[0])
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 2.0)
    small = max(cluster.published)
    cluster.add("node7")
    cluster.run_until(cluster.settled, within=2.0)
    assert max(cluster.published) == small + 1
    assert cluster.up[0].formed.reason == "growth"


def test_a_node_more_than_needed_waits_as_spare_and_steps_in():
    cluster = Cluster(settings(2, least=2))
    for i in range(3):
        cluster.add(f"node{i}")
    cluster.run_until(cluster.settled, within=1.0)
    cluster.run(cluster.now + 1)
    before = max(cluster.published)
    victim = next(n for n in others(cluster) if n.working)
    cluster.kill(victim)
    cluster.run_until(cluster.settled, within=1.0)
    assert max(cluster.published) == before + 1


def test_a_failed_worker_restarts_all_with_the_same_nodes():
    cluster = started(3)
    cluster.fail_worker(cluster.up[1])
    assert cluster.run_until(lambda: max(cluster.published) == 2 and cluster.settled(), 1.0) < 0.1


def test_a_node_that_fails_twice_leaves():
    cluster = started(3)
    for _ in range(2):
        cluster.fail_worker(next(n for n in cluster.nodes if n.me.node == "node1"))
        cluster.run(cluster.now + 2.0)
    node1 = next(n for n in cluster.nodes if n.me.node == "node1")
    gone = not node1.alive or node1.machine.is_coordinator
    assert gone
    assert "node1" not in {m.node for m in cluster.up[0].formed.members}


def test_what_happened_is_remembered_by_a_successor():
    cluster = started(4, max_restarts=100)
    member = others(cluster)[-1]
    cluster.fail_worker(member)
    cluster.run(cluster.now + 2.0)
    cluster.kill(coordinator(cluster))
    cluster.run_until(cluster.settled, within=2.0)
    cluster.run(cluster.now + 2.0)
    cluster.fail_worker(member)
    cluster.run(cluster.now + 2.0)
    assert member.me.node not in {m.node for m in cluster.up[0].formed.members}


def test_the_job_wide_budget_ends_with_94():
    cluster = started(4, max_restarts=2, node_failures=100)
    for i in range(3):
        cluster.fail_worker(cluster.up[i % len(cluster.up)])
        cluster.run(cluster.now + 2.0)
    assert {n.stopped.code for n in cluster.nodes} == {94}


def test_the_same_crash_on_two_nodes_at_one_step_ends_with_93():
    cluster = started(3)
    for i in (0, 1):
        cluster.fail_worker(cluster.up[i], Kind.CRASH, "ZeroDivisionError: division by zero")
        cluster.run(cluster.now + 2.0)
    assert {n.stopped.code for n in cluster.nodes} == {93}
    assert "ZeroDivisionError" in cluster.nodes[0].stopped.reason


def test_a_node_that_leaves_is_not_let_in_again():
    cluster = started(3)
    leaving = others(cluster)[0]
    cluster.report(leaving, NodeLeaving(reason="unreapable worker"))
    cluster.run_until(cluster.settled, within=2.0)
    again = cluster.add(leaving.me.node)
    cluster.run(cluster.now + 3.0)
    assert again.stopped.code == 92
    assert "unreapable worker" in again.stopped.reason


def test_a_stop_saves_everywhere_then_ends_with_91():
    cluster = started(3)
    cluster.report(cluster.up[2], StopAsked(reason="SIGTERM"))
    cluster.run(cluster.now + 3.0)
    assert {n.stopped.code for n in cluster.nodes} == {91}
    assert cluster.board.content[0].lease is None


def test_the_signal_of_the_first_stop_goes_to_every_node():
    cluster = started(3)
    cluster.report(cluster.up[2], StopAsked(reason="SIGINT", signal="SIGINT"))
    cluster.report(cluster.up[1], StopAsked(reason="SIGTERM"))
    cluster.run(cluster.now + 3.0)
    asked = [[x.signal for x in n.notices if isinstance(x, AskWorkers)] for n in cluster.nodes]
    assert asked == [["SIGINT"]] * 3


def test_a_stop_of_scripts_that_did_not_say_that_they_saved_also_ends_with_91():
    cluster = started(3)
    cluster.up[1].saves = False
    cluster.report(cluster.up[2], StopAsked(reason="SIGTERM"))
    cluster.run(cluster.now + 3.0)
    assert {n.stopped.code for n in cluster.nodes} == {91}
    assert "saved at" not in cluster.nodes[0].stopped.reason
    assert not cluster.board.content[0].finished


def test_growth_does_not_ask_scripts_whether_they_saved():
    cluster = started(3)
    for node in cluster.up:
        node.saves = False
    cluster.kill(cluster.up[2])
    cluster.run_until(lambda: len(cluster.up[0].formed.members) == 2, within=10.0)
    cluster.add("node8")
    cluster.run_until(lambda: len(cluster.up[0].formed.members) == 3, within=10.0)
    assert all(node.stopped is None for node in cluster.up)


def test_the_end_reaches_all_and_an_agent_that_comes_too_late():
    cluster = started(3)
    for node in cluster.up:
        cluster.report(node, WorkersEnded(epoch=node.formed.epoch, finished=True, step=9))
    cluster.run(cluster.now + 2.0)
    late = cluster.add("node8")
    cluster.run(cluster.now + 2.0)
    assert {n.stopped.code for n in [*cluster.nodes, late]} == {0}


def test_a_paused_coordinator_that_comes_back_is_a_member():
    cluster = started(4)
    old = coordinator(cluster)
    cluster.pause(old)
    rest = [n for n in cluster.up if n is not old]
    cluster.run_until(lambda: all(n.formed.coordinator != old.me.node for n in rest), within=20.0)
    assert sum(n.machine.is_coordinator for n in rest) == 1
    cluster.resume(old)
    cluster.run_until(cluster.settled, within=20.0)
    assert coordinator(cluster) is not old


def test_a_coordinator_whose_members_all_lost_power_goes_on_alone():
    cluster = started(5)
    for node in others(cluster):
        cluster.kill(node, silent=True)
    limits = cluster.settings
    took = cluster.run_until(cluster.settled, within=60.0)
    assert took < 2 * limits.dead_after_s + 2 * limits.heartbeat_s + 2 * limits.dial_timeout_s


def test_a_newer_agent_of_a_node_replaces_the_old_one():
    cluster = started(3)
    old = others(cluster)[0]
    cluster.add(old.me.node)
    cluster.run_until(cluster.settled, within=3.0)
    assert old.stopped.code == 93


def pods(nodes: int, **kwargs) -> Cluster:
    cluster = Cluster(settings(nodes, **kwargs))
    for i in range(nodes):
        cluster.add(f"pod{i}", host=f"m{i}")
    return cluster


@pytest.mark.parametrize("silent", [False, True])
def test_a_pod_made_anew_under_the_coordinators_name_waits_for_its_end_and_follows(silent):
    cluster = pods(3)
    cluster.run_until(cluster.settled, within=1.0)
    old = coordinator(cluster)
    again = cluster.add(old.me.node, host="m9")
    cluster.run(cluster.now + 30.0)
    assert again.stopped is None
    assert max(cluster.published) == 1, "nobody is disturbed"
    waiting = [fields for _, event, fields in old.events if event == "member.waiting"]
    assert [(f["member"], f["host"]) for f in waiting] == [(old.me.node, "m9")]
    cluster.kill(old, silent=silent)
    took = cluster.run_until(cluster.settled, within=20.0)
    assert again.me in again.formed.members
    assert took < 1.0 or silent


def test_a_pod_made_anew_in_place_of_the_only_one_takes_over():
    cluster = pods(1)
    cluster.run_until(cluster.settled, within=1.0)
    old = coordinator(cluster)
    again = cluster.add(old.me.node, host="m9")
    cluster.run(cluster.now + 30.0)
    assert old.machine.is_coordinator
    assert not again.machine.is_coordinator
    cluster.kill(old)
    cluster.run_until(cluster.settled, within=cluster.settings.takeover_refused_s + 2)
    assert again.machine.is_coordinator


def test_a_pod_that_was_cut_off_does_not_drive_out_the_one_made_in_its_place():
    cluster = pods(3)
    cluster.run_until(cluster.settled, within=1.0)
    old = coordinator(cluster)
    cluster.pause(old)
    cluster.run(cluster.now + 20.0)
    again = cluster.add(old.me.node, host="m9")
    cluster.run(cluster.now + 10.0)
    cluster.resume(old)
    cluster.run(cluster.now + 10.0)
    assert old.stopped.code == 93
    assert again.stopped is None
    cluster.run_until(cluster.settled, within=1.0)


def test_before_the_first_epoch_a_place_counts_once_however_often_its_pod_is_made_anew():
    cluster = Cluster(settings(3))
    cluster.add("pod0", host="m0")
    cluster.run(1.0)
    old = coordinator(cluster)
    again = cluster.add("pod0", host="m9")
    cluster.run(cluster.now + 3.0)
    assert old.machine.is_coordinator
    cluster.kill(old)
    cluster.add("pod1", host="m1")
    cluster.run(cluster.now + 5.0)
    assert again.machine.is_coordinator
    assert not cluster.published, "one of three is still to come"
    cluster.add("pod2", host="m2")
    cluster.run_until(cluster.settled, within=1.0)


def test_members_are_placed_in_the_natural_order_of_their_names():
    cluster = started(11)
    notice = cluster.up[0].formed
    assert isinstance(notice, EpochFormed)
    assert [m.node for m in notice.members] == [f"node{i}" for i in range(11)]


# --- what was found by random faults -------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_coordinator_that_dies_at_any_moment_of_a_recovery_is_succeeded(nodes, restarted):
    """Between taking an epoch's number and publishing it, say; also when its port answers again."""
    for events in range(60):
        cluster = started(nodes)
        old = coordinator(cluster)
        cluster.fail_worker(others(cluster)[0])
        cluster.run_events(events)
        cluster.kill(old)
        if restarted:
            cluster.add(old.me.node)
        took = cluster.run_until(cluster.settled, within=20.0)
        assert took < 1.0, f"{took} s after {events} events"


def test_workers_end_when_the_job_parks_under_a_successor():
    cluster = started(3, least=3)
    cluster.kill(coordinator(cluster))
    assert cluster.run_until(cluster.parked, within=20.0) < 1.0


def test_workers_end_on_a_node_that_comes_back_to_a_parked_job():
    cluster = started(3, least=3)
    back, *_ = others(cluster)
    cluster.partition({back.me.node})
    cluster.run(cluster.now + 20.0)
    cluster.kill(next(n for n in others(cluster) if n is not back))
    cluster.heal()
    cluster.run_until(cluster.parked, within=20.0)


def test_a_request_lost_with_a_connection_is_made_again():
    cluster = started(3)
    cluster.reset(coordinator(cluster))
    cluster.report(coordinator(cluster), StopAsked(reason="SIGTERM"))
    cluster.run(cluster.now + 3.0)
    assert {n.stopped.code for n in cluster.nodes} == {91}


def test_broken_connections_alone_cost_no_epoch():
    cluster = started(4)
    for node in cluster.up:
        cluster.reset(node)
    cluster.run(cluster.now + 5.0)
    assert cluster.settled()
    assert max(cluster.published) == 1


def test_a_stop_holds_when_a_node_leaves_meanwhile():
    cluster = started(3)
    leaving, *_ = others(cluster)
    cluster.report(coordinator(cluster), StopAsked(reason="SIGTERM"))
    cluster.report(leaving, NodeLeaving(reason="unreapable worker"))
    cluster.run(cluster.now + 3.0)
    assert {n.stopped.code for n in cluster.nodes} == {91, 92}
    assert leaving.stopped.code == 92


def test_a_second_agent_on_the_coordinators_node_is_refused():
    cluster = started(2)
    first = coordinator(cluster)
    second = cluster.add(first.me.node)
    cluster.run(cluster.now + 1.0)
    assert second.stopped.code == 93
    assert first.me.node in second.stopped.reason
    assert coordinator(cluster) is first
    assert cluster.settled()


def test_a_crash_that_follows_a_rank_ends_with_93_before_it_costs_a_third_node():
    cluster = started(4)
    for _ in range(5):
        first = next((n for n in cluster.up if n.me == n.formed.members[0]), None)
        if first is not None:
            cluster.fail_worker(first, Kind.FAULT, "SIGSEGV")
            cluster.run(cluster.now + 2.0)
    codes = sorted(n.stopped.code for n in cluster.nodes)
    assert codes in ([92, 93, 93, 93], [93, 93, 93, 93])
