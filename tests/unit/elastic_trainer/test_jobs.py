"""Attempts of one Slurm job: their names, and the later one deposing what is left of the former."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from membership_sim import Cluster

from elastic_trainer.agent.membership.effects import Settings
from elastic_trainer.agent.membership.lease import slurm_job, supersedes
from elastic_trainer.agent.membership.notices import StopAsked
from elastic_trainer.plan.ladder import Ladder

COUNTS = st.integers(0, 10**6)
NAMES = st.one_of(
    st.builds(lambda job, restart: f"{job}.{restart}", COUNTS, COUNTS),
    st.sampled_from(["17", "17.", ".1", "local-17.1", "17.1.1", "17.-1", "a.b", ""]),
)


def test_a_requeued_job_has_another_name():
    assert slurm_job({"SLURM_JOB_ID": "17"}) == "17.0"
    assert slurm_job({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "3"}) == "17.3"
    assert slurm_job({}) is None


@given(COUNTS, COUNTS, COUNTS)
def test_a_later_attempt_of_the_same_job_supersedes(job, one, other):
    assert supersedes(f"{job}.{one}", f"{job}.{other}") == (one > other)
    assert not supersedes(f"{job}.{one}", f"{job + 1}.{other}")


@given(NAMES, NAMES)
def test_of_two_names_at_most_one_supersedes(one, other):
    assert not (supersedes(one, other) and supersedes(other, one))
    if not (one[:1].isdigit() and other[:1].isdigit()):
        assert not supersedes(one, other)


def started(nodes: int, job: str) -> Cluster:
    cluster = Cluster(
        Settings(
            ladder=Ladder.data_parallel(max_nodes=nodes, min_nodes=1, workers=1), join_timeout_s=5.0
        )
    )
    for i in range(nodes):
        cluster.add(f"node{i}", job=job)
    cluster.run_until(cluster.settled, within=1.0)
    return cluster


@pytest.mark.parametrize("stale", [0, 1])
def test_a_later_attempt_takes_the_run_at_once_and_what_was_left_ends(stale):
    cluster = started(2, "17.0")
    old = cluster.nodes[stale]
    for node in list(cluster.nodes):
        if node is not old:
            cluster.kill(node, silent=True)
    if stale:
        cluster.run(cluster.now + 60.0)  # it has become the coordinator
    fresh = [cluster.add(f"node{i}", job="17.1") for i in (2, 3)]
    begun = cluster.now
    cluster.run_until(
        lambda: all(n.formed is not None and n.working is not None for n in fresh), within=20.0
    )
    assert cluster.now - begun < 6.0
    cluster.run(cluster.now + 30.0)
    assert old.stopped is not None
    assert old.stopped.code == 93
    assert old.working is None
    assert all(n.stopped is None for n in fresh)


def test_another_job_is_still_refused():
    cluster = started(2, "17.0")
    other = cluster.add("node9", job="18.1")
    cluster.run(cluster.now + 20.0)
    assert other.stopped.code == 93
    assert "job 17.0" in other.stopped.reason


def test_a_stale_agent_does_not_take_the_run_after_its_later_attempt_has_ended():
    cluster = started(2, "17.1")
    for node in list(cluster.nodes):
        cluster.report(node, StopAsked(reason="test"))
    cluster.run(cluster.now + 5.0)
    assert all(n.stopped is not None for n in cluster.nodes)
    stale = cluster.add("node9", job="17.0")
    cluster.run(cluster.now + 30.0)
    assert stale.stopped.code == 93
    assert "17.1" in stale.stopped.reason
