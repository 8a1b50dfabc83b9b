"""`kubernetes.pod_patch`: what is merged how, and what is not the user's to set."""

from __future__ import annotations

import contextlib
import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes_jobs import documents_of, kind, pod_of, refused, template_of, variables_of

from launcher.render.kubernetes_names import CONTAINERS
from launcher.spec.errors import UserError
from launcher.spec.pod_patch import AGENT_NAMES, patched

__all__ = ["kind"]  # the fixture


def pod_with(patch, kind="pytorchjob", **values):
    return pod_of({"kubernetes.pod_patch": patch, **values}, kind)


def agent(**fields):
    return {"containers": [{"name": "pytorch", **fields}]}


def test_the_agents_container_goes_by_either_name():
    assert set(AGENT_NAMES) == set(CONTAINERS.values())


def test_fields_of_the_pod_are_added(kind):
    patch = {
        "runtimeClassName": "kata",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "resourceClaims": [{"name": "imex", "resourceClaimTemplateName": "imex-channel"}],
        "initContainers": [{"name": "daemon", "image": "a", "restartPolicy": "Always"}],
    }
    assert pod_with(patch, kind) == pod_of({}, kind) | patch


@pytest.mark.parametrize("name", AGENT_NAMES)
def test_the_agents_container_is_merged_in_every_kind(kind, name):
    row = {
        "name": name,
        "resources": {"limits": {"ephemeral-storage": "1Gi"}, "claims": [{"name": "imex"}]},
        "volumeMounts": [{"mountPath": "/dev/hugepages", "name": "huge"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "3"}],
    }
    sidecar = {"name": "sidecar", "image": "b"}
    before, after = pod_of({}, kind), pod_with({"containers": [row, sidecar]}, kind)
    ours, beside = after["containers"]
    assert beside == sidecar
    assert ours["name"] == CONTAINERS[kind]
    assert ours["command"] == before["containers"][0]["command"]
    assert ours["resources"]["limits"] == {"nvidia.com/gpu": "1", "ephemeral-storage": "1Gi"}
    assert ours["resources"]["claims"] == [{"name": "imex"}]
    assert ours["volumeMounts"] == before["containers"][0]["volumeMounts"] + row["volumeMounts"]
    assert variables_of(after) == variables_of(before) | {"OMP_NUM_THREADS": "3"}


def test_tolerations_are_added_once_and_other_lists_are_replaced():
    base = pod_of({})
    (gpu,) = base["tolerations"]
    more = {"key": "a", "operator": "Exists"}
    assert pod_with({"tolerations": [gpu, more]})["tolerations"] == [gpu, more]
    groups = {"supplementalGroups": [4]}
    pod = pod_with({"securityContext": groups}, **{"kubernetes.security": {"fs_group": 3}})
    assert pod["securityContext"]["supplementalGroups"] == [4]
    assert pod["securityContext"]["fsGroup"] == 3


def test_null_removes_a_field_and_a_variable_is_replaced_whole():
    pod = {
        "a": {"b": 1, "c": 2},
        "containers": [{"name": "x", "env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}],
    }
    before = copy.deepcopy(pod)
    patch = {
        "a": {"b": None, "d": {"e": None, "f": 1}},
        "containers": [{"name": "node", "env": [{"name": "A", "value": "1"}]}],
    }
    assert patched(pod, patch, container="x") == {
        "a": {"c": 2, "d": {"f": 1}},
        "containers": [{"name": "x", "env": [{"name": "A", "value": "1"}]}],
    }
    assert pod == before


def test_excluded_nodes_stay_excluded():
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    gpu = {"key": "gpu", "operator": "Exists"}
    terms = {required: {"nodeSelectorTerms": [{"matchExpressions": [gpu]}]}}
    pod = pod_with({"affinity": {"nodeAffinity": terms}}, **{"kubernetes.exclude": ["n7"]})
    (term,) = pod["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert [each["key"] for each in term["matchExpressions"]] == ["gpu", "kubernetes.io/hostname"]


@pytest.mark.parametrize(
    ("patch", "field"),
    [
        *(
            ({field: value}, field)
            for field, value in (
                ("restartPolicy", "Always"), ("terminationGracePeriodSeconds", 5),
                ("serviceAccountName", "a"), ("automountServiceAccountToken", True),
                ("schedulerName", "a"), ("priorityClassName", "a"),
            )
        ),
        *(
            (agent(**{field: value}), f"containers.pytorch.{field}")
            for field, value in (
                ("image", "a"), ("command", ["sh"]), ("args", ["a"]), ("lifecycle", None),
            )
        ),
        ({"volumes": [{"name": "holdfast-shm", "emptyDir": {}}]}, "volumes.holdfast-shm"),
        (agent(volumeMounts=[{"mountPath": "/dev/shm/", "name": "a"}]), "volumeMounts./dev/shm/"),
        (agent(volumeMounts=[{"mountPath": "/holdfast", "name": "a"}]), "volumeMounts./holdfast"),
        (agent(resources={"limits": {"memory": "1Gi"}}), "resources.limits.memory"),
        (agent(resources={"requests": {"nvidia.com/gpu": 1}}), "resources.requests.nvidia.com/gpu"),
        (agent(resources=None), "containers.pytorch.resources"),
        (agent(resources={"limits": None}), "resources.limits"),
    ],
)  # fmt: skip
def test_what_holdfast_sets_is_refused_by_name(patch, field):
    (line,) = refused({"kubernetes.pod_patch": patch})
    assert "HF737 kubernetes.pod_patch: " in line
    assert field in line


@pytest.mark.parametrize(
    ("patch", "code"),
    [
        ([], "HF012"),
        ({"containers": {"name": "pytorch"}}, "HF015"),
        ({"containers": [{"image": "a"}]}, "HF015"),
        ({"volumes": None}, "HF015"),
        ({"tolerations": ["a"]}, "HF015"),
        ({"$patch": "replace"}, "HF015"),
        (agent(env=[{"name": "HOLDFAST_JOB", "value": "a"}]), "HF165"),
        (agent(env=[{"name": "POD_IP", "value": "a"}]), "HF165"),
        (agent(env=[{"name": "RANK", "value": "0"}]), "HF165"),
        (agent(env=[{"name": "HF_TOKEN", "value": "a"}]), "HF163"),
        ({"initContainers": [{"name": "a", "args": ["hf_" + "a1B2" * 8]}]}, "HF163"),
    ],
)
def test_a_patch_of_a_wrong_form_is_refused(patch, code):
    assert {line.split()[1] for line in refused({"kubernetes.pod_patch": patch})} == {code}


_RICH = {
    "affinity": {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {
                        "matchExpressions": [
                            {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n1"]}
                        ]
                    }
                ]
            }
        }
    },
    "tolerations": [{"key": "a"}],
    "volumes": [{"name": "a", "emptyDir": {}}],
    "hostAliases": [{"ip": "10.0.0.1"}],
    "containers": [
        {
            "name": "pytorch",
            "env": [{"name": "A", "value": "b"}],
            "resources": {"limits": {"a/b": 1}, "claims": [{"name": "c"}]},
            "volumeMounts": [{"name": "a", "mountPath": "/a"}],
            "ports": [{"containerPort": 9400}],
        }
    ],
}
_JUNK = (None, 1, True, "x", "", [], {}, [1], [None], [{}], {"a": 1}, [{"name": ["x"]}], [[]])


def _places(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from _places(each, (*path, key))


@pytest.mark.parametrize("path", list(_places(_RICH))[1:], ids=str)
def test_a_patch_of_another_shape_is_refused_or_merged_and_nothing_else(path):
    for junk in _JUNK:
        patch = copy.deepcopy(_RICH)
        here = patch
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = junk
        with contextlib.suppress(UserError):
            pod_with(patch, **{"kubernetes.exclude": ["n7"]})


NAMES = st.sampled_from(["pytorch", "node", "a", "holdfast-shm"])
VALUES = st.none() | st.integers(0, 9) | st.text("ab$()", max_size=4) | st.lists(st.integers(0, 3))
ROWS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "image": VALUES, "command": VALUES, "args": VALUES, "lifecycle": VALUES, "stdin": VALUES,
        "env": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["HOLDFAST_JOB", "A"])})),
        "volumeMounts": st.lists(
            st.fixed_dictionaries({"mountPath": st.sampled_from(["/dev/shm", "/holdfast/", "/a"])})
        ),
        "resources": st.dictionaries(
            st.sampled_from(["limits", "requests"]),
            st.dictionaries(st.sampled_from(["memory", "cpu", "nvidia.com/gpu", "a/b"]), VALUES),
        ),
    },
)  # fmt: skip
PATCHES = st.fixed_dictionaries(
    {},
    optional={
        "containers": st.lists(ROWS, max_size=3), "initContainers": st.lists(ROWS, max_size=2),
        "volumes": st.lists(st.fixed_dictionaries({"name": NAMES}), max_size=2),
        "restartPolicy": VALUES, "hostNetwork": VALUES, "serviceAccountName": VALUES,
        "securityContext": st.dictionaries(st.sampled_from(["a", "b"]), VALUES),
        "tolerations": st.lists(st.fixed_dictionaries({"key": st.text("ab")})),
    },
)  # fmt: skip
SIZES = {"kubernetes.cpus": 4, "kubernetes.memory": "99Gi"}
PLAIN = {each: template_of(documents_of(SIZES, each)) for each in CONTAINERS}


@given(PATCHES, st.sampled_from(sorted(CONTAINERS)))
def test_whatever_is_taken_leaves_the_agent_as_it_was(patch, kind):
    try:
        pod = pod_with(patch, kind, **SIZES)
    except UserError:
        return
    before = PLAIN[kind]["spec"]
    (was,) = before["containers"]
    (now,) = [row for row in pod["containers"] if row["name"] == CONTAINERS[kind]]
    for name in ("image", "command", "args", "lifecycle"):
        assert now.get(name) == was.get(name)
    assert now["resources"]["limits"].items() >= was["resources"]["limits"].items()
    for field, key in (("env", "name"), ("volumeMounts", "mountPath")):
        rows = {row[key]: row for row in now[field]}
        assert rows.items() >= {row[key]: row for row in was[field]}.items()
    assert all(volume in pod["volumes"] for volume in before["volumes"])
    for name in ("serviceAccountName", "terminationGracePeriodSeconds", "restartPolicy"):
        assert pod.get(name) == before.get(name)
    assert patched(pod, patch, container=CONTAINERS[kind]) == pod, "twice is once"
