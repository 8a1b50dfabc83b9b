"""The rendered manifests and those an administrator applies: the server takes them as they are."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster
from kubectl import install, kubectl, why_not
from kubernetes.dynamic.exceptions import ForbiddenError, UnprocessibleEntityError

from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.platforms.kubernetes.documents import template_of
from launcher.platforms.targets import target_named

ROOT = Path(__file__).parents[2]
BASE = ROOT / "manifests" / "base"
DECLARED: dict[str, set[str]] = {
    "llama3-405b": {"IPC_LOCK"},
    "llama3-70b": {"IPC_LOCK", "hostPath"},
    "llama3-8b": {"IPC_LOCK"},
    "finetune": {"IPC_LOCK"},
    "tiny-cpu": set(),
}
"""Of the examples: RDMA, and a folder of the node."""


def _rendered(cluster: Cluster, name: str, kind: str) -> list[dict[str, Any]]:
    """Return the documents of an example job, in the test's namespace."""
    sets = [f"kubernetes.namespace={cluster.namespace}"]
    sets += ["data.path=/holdfast/corpus"] if name == "tiny-cpu" else []
    spec = load_spec(ROOT / "examples" / f"{name}.yaml", sets)
    places = {"run_id": f"{name}-1", "run_dir": f"/jobs/runs/{name}-1", "base_dir": "/jobs"}
    files = target_named(kind).load_renderer()(spec, plan(spec), python="", **places)
    return list(yaml.safe_load_all(files["manifests.yaml"]))


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_a_strict_server_takes_the_rendered_manifests(cluster: Cluster, kind: str) -> None:
    cluster.need(kind)
    for name in DECLARED:
        *others, job = _rendered(cluster, name, kind)
        for document in others:
            # A TrainJob is only taken where its runtime is.
            query = {} if document["kind"] == "TrainingRuntime" else {"dryRun": "All"}
            cluster.create(document, fieldValidation="Strict", **query)

        def made(job: dict[str, Any] = job) -> dict[str, Any] | None:
            with contextlib.suppress(ForbiddenError):  # a webhook sees a runtime a little later
                return cluster.create(job, fieldValidation="Strict", dryRun="All")
            return None

        assert cluster.wait("the job to be taken", made, timeout_s=20.0)["kind"].lower() == kind


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_the_level_restricted_refuses_only_what_job_files_declare(
    cluster: Cluster, kind: str
) -> None:
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.core.patch_namespace(cluster.namespace, {"metadata": {"labels": enforce}})
    for name, declared in DECLARED.items():
        refused = _refused(cluster, name, kind=kind)
        words = "IPC_LOCK|hostPath|allowPrivilegeEscalation|runAsNonRoot|seccompProfile|ALL"
        assert set(re.findall(words, refused)) == declared, refused


@pytest.fixture
def policy(cluster: Cluster) -> Iterator[None]:
    """Put manifests/rdma's policy on the namespace of the test alone, under its name."""
    name = cluster.namespace
    documents = list(yaml.safe_load_all((BASE.parent / "rdma" / "policy.yaml").read_text()))
    documents[1]["spec"]["policyName"] = name
    documents[1]["spec"]["matchResources"]["namespaceSelector"] = {
        "matchLabels": {"kubernetes.io/metadata.name": name}
    }
    try:
        for document in documents:
            document["metadata"]["name"] = name
            cluster.create(document, fieldValidation="Strict")
        yield
    finally:
        cluster.delete("validatingadmissionpolicybindings", name)
        cluster.delete("validatingadmissionpolicies", name)


@pytest.mark.usefixtures("policy")
def test_the_policy_for_rdma_allows_ipc_lock_alone(cluster: Cluster) -> None:
    ask = functools.partial(_refused, cluster, kind="jobset")
    cluster.wait("the policy", lambda: "hostNetwork" in ask("tiny-cpu", hostNetwork=True))
    for name, declared in DECLARED.items():
        assert ("hostPath" in ask(name)) == ("hostPath" in declared), ask(name)
        assert "IPC_LOCK" not in ask(name)
    for spec, what in FORBIDDEN:
        assert what in ask("tiny-cpu", **spec), spec


FORBIDDEN = (
    ({"hostPID": True}, "hostPID"),
    ({"securityContext": {"seccompProfile": {"type": "Unconfined"}}}, "Unconfined"),
    ({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}, "sysctls"),
    ({"securityContext": {"seLinuxOptions": {"type": "spc_t"}}}, "SELinux"),
    *(
        ({"initContainers": [{"name": "a", "image": "a", **container}]}, what)
        for container, what in (
            ({"securityContext": {"privileged": True}}, "privileged"),
            ({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}, "capabilities"),
            ({"securityContext": {"procMount": "Unmasked"}}, "procMount"),
            ({"ports": [{"containerPort": 80, "hostPort": 80}]}, "host ports"),
        )
    ),
)
"""What a pod may not have, and the word that says so."""


def _refused(cluster: Cluster, name: str, *, kind: str, **spec: Any) -> str:
    """Return what the server says against a pod of an example with a changed spec; "": nothing."""
    template = template_of(_rendered(cluster, name, kind))
    pod = {**template["spec"], **spec}
    for key in ("priorityClassName", "serviceAccountName"):  # the test has none
        pod.pop(key, None)
    head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    try:
        cluster.create({**head, "spec": pod}, dryRun="All")
    except (ForbiddenError, UnprocessibleEntityError) as error:
        return str(error.body)
    return ""


def test_a_strict_server_takes_what_an_administrator_applies(
    cluster: Cluster, tmp_path: Path
) -> None:
    install()
    if reason := why_not():
        pytest.skip(reason)
    # Built where the file lies: kubectl before 1.21 takes no folders outside of it.
    shutil.copytree(BASE, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "kustomization.yaml"
    file.write_text(
        file.read_text().replace("namespace: holdfast", f"namespace: {cluster.namespace}")
    )
    built = kubectl("kustomize", tmp_path)
    assert (built.returncode, built.stderr) == (0, "")
    count = 0
    for document in yaml.safe_load_all(built.stdout):
        if document["kind"] == "Namespace":
            continue  # that of the test stands for it
        cluster.create(document, fieldValidation="Strict", dryRun="All")
        count += 1
    assert count >= 5
