"""From the manifest to the last step: pods train, are lost, drained, recreated, and resume."""

from __future__ import annotations

import time
from typing import Any

import pytest
from k8s_cluster import Cluster
from k8s_runs import K8sRun

from launcher.render.kubernetes_names import RUN_LABEL

KINDS = ("pytorchjob", "jobset", "trainjob")
ONE_KIND = tuple(
    kind if kind == "pytorchjob" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS
)
"""The others in `make chaos`: what differs between kinds is how a pod's end is answered."""
DONE = ("Succeeded", "Completed", "Complete")

pytestmark = pytest.mark.timeout(600)


def test_a_run_trains_without_rights_on_a_root_that_cannot_be_written(cluster: Cluster) -> None:
    wishes = "run_as_user=12345 run_as_group=12345 fs_group=12345 non_root=true read_only_root=true"
    sets = tuple(f"kubernetes.security.{wish}" for wish in wishes.split())
    run = K8sRun(cluster, "jobset", steps=16, every=8, sets=sets)
    run.ended(*DONE)
    assert {path.stat().st_uid for path in [run.path, *run.path.rglob("*")]} == {12345}
    assert run.step() == 16
    run.check_ledger()
    state = run.board()
    assert (state.finished, state.commits[-1].step) == (True, 16)
    started = run.events("agent.started")
    members = run.events("epoch.formed")[-1]["members"]
    assert {event["node"] for event in started} >= set(members), "called as their pods"
    assert {event["host"] for event in started} <= set(cluster.nodes()), "on nodes of the cluster"
    assert len({event["address"] for event in started}) == 2
    assert [event["code"] for event in run.events("run.ended")] == [0]


@pytest.mark.parametrize("kind", ONE_KIND)  # a JobSet makes the coordinator anew, below
def test_one_lost_pod_is_made_anew_alone_and_takes_part_again(cluster: Cluster, kind: str) -> None:
    run = K8sRun(cluster, kind)
    first = run.until_steps(2)
    before = run.pods()
    # Not the one that coordinates: the new pod may be in time for its succession.
    lost = next(name for name in before if name != first["coordinator"])
    cluster.kill_pod(lost)
    second = _next_epoch(run, first)
    assert second["members"] == [first["coordinator"]]
    third = run.until_steps(2, after=first["epoch"])
    assert third["epoch"] > second["epoch"]
    _lost_nothing(run, first, before)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "jobset" else pytest.mark.slow) for kind in KINDS],
)
def test_a_lost_pod_that_coordinates_is_succeeded(cluster: Cluster, kind: str) -> None:
    run = K8sRun(cluster, kind)
    first = run.until_steps(2)
    before = run.pods()
    kept = next(name for name in before if name != first["coordinator"])
    cluster.kill_pod(first["coordinator"])
    second = _next_epoch(run, first)
    assert second["coordinator"] == kept
    assert kept in second["members"], "and the new pod where it was in time"
    run.until_steps(2, after=first["epoch"])
    _lost_nothing(run, first, before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_never_runs_our_code_ends_at_once(cluster: Cluster, kind: str) -> None:
    run = K8sRun(cluster, kind, sets=("kubernetes.python=/bin/false",))
    begun = time.monotonic()
    run.ended("Failed")
    assert time.monotonic() - begun < 60
    pods = cluster.pods(f"{RUN_LABEL}={run.name}")
    assert len(pods) <= run.nodes, "none was made again"


def _lost_nothing(run: K8sRun, first: dict[str, Any], before: dict[str, str]) -> None:
    """Check that one pod is new since the epoch `first` and nothing else has come of it."""
    after = run.pods()
    assert len(after) == 2
    assert len(set(before.values()) & set(after.values())) == 1, "the other was left alone"
    assert not run.conditions() & {"Failed", *DONE}
    committed = [e["step"] for e in run.events("step.committed") if e["epoch"] == first["epoch"]]
    steps = [e["step"] for e in run.events("step.completed") if e["epoch"] > first["epoch"]]
    assert min(steps) > max(committed), f"no committed step is done again\n{run.story()}"
    run.check_ledger()


def _next_epoch(run: K8sRun, epoch: dict[str, Any]) -> dict[str, Any]:
    """Return the epoch after `epoch`, once it is formed."""
    found: dict[str, Any] = run.until(
        "another epoch",
        lambda: next(
            (e for e in run.events("epoch.formed") if e["epoch"] > epoch["epoch"]),
            None,
        ),
    )
    return found


@pytest.mark.parametrize(
    ("kind", "board"),
    [
        ("jobset", "kubernetes"),
        pytest.param("pytorchjob", "file", marks=pytest.mark.slow),
    ],
)
def test_a_drained_pod_saves_and_goes_and_costs_the_others_nothing(
    cluster: Cluster, kind: str, board: str
) -> None:
    run = K8sRun(cluster, kind, board=board, every=1_000_000)
    first = run.until_steps(2)
    drained = min(run.pods())  # perhaps the coordinator
    at, told = run.step(), time.time()
    run.drain(drained)
    second = _next_epoch(run, first)
    assert drained not in second["members"]
    assert second["reason"] == f"{drained} left"
    run.until_steps(2, after=first["epoch"])  # the new pod may be in the second already
    assert run.redone(second["epoch"]) == 0
    assert run.board().commits[-1].step >= at, "preStop asked for a checkpoint and waited for it"
    lost = [e for e in run.events("member.lost") if told < e["t_unix"] <= second["t_unix"]]
    assert lost == [], run.story()
    assert not run.conditions() & {"Failed", *DONE}
    run.check_ledger()
    if board == "kubernetes":
        assert (run.path / "board" / "elsewhere").read_text().startswith("kubernetes://")
        assert list((run.path / "board").glob("v*")) == []


def test_a_node_that_goes_dark_costs_seconds_and_nobody_else(cluster: Cluster) -> None:
    run = K8sRun(cluster, "jobset")
    first = run.until_steps(2)
    before = run.pods()
    lost, kept = max(before), min(before)
    node = run.node_of(lost)
    if node == run.node_of(kept):
        pytest.skip("the scheduler has put both pods on one node")
    begun = time.time()
    cluster.power_off(node)
    second = _next_epoch(run, first)
    assert second["members"] == [kept]
    assert second["t_unix"] - begun < 60, "not the minutes until Kubernetes gives the node up"
    run.until("steps without it", lambda: _stepped(run, second))
    cluster.wait_ready(node, ready=False, timeout_s=60)
    assert run.pods()[kept] == before[kept]
    run.check_ledger()


def _stepped(run: K8sRun, epoch: dict[str, Any]) -> bool:
    return any(e["epoch"] >= epoch["epoch"] for e in run.events("step.completed"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_takes_part_on_a_machine_that_was_excluded(cluster: Cluster, kind: str) -> None:
    run = K8sRun(cluster, kind)
    epoch = run.until_steps(2)
    before = run.pods()
    bad = next(name for name in before if name != epoch["coordinator"])
    machine, others = run.node_of(bad), run.node_of(epoch["coordinator"])
    if machine == others:
        pytest.skip("the scheduler has put both pods on one node")
    for _ in range(2):
        epoch = run.until_steps(2, after=epoch["epoch"] - 1)
        _kill_worker(run, bad, epoch)
        epoch = _next_epoch(run, epoch)
    [evicted] = run.events("member.evicted")
    assert (evicted["member"], evicted["host"]) == (bad, machine)

    fresh = run.until("another pod", lambda: _scheduled(run, before))
    if run.node_of(fresh) == machine:  # the scheduler knows of nothing
        refused = run.until("a refusal", lambda: run.events("member.refused"))[-1]
        assert (refused["member"], refused["host"]) == (fresh, machine)
        assert machine in refused["reason"]
        cluster.core.patch_node(machine, {"spec": {"unschedulable": True}})  # kubectl cordon
        run.drain(fresh)
    last = run.until_steps(2, after=epoch["epoch"])
    hosts = {event["node"]: event["host"] for event in run.events("agent.started")}
    assert machine not in {hosts[member] for member in last["members"]}
    assert before[epoch["coordinator"]] in run.pods().values(), "the other was left alone"
    assert len(run.events("member.evicted")) == 1
    run.check_ledger()


def _kill_worker(run: K8sRun, pod: str, epoch: dict[str, Any]) -> None:
    """Kill the worker that a pod runs in an epoch, as the kernel does where memory is short."""
    started = [e for e in run.events("workers.started") if e["node"] == pod]
    [[pid]] = [e["pids"] for e in started if e["epoch"] == epoch["epoch"]]
    assert run.cluster.run(pod, "sh", "-c", f"kill -9 {pid}").code == 0


def _scheduled(run: K8sRun, before: dict[str, str]) -> str | None:
    """Return a pod that is newer than `before` and has a node."""
    fresh = [name for name, uid in run.pods().items() if uid not in before.values()]
    return next((name for name in fresh if run.cluster.pod(name).spec.node_name), None)
