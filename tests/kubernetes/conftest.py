"""A Kubernetes cluster for tests: `cluster`, one namespace per test; without a cluster a skip.

Any cluster will do, of kind, minikube or machines. It is named by

    HOLDFAST_TEST_KUBECONFIG       its current context; rights of an administrator
    HOLDFAST_TEST_IMAGE            an image with Python and this project
    HOLDFAST_TEST_STORAGE_CLASS    a storage class that gives ReadWriteMany claims, or
    HOLDFAST_TEST_SHARED_DIR       a folder that this machine and all nodes have at the same path
    HOLDFAST_TEST_NODE_DOWN        a command that kills a node at once, as `take-down {node}`,
    HOLDFAST_TEST_NODE_UP          and one that brings it back

What a cluster cannot do, or has not, is skipped with the reason. `.ci/kubernetes` starts one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from k8s_cluster import Cluster
from k8s_user import User, write_corpus


@pytest.fixture(scope="session")
def cleared() -> Iterator[list[Cluster]]:
    """Clusters whose tests have ended; of none anything is left at the end of the session.

    Kubernetes takes seconds to remove a namespace: the next test does not wait for it.
    """
    ended: list[Cluster] = []
    yield ended
    for one in ended:
        one.wait_gone()


@pytest.fixture
def cluster(tmp_path: Path, cleared: list[Cluster]) -> Iterator[Cluster]:
    """A namespace of its own in the cluster."""
    for name in ("HOLDFAST_TEST_KUBECONFIG", "HOLDFAST_TEST_IMAGE"):
        if not os.environ.get(name):
            pytest.skip(
                f"{name} is not set: no cluster to test on (see tests/kubernetes/conftest.py)"
            )
    shared = os.environ.get("HOLDFAST_TEST_SHARED_DIR")
    found = Cluster(
        Path(os.environ["HOLDFAST_TEST_KUBECONFIG"]),
        os.environ["HOLDFAST_TEST_IMAGE"],
        folder=tmp_path,
        storage_class=os.environ.get("HOLDFAST_TEST_STORAGE_CLASS"),
        shared=Path(shared) if shared else None,
    )
    try:
        found.set_up()
        yield found
    finally:
        cleared.append(found)
        found.clear()


@pytest.fixture
def user(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> User:
    """Somebody with a folder of their own on a machine that only has the kubeconfig."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return User(cluster, capsys)


@pytest.fixture
def corpus(cluster: Cluster) -> None:
    """Write the training text to the claim."""
    write_corpus(cluster)
