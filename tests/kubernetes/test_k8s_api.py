"""What the tests of Kubernetes rely on: an API server's answers, watches, conflicts, refusals."""

from __future__ import annotations

import time

import pytest
from k8s_cluster import Cluster
from k8s_manifests import jobset, pod, pytorchjob, runtime, trainjob
from kubernetes import client, config, watch
from kubernetes.client import ApiException


def _refused(code: int, call: object, *args: object, **kwargs: object) -> str:
    """Return the message of an answer that must have this code."""
    with pytest.raises(ApiException) as caught:
        call(*args, **kwargs)  # type: ignore[operator]
    assert caught.value.status == code, caught.value
    return str(caught.value.body)


def _config_map(name: str, **data: str) -> dict[str, object]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"kind": "t"}},
        "data": data,
    }


def test_two_writers_of_one_version_conflict(cluster: Cluster) -> None:
    core, space = cluster.core, cluster.namespace
    made = core.create_namespaced_config_map(space, _config_map("c", state="1"))
    made.data = {"state": "2"}
    second = core.replace_namespaced_config_map("c", space, made)
    assert second.metadata.resource_version != made.metadata.resource_version
    text = _refused(409, core.replace_namespaced_config_map, "c", space, made)
    assert "the object has been modified" in text
    assert core.read_namespaced_config_map("c", space).data == {"state": "2"}
    again = _refused(409, core.create_namespaced_config_map, space, _config_map("c"))
    assert "AlreadyExists" in again


def test_a_dry_run_stores_nothing(cluster: Cluster) -> None:
    cluster.need("pytorchjob")
    cluster.create(pytorchjob(cluster, "dry", "true"), dryRun="All", fieldValidation="Strict")
    assert cluster.list("pytorchjobs") == []
    cluster.create(_config_map("c"))
    cluster.delete("configmaps", "c", dryRun="All")
    assert cluster.read("configmaps", "c")["metadata"]["name"] == "c"


def test_unknown_fields_are_refused_when_strict_and_dropped_otherwise(cluster: Cluster) -> None:
    manifest = pod(cluster, "p", "true", nodeSelecter={"a": "b"})
    text = _refused(400, cluster.create, manifest, fieldValidation="Strict")
    assert "unknown field" in text
    assert "spec.nodeSelecter" in text
    made = cluster.create(manifest, dryRun="All")
    assert "nodeSelecter" not in made["spec"]


def test_wrong_types_and_values_are_refused(cluster: Cluster) -> None:
    cluster.need("pytorchjob")
    manifest = pod(cluster, "p", "true", terminationGracePeriodSeconds="soon")
    _refused(400, cluster.create, manifest)
    manifest = pod(cluster, "Big_Name", "true")
    assert "RFC 1123" in _refused(422, cluster.create, manifest)
    job = pytorchjob(cluster, "p", "true")
    job["spec"]["elasticPolicy"]["nProcPerNode"] = 2
    assert "denied the request" in _refused(403, cluster.create, job)
    job = pytorchjob(cluster, "p", "true", policy="Sometimes")
    cluster.create(job, dryRun="All")  # a real server takes it too
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["name"] = "x"
    assert "name pytorch" in _refused(403, cluster.create, job)


def test_the_jobs_own_rules(cluster: Cluster) -> None:
    cluster.need("jobset")
    job = jobset(cluster, "j", "true")
    inner = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    inner["podReplacementPolicy"] = "TerminatingOrFailed"
    assert "podReplacementPolicy" in _refused(422, cluster.create, job)
    long = jobset(cluster, "j" * 60, "true")
    assert "too long" in _refused(422, cluster.create, long)


def test_a_trainjob_needs_its_runtime(cluster: Cluster) -> None:
    cluster.need("trainjob")
    assert "not found" in _refused(403, cluster.create, trainjob("t", "r"))
    cluster.create(runtime(cluster, "r", "true"))
    cluster.create(trainjob("t", "r"), dryRun="All")


def test_missing_kinds_namespaces_and_rights(cluster: Cluster) -> None:
    core = cluster.core
    text = _refused(404, core.create_namespaced_config_map, "no-such", _config_map("c"))
    assert 'namespaces \\"no-such\\" not found' in text
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list"]}
    limited = config.new_client_from_config(str(cluster.kubeconfig_for(rule)))
    try:
        few = client.CoreV1Api(limited)
        assert few.list_namespaced_pod(cluster.namespace).items == []
        text = _refused(403, few.create_namespaced_config_map, cluster.namespace, _config_map("c"))
        assert 'cannot create resource \\"configmaps\\"' in text
        review = {"spec": {"resourceAttributes": {"verb": "list", "resource": "pods"}}}
        review["spec"]["resourceAttributes"]["namespace"] = cluster.namespace
        asked = client.AuthorizationV1Api(limited).create_self_subject_access_review(review)
        assert asked.status.allowed
    finally:
        limited.close()


def test_a_kind_that_is_not_installed(cluster: Cluster) -> None:
    with cluster.without("pytorchjob"):
        _refused(404, cluster.create, pytorchjob(cluster, "p", "true"))
    cluster.create(pytorchjob(cluster, "p", "true"), dryRun="All")


def test_quota_is_enforced(cluster: Cluster) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"count/configmaps": "1"}}}
    quota["spec"]["hard"]["requests.nvidia.com/gpu"] = "8"
    cluster.core.create_namespaced_resource_quota(cluster.namespace, quota)
    counted = lambda: cluster.read("resourcequotas", "q").get("status", {}).get("hard")  # noqa: E731
    cluster.wait("the quota's status", counted)
    text = _refused(403, cluster.create, _config_map("over"))  # kube-root-ca.crt is there
    assert "exceeded quota: q" in text
    greedy = pod(cluster, "g", "true")
    limits = {"limits": {"nvidia.com/gpu": "9"}}
    greedy["spec"]["containers"][0]["resources"] = limits
    assert "requests.nvidia.com/gpu=9" in _refused(403, cluster.create, greedy)


def test_watches_see_changes_through_selectors(cluster: Cluster) -> None:
    core, space = cluster.core, cluster.namespace
    version = core.list_namespaced_config_map(space).metadata.resource_version
    core.create_namespaced_config_map(space, _config_map("a"))
    core.create_namespaced_config_map(space, {"metadata": {"name": "other"}})
    core.patch_namespaced_config_map("a", space, {"data": {"x": "1"}})
    core.patch_namespaced_config_map("a", space, {"metadata": {"labels": {"kind": "u"}}})
    stream = watch.Watch().stream(
        core.list_namespaced_config_map,
        space,
        label_selector="kind=t",
        resource_version=version,
        timeout_seconds=1,
    )
    seen = [(event["type"], event["object"].metadata.name) for event in stream]
    assert seen == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a")]


def test_a_version_that_is_forgotten_answers_gone(cluster: Cluster) -> None:
    core, space = cluster.core, cluster.namespace
    version = core.list_namespaced_config_map(space).metadata.resource_version
    cluster.forget_changes()
    with pytest.raises(ApiException) as caught:
        for _ in watch.Watch().stream(
            core.list_namespaced_config_map, space, resource_version=version, timeout_seconds=2
        ):
            pass
    assert caught.value.status == 410


def test_errors_come_on_order(cluster: Cluster) -> None:
    core, space = cluster.core, cluster.namespace
    cluster.fault(verb="list", resource="configmaps", status=429, retry_after_s=1)
    began = time.monotonic()
    assert core.list_namespaced_config_map(space).items  # the client itself heeds Retry-After
    assert time.monotonic() - began >= 1
    cluster.fault(verb="list", resource="configmaps", status=429)
    _refused(429, core.list_namespaced_config_map, space)
    assert core.list_namespaced_config_map(space).items
    cluster.fault(verb="create", resource="configmaps", status=503, times=2)
    for _ in range(2):
        _refused(503, core.create_namespaced_config_map, space, _config_map("c"))
    core.create_namespaced_config_map(space, _config_map("c"))


def test_patches_of_all_kinds(cluster: Cluster) -> None:
    core, space = cluster.core, cluster.namespace
    core.create_namespaced_config_map(space, _config_map("c", a="1", b="2"))
    patch = [{"op": "replace", "path": "/data/a", "value": "3"}]
    core.patch_namespaced_config_map("c", space, patch)
    made = core.patch_namespaced_config_map("c", space, {"data": {"b": None}})
    assert made.data == {"a": "3"}
    missing = [{"op": "remove", "path": "/data/zz"}]
    _refused(422, core.patch_namespaced_config_map, "c", space, missing)


def test_what_an_object_owned_goes_with_it(cluster: Cluster) -> None:
    core, space = cluster.core, cluster.namespace
    owner = core.create_namespaced_config_map(space, _config_map("owner"))
    child = _config_map("child")
    child["metadata"]["ownerReferences"] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid}
    ]
    core.create_namespaced_config_map(space, child)
    core.delete_namespaced_config_map("owner", space)
    names = lambda: {o.metadata.name for o in core.list_namespaced_config_map(space).items}  # noqa: E731
    cluster.wait("the child's end", lambda: "child" not in names())
