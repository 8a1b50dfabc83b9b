"""Manifests of two example jobs in three kinds, to be read in review.

Those of llama3-8b are what manifests/examples shows. HOLDFAST_UPDATE_GOLDEN=1 writes all of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.plan.layout import ParallelLayout
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.kubernetes.documents import template_of
from launcher.platforms.targets import target_named
from launcher.render.kubernetes_names import job_name

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "finetune": Path(__file__).parent / "kubernetes",
    "llama3-8b": ROOT / "manifests" / "examples",
}
TCPX = Path(__file__).parent / "jobs" / "tcpx.yaml"
EXAMPLES = ("llama3-405b", "llama3-70b", "llama3-8b", "finetune", "tiny-cpu")
KINDS = ("pytorchjob", "jobset", "trainjob")
KIB = 1024
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim",
    "projected", "secret",
}  # fmt: skip
DECLARED = {
    "llama3-405b": {"IPC_LOCK"},  # RDMA
    "llama3-70b": {"IPC_LOCK", "hostPath"},
    "llama3-8b": {"IPC_LOCK"},
    "finetune": {"IPC_LOCK"},
}


def bundle_of(name, kind):
    sets = ["data.path=/holdfast/corpus"] if name == "tiny-cpu" else []
    spec = load_spec(ROOT / "examples" / f"{name}.yaml", sets)
    return target_named(kind).load_renderer()(
        spec,
        plan(spec),
        run_id=f"{name}-1",
        run_dir=f"/home/user/jobs/runs/{name}-1",
        base_dir="/home/user/jobs",
        python="/opt/holdfast/bin/python",
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FOLDERS)
def test_the_manifests_are_those_reviewed(name, kind):
    bundle, path = bundle_of(name, kind), FOLDERS[name] / f"{name}-{kind}.yaml"
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        path.write_text(bundle["manifests.yaml"])
    assert bundle["manifests.yaml"] == path.read_text(), (
        f"if it is meant: HOLDFAST_UPDATE_GOLDEN=1 pytest {Path(__file__).relative_to(ROOT)}"
    )


def test_the_patched_job_is_the_one_reviewed():
    spec, path = load_spec(TCPX), FOLDERS["finetune"] / "tcpx-jobset.yaml"
    places = {"run_id": "tcpx-1", "run_dir": "/jobs/runs/tcpx-1", "base_dir": "/jobs"}
    text = target_named("jobset").load_renderer()(spec, plan(spec), **places)["manifests.yaml"]
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_job_comes_last_and_everything_has_the_labels_of_its_run(name, kind):
    bundle = bundle_of(name, kind)
    documents = list(yaml.safe_load_all(bundle["manifests.yaml"]))
    assert documents[-1]["kind"].lower() == kind, "the job comes last"
    (config,) = [each for each in documents if "job.json" in each.get("data", {})]
    assert config["data"]["job.json"] == bundle["job.json"]
    assert TrainConfig.from_json(bundle["job.json"]).run_id == f"{name}-1"
    assert len({each["metadata"]["namespace"] for each in documents}) == 1
    for document in documents:
        labels = document["metadata"]["labels"]
        assert labels["holdfast.dev/run"] == f"{name}-1"
        assert labels["holdfast.dev/attempt"] == "0"
        assert labels["app.kubernetes.io/managed-by"] == "holdfast"


def beyond_restricted(pod):
    """Return what of a pod the level restricted of Pod Security refuses.

    After https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted.
    """
    found = {key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)}
    found |= {key for each in pod["volumes"] for key in each.keys() - {"name"} - RESTRICTED_VOLUMES}
    of_pod = pod.get("securityContext", {})
    found |= {key for key in ("sysctls", "seLinuxOptions", "windowsOptions") if key in of_pod}
    for container in [*pod["containers"], *pod.get("initContainers", ())]:
        context = {**of_pod, **container.get("securityContext", {})}
        rights = context.get("capabilities", {})
        found |= set(rights.get("add", ())) - {"NET_BIND_SERVICE"}
        found |= {key for key in ("privileged", "procMount", "seLinuxOptions") if key in context}
        found |= {"hostPort" for port in container.get("ports", ()) if "hostPort" in port}
        wanted = {
            "allowPrivilegeEscalation": context.get("allowPrivilegeEscalation") is False,
            "drop ALL": "ALL" in rights.get("drop", ()),
            "runAsNonRoot": context.get("runAsNonRoot") is True and context.get("runAsUser") != 0,
            "seccompProfile": context.get("seccompProfile", {}).get("type") == "RuntimeDefault",
        }
        found |= {name for name, is_there in wanted.items() if not is_there}
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_pods_ask_for_no_more_than_restricted_allows_but_what_their_job_file_declares(name, kind):
    documents = list(yaml.safe_load_all(bundle_of(name, kind)["manifests.yaml"]))
    assert beyond_restricted(template_of(documents)["spec"]) == DECLARED.get(name, set())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_2048_nodes_are_as_short_as_two(name, kind):
    text = bundle_of(name, kind)["manifests.yaml"]
    assert len(text.encode()) < 12 * KIB
    assert len(text.splitlines()) < 250


@pytest.mark.parametrize(
    ("kind", "most"), [("pytorchjob", 5.2 * KIB), ("jobset", 5.8 * KIB), ("trainjob", 6.6 * KIB)]
)
def test_a_tiny_job_is_read_at_a_glance(kind, most):
    assert len(bundle_of("tiny-cpu", kind)["manifests.yaml"].encode()) < most


@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_applies_2048_fallback_layouts_no_two_of_which_are_alike(kind):
    """It keeps what it applied in an annotation: 262,144 bytes for all of an object."""
    spec = load_spec(ROOT / "examples" / "tiny-cpu.yaml", ["data.path=/holdfast/corpus"])
    rungs = (
        Rung(num_nodes=n, layout=ParallelLayout(dp=n, tp=1 + n % 2), micro_batches=10**6 // n)
        for n in range(2048, 0, -1)
    )
    made = dataclasses.replace(plan(spec), ladder=Ladder(tuple(rungs)))
    places = {"run_id": "a", "run_dir": "/jobs/runs/a", "base_dir": "/jobs"}
    bundle = target_named(kind).load_renderer()(spec, made, **places)
    assert len(TrainConfig.from_json(bundle["job.json"]).ladder.rungs) == 2048
    for document in yaml.safe_load_all(bundle["manifests.yaml"]):
        assert len(json.dumps(document)) < 200_000


def test_containers_have_their_fields_in_the_order_people_write_them():
    wanted = ["name", "image", "command", "env", "resources", "volumeMounts", "securityContext"]
    for kind in KINDS:
        documents = list(yaml.safe_load_all(bundle_of("llama3-8b", kind)["manifests.yaml"]))
        (container,) = template_of(documents)["spec"]["containers"]
        assert list(container)[: len(wanted)] == wanted
        for document in documents:
            head = ["apiVersion", "kind", "metadata"]
            assert list(document)[:3] == head
            assert list(document["metadata"])[:3] == ["name", "namespace", "labels"]


@given(st.text(max_size=120))
def test_any_run_has_a_name_that_controllers_can_add_to(run_id):
    name = job_name(run_id)
    assert len(name) <= 40
    assert name[0].isascii()
    assert name[0].islower()
    assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert not name.endswith("-")


def test_two_runs_have_two_names():
    long = "a" * 60
    names = [job_name(each) for each in ("a b", "a-b", "a.b", "A-B", f"{long}1", f"{long}2", "1")]
    assert len(set(names)) == len(names)
    assert job_name("llama3-8b-20260101-120000") == "llama3-8b-20260101-120000"
