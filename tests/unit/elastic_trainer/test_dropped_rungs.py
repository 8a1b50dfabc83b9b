"""A number of nodes that the script cannot run costs an epoch, not the job; in virtual time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from membership_sim import Cluster
from test_membership import coordinator, settings, started
from test_membership_failures import events

from elastic_trainer.agent.membership.notices import WorkersFailed, WorkersStepped
from elastic_trainer.board.state import Sizes
from elastic_trainer.record.failures import Action, Failure, Kind

TRIED = Sizes(trained=(4,), dropped=(3,))
ODD = (Kind.CRASH, "AssertionError: 4 % 3")


def size(cluster: Cluster) -> int:
    return len(cluster.published[max(cluster.published)].members)


def train(cluster: Cluster) -> None:
    """Have the first node of the epoch that runs report a step."""
    formed = cluster.published[max(cluster.published)]
    first = cluster.by_id[formed.members[0].agent_id]
    cluster.report(first, WorkersStepped(epoch=formed.epoch))
    cluster.run(cluster.now + 0.1)


def lose(cluster: Cluster, *nodes) -> None:
    """Kill nodes, and wait for the epoch of the others."""
    before = max(cluster.published)
    for node in nodes:
        cluster.kill(node)
    cluster.run_until(lambda: max(cluster.published) > before, within=20.0)
    cluster.run(cluster.now + 0.1)


def fail_all(cluster: Cluster, kind: Kind, detail: str, **report) -> None:
    for node in [n for n in cluster.up if n.working is not None]:
        cluster.fail_worker(node, kind, detail, **{"stepped": False, **report})


def odd_epoch(cluster: Cluster, *nodes) -> None:
    """Lose nodes after a step, and fail alike on those that are left."""
    train(cluster)
    lose(cluster, *nodes)
    fail_all(cluster, *ODD)


def test_the_next_smaller_rung_is_used_and_a_spare_waits():
    cluster = started(4)
    odd_epoch(cluster, cluster.up[3])
    cluster.run_until(cluster.settled, within=2.0)
    assert size(cluster) == 2
    assert {n.stopped for n in cluster.up} == {None}
    (dropped,) = events(cluster, "rung.dropped")
    assert dropped["nodes"] == 3
    assert "AssertionError: 4 % 3" in dropped["reason"]
    assert cluster.board.content[0].sizes == TRIED


def test_the_job_grows_past_a_dropped_rung():
    cluster = started(4)
    odd_epoch(cluster, cluster.up[3])
    cluster.run_until(cluster.settled, within=2.0)
    cluster.run(cluster.now + 1.0)
    cluster.add("node3")
    cluster.run_until(lambda: cluster.settled() and size(cluster) == 4, within=10.0)


def test_without_a_smaller_rung_it_waits_and_then_ends_with_92():
    cluster = started(4, least=3)
    odd_epoch(cluster, cluster.up[3])
    cluster.run_until(cluster.parked, within=2.0)
    (parked,) = events(cluster, "membership.parked")
    assert (parked["have"], parked["need"]) == (3, 4)
    cluster.run(cluster.now + cluster.settings.join_timeout_s + 1.0)
    left = [n for n in cluster.nodes if n.stopped is not None]
    assert {n.stopped.code for n in left} == {92}
    numbers = re.findall(r"\d+", left[0].stopped.reason)
    assert numbers[:3] == ["3", "4", "3"], "nodes left, those of the last rung, those in vain"


def test_without_a_smaller_rung_it_goes_on_when_the_node_is_back():
    cluster = started(4, least=3)
    odd_epoch(cluster, cluster.up[3])
    cluster.run_until(cluster.parked, within=2.0)
    cluster.add("node3")
    cluster.run_until(lambda: cluster.settled() and size(cluster) == 4, within=5.0)


def test_a_successor_remembers():
    cluster = started(5, least=2)
    odd_epoch(cluster, cluster.up[4])
    cluster.run_until(cluster.settled, within=2.0)
    assert size(cluster) == 3
    cluster.kill(coordinator(cluster))
    cluster.add("node7")
    cluster.run(cluster.now + 10.0)
    assert coordinator(cluster).me.node == "node0"
    assert len(cluster.up) == 4
    assert size(cluster) == 3
    assert len(events(cluster, "rung.dropped")) == 1


@pytest.mark.parametrize(("job", "sizes"), [("7.1", TRIED), ("8.0", Sizes())])
def test_a_requeue_remembers_and_a_new_submission_tries_again(job, sizes):
    cluster = Cluster(settings(4, least=3, join_timeout_s=5.0))
    for i in range(4):
        cluster.add(f"node{i}", job="7.0")
    cluster.run_until(cluster.settled, within=1.0)
    odd_epoch(cluster, cluster.up[3])
    cluster.run(cluster.now + 10.0)
    assert cluster.up == []
    cluster.add("node0", job=job)
    cluster.run(cluster.now + 1.0)
    assert cluster.board.content[0].sizes == sizes


def test_a_size_that_has_trained_is_never_dropped():
    cluster = started(4)
    train(cluster)
    lose(cluster, cluster.up[3])
    train(cluster)
    lose(cluster, cluster.up[2])
    cluster.add("node2")
    cluster.run_until(lambda: cluster.settled() and size(cluster) == 3, within=40.0)
    cluster.run(cluster.now + 1.0)
    fail_all(cluster, *ODD)
    cluster.run(cluster.now + 1.0)
    assert {n.stopped.code for n in cluster.nodes if n.stopped} == {93}
    assert events(cluster, "rung.dropped") == []


@pytest.mark.parametrize(
    ("trained", "report"),
    [(False, {}), (True, {"stepped": True})],
    ids=["nothing has trained yet", "after a step"],
)
def test_the_scripts_own_error_ends_the_job(trained, report):
    cluster = started(4)
    if trained:
        train(cluster)
    lose(cluster, cluster.up[3])
    fail_all(cluster, *ODD, **report)
    cluster.run(cluster.now + 1.0)
    assert {n.stopped.code for n in cluster.nodes if n.stopped} == {93}


@pytest.mark.parametrize("nodes", [1, 3])
def test_an_error_of_one_rank_is_tried_once_more(nodes):
    """The only rank there is, or one of which the others see consequences."""
    cluster = started(4)
    train(cluster)
    lose(cluster, *cluster.up[nodes:])
    for expected in ([], [nodes]):
        up = [n for n in cluster.up if n.working is not None]
        cluster.fail_worker(up[0], *ODD, stepped=False)
        for node in up[1:]:
            cluster.fail_worker(node, Kind.COLLATERAL, "connection reset", stepped=False)
        cluster.run(cluster.now + 1.0)
        assert [e["nodes"] for e in events(cluster, "rung.dropped")] == expected
    assert {n.stopped for n in cluster.up} == {None}


def test_a_worker_that_knows_that_a_restart_cannot_help_is_believed():
    cluster = started(4)
    train(cluster)
    lose(cluster, cluster.up[3])
    said = Failure(kind=Kind.USER_ERROR, action=Action.STOP, detail="HF533 …", sure=True)
    failed = WorkersFailed(epoch=2, local_rank=0, rank=1, step=0, failure=said, stepped=False)
    cluster.report(cluster.up[1], failed)
    cluster.run_until(lambda: max(cluster.published) == 3 and cluster.settled(), within=3.0)
    assert size(cluster) == 2


@pytest.mark.parametrize("kind", [Kind.INFRASTRUCTURE, Kind.KILLED, Kind.HANG])
def test_what_no_program_does_drops_nothing(kind):
    cluster = started(4)
    train(cluster)
    lose(cluster, cluster.up[3])
    fail_all(cluster, kind, "OSError: [Errno 5] Input/output error")
    cluster.run(cluster.now + 3.0)
    assert events(cluster, "rung.dropped") == []


def play(cluster: Cluster, bad: set[int]) -> None:
    """Have the workers train, or fail alike on `bad` numbers of nodes, until nothing changes."""
    epoch = 0
    while epoch != max(cluster.published):
        epoch = max(cluster.published)
        if size(cluster) in bad:
            fail_all(cluster, *ODD)
        elif any(node.working == epoch for node in cluster.up):
            train(cluster)
        cluster.run(cluster.now + 1.0)


acts = st.sampled_from(["kill a member", "kill the coordinator", "add a node"])


@hypothesis_settings(max_examples=40, deadline=None)
@given(nodes=st.integers(2, 7), bad=st.sets(st.integers(1, 6)), acts=st.lists(acts, max_size=8))
def test_whatever_comes_and_goes_the_job_runs_on_all_nodes_in_the_end(nodes, bad, acts):
    """A script that cannot run on `bad` numbers of nodes, but on as many as it began with."""
    bad -= {number for number in bad if number >= nodes}
    cluster = started(nodes, join_timeout_s=600.0, max_restarts=1000)
    play(cluster, bad)
    for act in acts:
        if act == "add a node" and len(cluster.up) < nodes:
            cluster.add(f"more{len(cluster.nodes)}")
        elif act != "add a node" and len(cluster.up) > 1:
            leads = act == "kill the coordinator"
            struck = [n for n in cluster.up if n.machine.is_coordinator == leads]
            cluster.kill(struck[0])
        cluster.run(cluster.now + 15.0)
        play(cluster, bad)
    while len(cluster.up) < nodes:
        cluster.add(f"more{len(cluster.nodes)}")
    cluster.run(cluster.now + 60.0)
    play(cluster, bad)
    assert size(cluster) == nodes, cluster.describe()
    assert {n.stopped for n in cluster.up} == {None}
    sizes = cluster.board.content[0].sizes
    assert set(sizes.dropped) <= bad
    assert not set(sizes.trained) & bad
    dropped = [event["nodes"] for event in events(cluster, "rung.dropped")]
    assert len(dropped) == len(set(dropped)), "tried again"
