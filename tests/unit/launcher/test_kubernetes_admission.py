"""What a cluster would never run is found before a job is made; what it may run is not refused."""

from __future__ import annotations

import pytest
from backend_bench import PODS, backend, bundle, run
from fake_api import Reply, server, status_object, waits
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_jobs import bundle_of, kind

from launcher.platforms.kubernetes.admission import (
    CLAIM,
    STORAGE_CLASS,
    KubernetesCluster,
    Named,
    class_of,
    named,
    problems,
    quantity,
    request_of,
    sample_pod,
)
from launcher.platforms.kubernetes.api import connect
from launcher.platforms.kubernetes.backend import KubernetesBackend
from launcher.platforms.kubernetes.documents import read_bundle
from launcher.runs.submitting.asking import ask
from launcher.spec.errors import UserError

__all__ = ["backend", "kind", "run", "server", "waits"]  # fixtures
CORE = "/api/v1/namespaces/train"
CLAIMS, QUOTAS, SECRETS = (
    f"{CORE}/{plural}" for plural in ("persistentvolumeclaims", "resourcequotas", "secrets")
)
NODES = "/api/v1/nodes"
REVIEW = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
DRY_POD = f"POST {PODS}?fieldValidation=Strict&dryRun=All"


def asked(values=None, kind="pytorchjob"):
    """Return the request of a job of 4 nodes and a spare, one GPU each, of which one suffices."""
    files = bundle_of({"kubernetes.namespace": "train", **(values or {})}, kind)
    return request_of(read_bundle(files), files["job.json"], "train")


def codes(found):
    return [problem.code for problem in found]


def judged(values=None, **said):
    return codes(problems(asked(values), KubernetesCluster(**said)))


def quota(hard, used=None, **spec):
    return {
        "metadata": {"name": "few"},
        "spec": {"hard": hard, **spec},
        "status": {"used": used or {}},
    }


def node(*, taints=(), **allocatable):
    there = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": "1"} | allocatable
    return {"spec": {"taints": list(taints)}, "status": {"allocatable": there}}


def test_of_a_silent_cluster_nothing_is_judged(kind):
    assert problems(asked(kind=kind), KubernetesCluster()) == []


def test_what_pods_name_is_asked_for(kind):
    values = {
        "env.secrets": {"HF_TOKEN": {"kubernetes": "hub/token"}},
        "kubernetes.image_pull_secrets": ["registry"],
        "kubernetes.volumes": {"data": {"claim": "corpus", "mount": "/data"}},
        "kubernetes.queue": "research",
    }
    found = named(asked(values, kind).bundle)
    assert {(one.versions[0].plural, one.name, one.key, one.needed) for one in found} == {
        ("secrets", "hub", "env.secrets", True),
        ("secrets", "registry", "kubernetes.image_pull_secrets", False),
        ("persistentvolumeclaims", "runs", "kubernetes.claim", True),
        ("persistentvolumeclaims", "corpus", "kubernetes.volumes", True),
        ("localqueues", "research", "kubernetes.queue", True),
    }


def test_what_the_run_makes_itself_is_not_asked_for(kind):
    found = named(asked({"kubernetes.board": "kubernetes"}, kind).bundle)
    assert [one.name for one in found] == ["runs"]
    assert "serviceAccountName" not in sample_pod(asked({"kubernetes.board": "kubernetes"}))["spec"]


def test_what_is_missing_is_named():
    missing = [
        Named((CLAIM,), "runs", "kubernetes.claim"),
        Named((STORAGE_CLASS,), "fast", "kubernetes.claim"),
        Named((CLAIM,), "registry", "kubernetes.image_pull_secrets", needed=False),
    ]
    found = problems(asked(), KubernetesCluster(missing=missing))
    assert codes(found) == ["HF760", "HF760", "HF184"]
    assert "persistentvolumeclaims/runs" in found[0].message
    assert "namespace train" in found[0].message
    assert "storageclasses.storage.k8s.io/fast" in found[1].message
    assert "namespace" not in found[1].message


@pytest.mark.parametrize(
    ("hard", "used", "values", "code"),
    [
        ({"requests.nvidia.com/gpu": "5"}, {}, {}, None),
        ({"requests.nvidia.com/gpu": "4"}, {}, {}, "HF181"),
        ({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "4"}, {}, "HF181"),
        ({"requests.nvidia.com/gpu": "0"}, {}, {}, "HF756"),
        ({"requests.nvidia.com/gpu": "3"}, {}, {"elastic.min_nodes": 4}, "HF756"),
        ({"pods": "4"}, {}, {}, "HF181"),
        ({"count/pods": "5"}, {}, {}, None),
        ({"cpu": "39"}, {}, {"kubernetes.cpus": 8}, "HF181"),
        ({"requests.cpu": "7"}, {}, {"kubernetes.cpus": 8}, "HF756"),
        ({"limits.cpu": "40"}, {}, {"kubernetes.cpus": 8}, None),
        ({"requests.memory": "1Ti"}, {}, {"kubernetes.memory": "400Gi"}, "HF181"),
        ({"limits.memory": "399Gi"}, {}, {"kubernetes.memory": "400Gi"}, "HF756"),
        ({"requests.cpu": "1"}, {}, {}, None),
        ({"count/jobs.batch": "0", "services": "0"}, {}, {}, None),
    ],
)
def test_a_quota_is_compared_with_the_whole_job(hard, used, values, code):
    assert judged(values, quotas=[quota(hard, used)]) == ([code] if code else [])


def test_a_quotas_message_has_the_values():
    hard = {"requests.nvidia.com/gpu": "3"}
    [found] = problems(asked({"elastic.min_nodes": 4}), KubernetesCluster(quotas=[quota(hard)]))
    values = ("few", "train", "requests.nvidia.com/gpu=3", "0 used", "5 pods")
    assert [value for value in values if value not in found.message] == []


@pytest.mark.parametrize(
    ("spec", "priority", "counts"),
    [
        ({"scopes": ["NotTerminating"]}, None, True),
        ({"scopes": ["Terminating"]}, None, False),
        ({"scopes": ["BestEffort"]}, None, False),
        ({"scopes": ["of a later version"]}, None, False),
        ({"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}, "high", True),
        ({"scopeSelector": {"matchExpressions": [
            {"scopeName": "PriorityClass", "operator": "In", "values": ["high"]}]}}, None, False),
    ],
)  # fmt: skip
def test_only_quotas_that_are_about_such_pods_count(spec, priority, counts):
    values = {} if priority is None else {"kubernetes.priority_class": priority}
    found = judged(values, quotas=[quota({"pods": "0"}, **spec)])
    assert found == (["HF756"] if counts else [])


@given(hard=st.integers(0, 20), used=st.integers(0, 20), least=st.integers(1, 4))
def test_a_quota_refuses_only_what_never_starts(hard, used, least):
    said = [quota({"pods": str(hard)}, {"pods": str(used)})]
    found = judged({"elastic.min_nodes": least}, quotas=said)
    assert ("HF756" in found) == (hard < least)
    assert (found == []) == (hard - used >= 5)


@pytest.mark.parametrize(
    ("nodes", "values", "code"),
    [
        (None, {}, None),
        ([node()] * 5, {}, None),
        ([node()] * 4, {}, "HF182"),
        ([node(**{"nvidia.com/gpu": "8"})], {}, None),
        ([node(**{"nvidia.com/gpu": "0"})] * 9, {}, "HF182"),
        ([], {}, "HF182"),
        ([node(cpu="4")] * 5, {"kubernetes.cpus": 8}, "HF182"),
        ([node(taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}])] * 5, {}, None),
        ([node(taints=[{"key": "team", "value": "b", "effect": "NoSchedule"}])] * 5, {}, "HF182"),
        ([node(taints=[{"key": "team", "effect": "PreferNoSchedule"}])] * 5, {}, None),
        (
            [node(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}])] * 5,
            {},
            None,
        ),
    ],
)
def test_nodes_are_only_warned_of_for_some_may_be_added(nodes, values, code):
    assert judged(values, nodes=nodes) == ([code] if code else [])


@pytest.mark.parametrize(
    ("said", "code", "key"),
    [
        ("", None, ""),
        (
            'pods "a" is forbidden: no PriorityClass with name high was found',
            "HF757",
            "kubernetes.priority_class",
        ),
        (
            'pods "a" is forbidden: pod rejected: RuntimeClass "no" not found',
            "HF757",
            "kubernetes.pod_patch",
        ),
        (
            'pods "a" is forbidden: error looking up service account: serviceaccount "x" not found',
            "HF757",
            "kubernetes.service_account",
        ),
        (
            'pods "a" is forbidden: maximum cpu usage per Container is 2, but limit is 8',
            "HF757",
            "kubernetes.memory",
        ),
        (
            'pods "a" is forbidden: failed quota: q: must specify limits.cpu for: pytorch',
            "HF757",
            "kubernetes.cpus",
        ),
        (
            'pods "a" is forbidden: no service account: serviceaccount "default" not found',
            None,
            "",
        ),
        ('pods "a" is forbidden: exceeded quota: q, requested: pods=1', None, ""),
        ('admission webhook "w" denied the request: pods need an owner', "HF183", "kubernetes"),
        ("you may not create pods in namespace train", None, ""),
    ],
)
def test_what_the_server_says_to_a_pod(said, code, key):
    found = problems(asked(), KubernetesCluster(pod_refused=said))
    assert [(each.code, each.where.key) for each in found] == ([(code, key)] if code else [])


@pytest.mark.parametrize(
    ("modes", "nodes", "code"),
    [
        (["ReadWriteMany"], 4, None),
        (["ReadWriteOnce"], 4, "HF185"),
        (["ReadWriteOnce", "ReadWriteMany"], 4, None),
        ([], 4, None),
        (["ReadWriteOnce"], 1, None),
    ],
)
def test_a_claim_of_one_node_for_several_pods(modes, nodes, code):
    claim = {"metadata": {"name": "runs"}, "spec": {"accessModes": modes}}
    values = {"cluster.nodes": nodes, "cluster.spares": 0}
    assert judged(values, claims=[claim]) == ([code] if code else [])


def test_the_class_that_a_claim_waits_for():
    claim = {"spec": {"storageClassName": "fast"}, "status": {"phase": "Pending"}}
    assert class_of(claim) == "fast"
    assert class_of({**claim, "status": {"phase": "Bound"}}) == ""
    assert class_of({"spec": {}, "status": {"phase": "Pending"}}) == ""
    named = {"storageClassName": "manual", "volumeName": "disk-1"}
    assert class_of({"spec": named, "status": {"phase": "Pending"}}) == "", "it has its volume"


@pytest.mark.parametrize(
    ("text", "number"), [("250m", 0.25), ("1Ki", 1024), ("2", 2), ("1e3", 1000), ("many", 0)]
)
def test_quantities(text, number):
    assert quantity(text) == number


# -- asked over HTTP ------------------------------------------------------------------------


def has(server, path, **thing):
    server.put(path, {"metadata": {"name": path.rpartition("/")[2]}, **thing})


@pytest.fixture
def ready(server):
    """A cluster that has what the job names."""
    has(server, f"{CLAIMS}/runs", spec={"accessModes": ["ReadWriteMany"]})
    for index in range(2):
        has(server, f"{NODES}/n{index}", **node(**{"nvidia.com/gpu": "8"}))
    return server


def test_a_cluster_that_has_all_finds_nothing_and_makes_nothing(backend, ready, run):
    before = dict(ready.objects)
    assert backend.find_problems(bundle(run)) == []
    assert ready.objects == before
    assert sorted(ready.asked("POST")) == sorted([DRY_POD, f"{REVIEW}?fieldValidation=Strict"])
    [review] = [body for call, body in ready.bodies if call.startswith(REVIEW)]
    about = review["spec"]["resourceAttributes"]
    assert (about["verb"], about["resource"]) == ("patch", "configmaps")
    assert about["name"] == "tiny-1-job", "a Role may allow this one only"


def test_each_fact_is_asked_for(backend, ready, run):
    del ready.objects[f"{CLAIMS}/runs"]
    del ready.objects[f"{NODES}/n1"]
    has(ready, f"{QUOTAS}/few", spec={"hard": {"pods": "0"}}, status={"used": {"pods": "0"}})
    message = 'pods "tiny-1" is forbidden: no PriorityClass with name high was found'
    ready.says(DRY_POD, Reply(403, status_object(403, "Forbidden", message)))
    ready.says(REVIEW, Reply(201, {"status": {"allowed": False}}))
    found = codes(backend.find_problems(bundle(run)))
    assert found == ["HF753", "HF760", "HF757", "HF756", "HF182"]


def test_a_class_without_an_object_and_a_right_that_was_not_found_out_are_no_errors(
    backend, ready, run
):
    """Volumes of the class may be there; a webhook that authorizes may be away."""
    ready.objects[f"{CLAIMS}/runs"] |= {
        "spec": {"storageClassName": "manual", "accessModes": ["ReadWriteMany"]},
        "status": {"phase": "Pending"},
    }
    status = {"allowed": False, "evaluationError": "no answer"}
    ready.says(REVIEW, Reply(201, {"status": status}))
    assert codes(backend.find_problems(bundle(run))) == ["HF184"]


def test_of_a_namespace_that_is_not_there_only_that_is_said(backend, server, run):
    message = 'namespaces "train" not found'
    answer = status_object(404, "NotFound", message, name="train", kind="namespaces")
    server.says(DRY_POD, Reply(404, answer))
    found = backend.find_problems(bundle(run))
    assert [(one.code, one.where.key) for one in found] == [("HF755", "kubernetes.namespace")]


def test_all_of_it_is_said_at_once_before_anything_is_made(backend, ready, run):
    del ready.objects[f"{CLAIMS}/runs"]
    del ready.objects[f"{NODES}/n1"]
    with pytest.raises(UserError) as caught:
        ask(backend, bundle(run), spec=None)
    assert codes(caught.value.problems) == ["HF760"]
    assert codes(caught.value.warnings) == ["HF182"]


@pytest.mark.parametrize("status", [401, 403, 404, 500, 503])
def test_who_may_not_ask_or_gets_no_answer_is_not_refused(backend, server, run, status):
    refused = Reply(status, status_object(status, "x", "no"))
    server.replies.append((lambda _: True, [refused] * 50))
    if status == 404:  # of a claim that is an answer
        has(server, f"{CLAIMS}/runs", spec={})
        server.replies[:] = [(lambda call: CLAIMS not in call, [refused] * 50)]
    assert backend.find_problems(bundle(run)) == []


def test_a_cluster_that_is_away_or_not_known_is_left_to_submit(run, waits, tmp_path):
    def connected(context):
        return connect(context, env={"KUBECONFIG": str(tmp_path / "none")}, sleep=waits.append)

    assert KubernetesBackend(connected).find_problems(bundle(run)) == []


def test_of_a_secret_only_its_metadata_is_asked_for(backend, ready, run):
    files = bundle(run)
    text = files["manifests.yaml"].replace(
        '{"name": "A", "value": "b"}',
        '{"name": "A", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "k"}}}',
    )
    assert text != files["manifests.yaml"]
    files["manifests.yaml"] = text
    assert codes(backend.find_problems(files)) == ["HF760"]
    has(ready, f"{SECRETS}/hub")
    assert backend.find_problems(files) == []
    asked = [accept for call, accept in ready.accepted if f"GET {SECRETS}" in call]
    assert asked
    assert all("as=PartialObjectMetadata" in accept for accept in asked)


def test_what_a_pod_takes_and_how_many_suffice(kind):
    one = asked({"kubernetes.cpus": 8, "kubernetes.memory": "10Gi"}, kind)
    assert {name: int(n) for name, n in one.resources.items()} == {
        "pods": 1,
        "cpu": 8,
        "memory": 10 * 2**30,
        "nvidia.com/gpu": 1,
    }
    assert (one.least, one.bundle.num_pods) == (1, 5)
