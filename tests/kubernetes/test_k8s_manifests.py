"""The rendered manifests and those an administrator applies: the server takes them as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from k8s_cluster import Cluster
from kubectl import install, kubectl, why_not
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
GOLDEN = sorted((ROOT / "tests" / "golden" / "kubernetes").glob("*.yaml"))
BASE = ROOT / "manifests" / "base"


def _documents(cluster: Cluster, path: Path) -> list[dict[str, Any]]:
    """Return the documents of a file, moved into the test's namespace."""
    documents = [d for d in YAML(typ="safe").load_all(path.read_text()) if d is not None]
    for document in documents:
        if document["metadata"].get("namespace") is not None:
            document["metadata"]["namespace"] = cluster.namespace
    return documents


@pytest.mark.parametrize("kind", ["pytorchjob", "jobset", "trainjob"])
def test_a_strict_server_takes_the_rendered_manifests(cluster: Cluster, kind: str) -> None:
    cluster.need(kind)
    paths = [path for path in GOLDEN if path.stem.endswith(f"-{kind}")]
    assert len(paths) >= 5
    for path in paths:
        *others, job = _documents(cluster, path)
        for document in others:
            # A TrainJob is only taken where its runtime is.
            query = {} if document["kind"] == "TrainingRuntime" else {"dryRun": "All"}
            cluster.create(document, fieldValidation="Strict", **query)
        made = cluster.create(job, fieldValidation="Strict", dryRun="All")
        assert made["kind"].lower() == kind


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
    for document in YAML(typ="safe").load_all(built.stdout):
        if document["kind"] == "Namespace":
            continue  # that of the test stands for it
        cluster.create(document, fieldValidation="Strict", dryRun="All")
        count += 1
    assert count >= 5
