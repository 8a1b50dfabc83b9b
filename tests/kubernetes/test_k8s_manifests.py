"""The rendered manifests and those an administrator applies: the server takes them as they are."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from k8s_cluster import Cluster
from kubectl import install, kubectl, why_not
from kubernetes.dynamic.exceptions import ForbiddenError

from launcher.jobspec.reading import load_spec
from launcher.planning.search import plan
from launcher.targets import target_named

ROOT = Path(__file__).parents[2]
EXAMPLES = ("llama3-405b", "llama3-70b", "llama3-8b", "finetune", "tiny-cpu")
BASE = ROOT / "manifests" / "base"


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
    for name in EXAMPLES:
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
