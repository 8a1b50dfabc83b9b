"""Whatever one object of the API says, what the others come to stays as it was."""

from __future__ import annotations

import json
import time

import hostile_items as hostile
import pytest
from backend_bench import PODS, backend, pod, run, running, submit
from fake_api import CREATED, Reply, server, waits
from kubernetes_jobs import bundle_of

from launcher.platforms.kubernetes.admission import KubernetesCluster, problems, request_of
from launcher.platforms.kubernetes.api import watch_until
from launcher.platforms.kubernetes.documents import POD, read_bundle
from launcher.platforms.kubernetes.fields import read_object, well_typed
from launcher.platforms.kubernetes.files import Fetched
from launcher.platforms.kubernetes.status_text import (
    ApiView,
    as_machines,
    description_of,
    events_of,
    status_of,
)

__all__ = ["backend", "run", "server", "waits"]  # fixtures
NOW = 1_767_229_200.0
STATE = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "x"},
    "running": {"startedAt": CREATED},
    "terminated": {"exitCode": 1, "reason": "Error", "message": "x", "finishedAt": CREATED},
}
HEAD = {
    "name": "tiny-1-worker-9", "namespace": "train", "uid": "u", "resourceVersion": "1",
    "creationTimestamp": CREATED, "labels": {"holdfast.dev/run": "tiny-1"},
    "annotations": {"a": "b"}, "finalizers": ["batch.kubernetes.io/job-tracking"],
    "ownerReferences": [{"uid": "job"}],
}  # fmt: skip
CONDITION = {
    "type": "Ready", "status": "False", "reason": "x", "message": "y", "lastTransitionTime": CREATED
}  # fmt: skip
CONTAINER = {"name": "pytorch", "restartCount": 2, "state": STATE, "lastState": {}}
BAD_POD = {
    "metadata": {**HEAD, "deletionTimestamp": CREATED},
    "spec": {"nodeName": "n9", "containers": [{"name": "pytorch"}], "readinessGates": []},
    "status": {
        "phase": "Running", "reason": "x", "message": "y", "startTime": CREATED,
        "conditions": [CONDITION], "containerStatuses": [CONTAINER],
        "initContainerStatuses": [{"name": "init", "lastState": STATE}],
    },
}  # fmt: skip
EVENT = {
    "metadata": HEAD, "involvedObject": {"kind": "Pod", "name": "tiny-1-worker-9", "uid": "u"},
    "reason": "FailedMount", "message": "x", "count": 3, "lastTimestamp": CREATED,
    "eventTime": CREATED,
}  # fmt: skip
JOB = {
    "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob",
    "metadata": {**HEAD, "name": "tiny-1", "uid": "job"},
    "spec": {"suspend": False, "runPolicy": {"suspend": False}},
    "status": {"startTime": CREATED, "conditions": [{**CONDITION, "type": "Running"}]},
}  # fmt: skip
TAINT = {"key": "a", "value": "b", "effect": "NoSchedule"}
AMOUNTS = {"cpu": "8", "memory": "64Gi", "pods": 110, "nvidia.com/gpu": "8"}
BAD_NODE = {
    "metadata": {**HEAD, "name": "n9"},
    "spec": {"taints": [TAINT], "unschedulable": False},
    "status": {"conditions": [CONDITION], "capacity": AMOUNTS, "allocatable": AMOUNTS},
}
ROW = {"scopeName": "NotTerminating", "operator": "Exists", "values": ["high"]}
QUOTA = {
    "metadata": {**HEAD, "name": "q"},
    "spec": {"hard": AMOUNTS, "scopes": [], "scopeSelector": {"matchExpressions": [ROW]}},
    "status": {"used": AMOUNTS, "hard": AMOUNTS},
}
CLAIM = {
    "metadata": {**HEAD, "name": "runs"},
    "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "x", "volumeName": "v"},
    "status": {"phase": "Pending"},
}
GOOD_NAMES = ("tiny-1-worker-0", "tiny-1-worker-1")
GOOD_PODS = [
    {**pod(index), "metadata": {**HEAD, "name": name}} for index, name in enumerate(GOOD_NAMES)
]


LIKE_OTHERS = ("negative", "infinite", "year", "nul", "long")


def spoilt(good):
    """Yield (kind, list of the object as it is read) of a good object that is spoilt."""
    for kind, text in hostile.spoilt_inside({"items": [good]}):
        if kind.startswith("('items', 0, ") and not kind.endswith(LIKE_OTHERS):
            page = read_object(text)
            yield kind, [] if page is None else well_typed(page)["items"]


def told(view):
    """Return what is said of a job, as its commands print it, without the pod 9."""
    status = status_of(view, now_unix=NOW)
    said = json.dumps([description_of(view), status.reason, status.words], ensure_ascii=False)
    said.encode()
    time.localtime(status.submitted or 0), time.localtime(status.started or 0)
    events = [each for each in events_of(view) if "tiny-1-worker-0" in each.text]
    return status.state, [name for name in status.nodes if name in GOOD_NAMES], events


PENDING = {**JOB, "metadata": {**JOB["metadata"], "deletionTimestamp": CREATED}, "status": {}}
ABOUT_0 = {**EVENT, "involvedObject": {"kind": "Pod", "name": "tiny-1-worker-0"}}


@pytest.mark.parametrize("what", ["pods", "events", "workloads", "job"])
def test_one_odd_object_changes_nothing_about_the_others(what):
    known = {"pods": GOOD_PODS, "events": [ABOUT_0], "workloads": []}
    good = {"pods": BAD_POD, "events": EVENT, "workloads": JOB, "job": JOB}[what]
    usual = told(ApiView(job=JOB, num_pods=3, **known))
    for kind, items in spoilt(good):
        if what == "job":
            told(ApiView(job=next(iter(items), None), num_pods=3, **known))
            continue
        with_it = {**known, what: [*known[what], *items]}
        assert told(ApiView(job=JOB, num_pods=3, **with_it)) == usual, kind
        told(ApiView(job=PENDING, num_pods=3, **{**with_it, "pods": with_it["pods"][2:]}))


def test_one_odd_node_changes_no_other_machine():
    nodes = [{**BAD_NODE, "metadata": {**HEAD, "name": f"n{index}"}} for index in range(4)]
    usual = as_machines(nodes)
    for kind, items in spoilt(BAD_NODE):
        assert [one for one in as_machines([*nodes, *items]) if one in usual] == usual, kind


def test_one_odd_object_hides_no_problem_of_an_admission():
    files = bundle_of({"kubernetes.namespace": "train"}, "pytorchjob")
    request = request_of(read_bundle(files), files["job.json"], "train")
    none_left = {**QUOTA, "metadata": {**HEAD, "name": "none"}, "spec": {"hard": {"pods": "0"}}}
    one_node = {**CLAIM, "metadata": {"name": "one"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    full = {**AMOUNTS, "nvidia.com/gpu": "0"}
    node = {**BAD_NODE, "status": {"allocatable": full}}
    usual = problems(
        request, KubernetesCluster(quotas=[none_left], claims=[one_node], nodes=[node])
    )
    assert {each.code for each in usual} == {"HF756", "HF185", "HF182"}
    for name, of, kept, good in (
        ("quotas", "HF756", [none_left], QUOTA),
        ("claims", "HF185", [one_node], CLAIM),
        ("nodes", "HF182", [node], node),
    ):
        for kind, items in spoilt(good):
            found = problems(request, KubernetesCluster(**{name: [*items, *kept]}))
            assert of in [each.code for each in found], (name, kind)


def test_a_list_with_odd_objects_gives_the_others(backend, server, run):
    job = submit(backend, run)
    running(server)
    for number, value in enumerate(hostile.VALUES.values()):
        if (read := read_object(f'{{"a": {value}}}')) is not None:
            odd = {"metadata": {"name": read["a"]}, "status": read["a"]}
            server.objects[f"{PODS}/odd-{number}"] = odd
    found, _ = backend.register_server(job).list_all(POD, "train")
    assert {one["metadata"]["name"] for one in found} == {*GOOD_NAMES, "x", "\0", "?"}


def test_a_watch_goes_on_after_odd_objects(backend, server, run, waits):
    api = backend.register_server(submit(backend, run))
    lines = []
    for value in hostile.VALUES.values():
        if (read := read_object(f'{{"a": {value}}}')) is not None:
            odd = ({"metadata": read["a"]}, {"metadata": {"name": read["a"]}})
            lines += [json.dumps({"type": "ADDED", "object": each}) for each in odd]
    good = {"type": "ADDED", "object": {"metadata": {"name": "b", "resourceVersion": "9"}}}
    server.lines.append([*lines, json.dumps(good)])
    assert watch_until(api, POD, "train", lambda pods: "b" in pods, for_s=30, sleep=waits.append)
    assert waits == []


def test_one_pod_that_cannot_be_deleted_keeps_no_other(backend, server, run):
    job = submit(backend, run)
    running(server, 40)
    server.says(f"DELETE {PODS}/tiny-1-worker-0", *[Reply(500, "no")] * 9)
    with pytest.raises(Exception, match="busy or away"):
        backend.cancel(job)
    assert [path for path in server.objects if path.startswith(PODS)] == [f"{PODS}/tiny-1-worker-0"]


def test_a_node_that_goes_meanwhile_keeps_no_other_from_its_drain(
    backend, server, run, monkeypatch
):
    monkeypatch.setattr("launcher.platforms.kubernetes.backend._AT_ONCE", 1)
    server.put("/api/v1/nodes/n1", {"metadata": {"name": "n1"}})
    server.put("/api/v1/pods/a", {**pod(1), "metadata": {"name": "a", "namespace": "train"}})
    server.put(f"{PODS}/a", {"metadata": {"name": "a"}})
    backend.drain_machines(["n0", "n1"], "x")
    assert server.asked("PATCH /api/v1/nodes/n1")
    assert f"{PODS}/a" not in server.objects


def test_one_odd_file_of_a_pods_output_hides_no_other(tmp_path):
    fetched = Fetched.load(tmp_path)
    folder = tmp_path / "logs" / "pods"
    folder.mkdir(parents=True)
    for number, make in enumerate(hostile.KINDS.values()):
        make(folder / f"{number}.log")
        fetched.add_log(str(number), "text\n", t_unix=NOW)
