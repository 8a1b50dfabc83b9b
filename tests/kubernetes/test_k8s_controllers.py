"""What the tests of Kubernetes rely on: operators that make, remake and end pods, traps and all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from k8s_cluster import Cluster
from k8s_manifests import jobset, pytorchjob, runtime, trainjob

_STAY = "echo up; while :; do sleep .1; done"
_SELECTORS = {
    "pytorchjobs": "training.kubeflow.org/job-name=j",
    "jobsets": "jobset.sigs.k8s.io/jobset-name=j",
    "trainjobs": "jobset.sigs.k8s.io/jobset-name=j",
}


def _create(cluster: Cluster, kind: str, script: str) -> Callable[[], dict[str, str]]:
    """Create a job `j` of two pods; return what gives the uids of its pods by worker."""
    cluster.need(kind.removesuffix("s"))
    if kind == "pytorchjobs":
        cluster.create(pytorchjob(cluster, "j", script))
    elif kind == "jobsets":
        cluster.create(jobset(cluster, "j", script))
    else:
        cluster.create(runtime(cluster, "r", script))
        cluster.create(trainjob("j", "r"))

    def uids() -> dict[str, str]:
        found = {}
        for pod in cluster.pods(_SELECTORS[kind]):
            if pod.status.phase == "Running" and pod.metadata.deletion_timestamp is None:
                labels = pod.metadata.labels
                index = labels.get("training.kubeflow.org/replica-index") or labels.get(
                    "batch.kubernetes.io/job-completion-index"
                )
                found[index] = pod.metadata.uid
        return found

    return uids


def _name_of(cluster: Cluster, uid: str) -> str:
    return next(p.metadata.name for p in cluster.pods() if p.metadata.uid == uid)


@pytest.mark.parametrize("kind", ["pytorchjobs", "jobsets", "trainjobs"])
def test_one_lost_pod_recreates_only_itself(cluster: Cluster, kind: str) -> None:
    uids = _create(cluster, kind, _STAY)
    before = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    cluster.kill_pod(_name_of(cluster, before["1"]))
    after = cluster.wait(
        "a new pod",
        lambda: u if len(u := uids()) == 2 and u["1"] != before["1"] else None,
    )
    assert after["0"] == before["0"]
    ended = {"Failed", "Succeeded", "Completed", "Complete"}
    assert not cluster.condition(kind, "j") & ended


@pytest.mark.parametrize("kind", ["pytorchjobs", "jobsets", "trainjobs"])
def test_a_final_exit_code_fails_the_job(cluster: Cluster, kind: str) -> None:
    script = 'case "$HOSTNAME" in *-1) sleep 1; exit 93;; esac; ' + _STAY
    _create(cluster, kind, script)
    cluster.wait_condition(kind, "j", "Failed")
    cluster.wait("no pod runs", lambda: _running(cluster, kind) == [])


@pytest.mark.parametrize("kind", ["pytorchjobs", "jobsets", "trainjobs"])
def test_a_code_from_128_on_is_tried_again(cluster: Cluster, kind: str) -> None:
    script = 'case "$HOSTNAME" in *-1) sleep .5; exit 143;; esac; ' + _STAY
    uids = _create(cluster, kind, script)
    first = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    cluster.wait("another pod 1", lambda: uids().get("1", first["1"]) != first["1"])
    assert uids()["0"] == first["0"]
    assert "Failed" not in cluster.condition(kind, "j")


def _running(cluster: Cluster, kind: str) -> list[str]:
    pods = cluster.pods(_SELECTORS[kind])
    return [p.metadata.name for p in pods if p.status.phase == "Running"]


@pytest.mark.parametrize("kind", ["jobsets", "trainjobs"])
def test_all_successes_complete_a_set(cluster: Cluster, kind: str) -> None:
    _create(cluster, kind, 'echo "$JOB_COMPLETION_INDEX"')
    cluster.wait_condition(kind, "j", "Completed", "Complete")
    said = sorted(cluster.log(pod.metadata.name).strip() for pod in cluster.pods())
    assert said == ["0", "1"]


def test_any_worker_ends_an_elastic_pytorchjob(cluster: Cluster) -> None:
    script = 'case "$HOSTNAME" in *-1) exit 0;; esac; ' + _STAY
    _create(cluster, "pytorchjobs", script)
    cluster.wait_condition("pytorchjobs", "j", "Succeeded")
    cluster.wait("no pod runs", lambda: _running(cluster, "pytorchjobs") == [])


def test_what_the_pytorchjob_operator_sets(cluster: Cluster) -> None:
    _create(cluster, "pytorchjobs", "env; " + _STAY)
    text = cluster.wait_log("j-worker-1", "up")
    lines = set(text.splitlines())
    assert {
        "PYTHONUNBUFFERED=1",
        "PET_NPROC_PER_NODE=2",
        "PET_NNODES=1:2",
        "PET_RDZV_BACKEND=c10d",
        "PET_RDZV_ENDPOINT=j-worker-0:23456",
    } <= lines
    assert "MASTER_ADDR" not in text
    cluster.wait_condition("pytorchjobs", "j", "Running")

    def active() -> int:
        rows = cluster.read("pytorchjobs", "j")["status"]["replicaStatuses"]
        return int(rows["Worker"].get("active", 0))

    cluster.wait("two active pods", lambda: active() == 2)


def test_backoff_is_the_sum_of_restarts(cluster: Cluster) -> None:
    cluster.need("pytorchjob")
    job = pytorchjob(cluster, "j", "sleep .3; exit 1", policy="OnFailure")
    job["spec"]["runPolicy"]["backoffLimit"] = 2
    cluster.create(job)
    cluster.wait_condition("pytorchjobs", "j", "Failed")
    rows = cluster.read("pytorchjobs", "j")["status"]["conditions"]
    assert "backoff limit" in next(row["message"] for row in rows if row["type"] == "Failed")


@pytest.mark.parametrize("kind", ["pytorchjobs", "jobsets", "trainjobs"])
def test_suspension_ends_the_pods_and_resuming_makes_new_ones(cluster: Cluster, kind: str) -> None:
    # A worker that says 0 when it is stopped would count as done.
    uids = _create(cluster, kind, "trap 'exit 143' TERM; " + _STAY)
    before = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    for value in (True, False):
        inner = {"suspend": value}
        spec = {"runPolicy": inner} if kind == "pytorchjobs" else inner
        cluster.patch(kind, "j", {"spec": spec})
        if value:
            cluster.wait("no pods", lambda: _running(cluster, kind) == [])
            cluster.wait_condition(kind, "j", "Suspended")
    after = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    assert set(after.values()).isdisjoint(before.values())


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset"])
def test_a_queue_lets_go_who_waits(cluster: Cluster, kind: str) -> None:
    cluster.need(kind)
    cluster.need("queue")
    queue = {"clusterQueue": "q", "stopPolicy": "Hold"}
    cluster.create(
        {
            "apiVersion": "kueue.x-k8s.io/v1beta2",
            "kind": "LocalQueue",
            "metadata": {"name": "q"},
            "spec": queue,
        }
    )
    job = (pytorchjob if kind == "pytorchjob" else jobset)(cluster, "j", _STAY)
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "q"}
    spec = job["spec"]
    (spec["runPolicy"] if kind == "pytorchjob" else spec)["suspend"] = True
    cluster.create(job)
    cluster.wait("a workload", lambda: [w for w in cluster.list("workloads") if w.get("status")])
    assert cluster.pods() == []
    cluster.patch("localqueues", "q", {"spec": {"stopPolicy": "None"}})
    cluster.wait("two pods", lambda: len(_running(cluster, f"{kind}s")) == 2)


def test_a_pod_on_a_dead_node_is_not_replaced_until_somebody_acts(cluster: Cluster) -> None:
    uids = _create(cluster, "pytorchjobs", _STAY)
    before = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    node = cluster.pod("j-worker-1").spec.node_name
    other = cluster.pod("j-worker-0").spec.node_name
    assert node != other
    cluster.power_off(node)
    cluster.wait("eviction", lambda: cluster.pod("j-worker-1").metadata.deletion_timestamp)
    assert cluster.pod("j-worker-1").metadata.uid == before["1"]
    cluster.kill_pod("j-worker-1")
    after = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    assert after["0"] == before["0"]
    assert cluster.pod("j-worker-1").spec.node_name != node


def test_an_indexed_job_waits_for_a_dead_node_even_after_force(cluster: Cluster) -> None:
    uids = _create(cluster, "jobsets", _STAY)
    before = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
    name = _name_of(cluster, before["1"])
    node = cluster.pod(name).spec.node_name
    cluster.power_off(node)
    cluster.wait("eviction", lambda: cluster.pod(name).metadata.deletion_timestamp)
    cluster.kill_pod(name)
    # Its finalizer holds it: with a pod failure policy only a pod that has failed is replaced.
    assert cluster.pod(name).metadata.uid == before["1"]
    taint = {"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute", "value": "gone"}
    taints = cluster.core.read_node(node).spec.taints
    rows = [*cluster.api.sanitize_for_serialization(taints), taint]
    cluster.core.patch_node(node, {"spec": {"taints": rows}})
    try:
        after = cluster.wait("two pods", lambda: u if len(u := uids()) == 2 else None)
        assert after["0"] == before["0"]
    finally:
        cluster.core.patch_node(node, {"spec": {"taints": None}})
