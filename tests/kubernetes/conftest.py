"""A Kubernetes cluster for tests: `cluster`, one namespace per test.

    def test_it(cluster):
        cluster.create({"apiVersion": "v1", "kind": "Pod", ...})
        cluster.wait_phase("p", "Succeeded")
        subprocess.run(["holdfast", ...], env=cluster.env())

`cluster` (k8s_cluster.Cluster) has `kubeconfig`, `namespace`, `image`, `claim` (a RWX claim),
`env()` for commands, and methods for what tests do: create, read, pods, log, run (exec), events,
kill_pod, power_off and silence (nodes), fault (429, 503, dropped watches), kubeconfig_for (a user
with few rights), without (a kind that is not installed), wait. A test uses these and the official
client (`cluster.core`, `cluster.api`), nothing of the stand-in, so that it also runs on a real one:

    HOLDFAST_TEST_KUBECONFIG       its current context; rights of an administrator
    HOLDFAST_TEST_IMAGE            an image with Python and this project
    HOLDFAST_TEST_STORAGE_CLASS    a storage class that gives ReadWriteMany claims, or
    HOLDFAST_TEST_SHARED_DIR       a folder that this machine and all nodes have at the same path
    HOLDFAST_TEST_NODE_DOWN        a command that kills a node at once, as `take-down {node}`;
    HOLDFAST_TEST_NODE_CUT         one that only cuts its network and kubelet off,
    HOLDFAST_TEST_NODE_UP          and one that brings it back

What a real cluster cannot do on request is skipped there, with the reason.

Without these it is the stand-in (standin.py): an API server over HTTPS with state, watches,
conflicts, roles, quota and the CRD schemas where they are at hand; nodes n1..n4 with 8 GPUs that
are none; a scheduler; the controllers of Job, JobSet, TrainJob, PyTorchJob and a little of Kueue.
Containers are real processes of this machine, in namespaces of their own (needs root): process 1
is their command, each pod has its own address, `image` selects nothing but one that says `no-such`
cannot be pulled. PATH and PYTHONPATH are those of this Python and this code; nothing else of the
test's environment is handed on. Waiting times are short: eviction from a lost node after one
second, back-offs of containers and jobs from 0.1 s on. HOLDFAST_TEST_IMAGE_ROOT names an unpacked
image (pod_image.py) that pods find in place of this machine's files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from k8s_cluster import Cluster
from k8s_user import User, write_corpus
from pod_network import why_not
from standin import StandIn

_REAL = os.environ.get("HOLDFAST_TEST_KUBECONFIG")


@pytest.fixture(scope="session")
def standin() -> Iterator[StandIn | None]:
    """The stand-in of this session; None: a real cluster is named."""
    if _REAL:
        yield None
        return
    if reason := why_not():
        pytest.skip(reason)
    with StandIn() as cluster:
        yield cluster


@pytest.fixture
def cluster(standin: StandIn | None, tmp_path: Path) -> Iterator[Cluster]:
    """A namespace of its own in the cluster; afterwards nothing of it is left."""
    if standin is not None:
        path = standin.kubeconfig(tmp_path / "kubeconfig")
        found = Cluster(path, "holdfast:test", standin=standin, folder=tmp_path)
    else:
        image = os.environ.get("HOLDFAST_TEST_IMAGE")
        if not image:
            pytest.skip("HOLDFAST_TEST_IMAGE names no image")
        shared = os.environ.get("HOLDFAST_TEST_SHARED_DIR")
        found = Cluster(
            Path(str(_REAL)),
            image,
            standin=None,
            folder=tmp_path,
            storage_class=os.environ.get("HOLDFAST_TEST_STORAGE_CLASS"),
            shared=Path(shared) if shared else None,
        )
    found.set_up()
    yield found
    found.clear()
    if standin is not None and standin.errors:
        errors, standin.errors[:] = list(standin.errors), []
        raise ExceptionGroup("in the stand-in", [e for e in errors if isinstance(e, Exception)])


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
