"""A bundle, and the backend for clusters before a small server: what several test files share."""

from __future__ import annotations

import json

import pytest
from fake_api import kubeconfig

from launcher.platforms.kubernetes import storage
from launcher.platforms.kubernetes.api import ApiPatience, KubernetesApi, connect
from launcher.platforms.kubernetes.backend import KubernetesBackend

ROOT = "/apis/kubeflow.org/v1/namespaces/train/pytorchjobs"
MAPS = "/api/v1/namespaces/train/configmaps"
BUDGETS = "/apis/policy/v1/namespaces/train/poddisruptionbudgets"
PODS = "/api/v1/namespaces/train/pods"
NOW = 1_767_229_200.0


def documents(run_dir, *, board=False):
    labels = {
        "holdfast.dev/run": "tiny-1",
        "holdfast.dev/attempt": "0",
        "app.kubernetes.io/managed-by": "holdfast",
    }

    def head(name, **annotations):
        return {"name": name, "namespace": "train", "labels": labels, "annotations": annotations}

    container = {
        "name": "pytorch",
        "image": "holdfast:1",
        "command": ["/usr/bin/python$$3", "-P", "-m", "launcher.node", "pod", str(run_dir)],
        "env": [{"name": "A", "value": "b"}, {"name": "POD_NAME", "valueFrom": {}}],
        "resources": {"limits": {"nvidia.com/gpu": "8"}},
        "securityContext": {"capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "holdfast-runs", "mountPath": "/holdfast"},
            {"name": "holdfast-shm", "mountPath": "/dev/shm"},
        ],
    }
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "containers": [container],
            "nodeSelector": {"gpu": "yes"},
            "securityContext": {"runAsUser": 7},
            "volumes": [
                {"name": "holdfast-shm", "emptyDir": {"medium": "Memory"}},
                {"name": "holdfast-runs", "persistentVolumeClaim": {"claimName": "runs"}},
            ],
        },
    }
    kept = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": head("tiny-1-board", **{"holdfast.dev/keep": "true"}),
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": head("tiny-1-job"), "data": {}},
        *([kept] if board else []),
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": head("tiny-1")},
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": head("tiny-1", **{"holdfast.dev/run-dir": str(run_dir)}),
            "spec": {"pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}}},
        },
    ]


def bundle(run_dir, **kwargs):
    text = "---\n".join(json.dumps(one) + "\n" for one in documents(run_dir, **kwargs))
    return {"manifests.yaml": text, "job.json": "{}", "job.yaml": "kubernetes: {context: here}\n"}


@pytest.fixture
def backend(server, tmp_path, waits, monkeypatch):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server.url, namespace="other"))
    made: list[KubernetesApi] = []

    def connected(context):
        patience = ApiPatience(connect_s=2.0, read_s=5.0, retry_s=0.0)
        env = {"KUBECONFIG": str(path)}
        made.append(connect(context, env=env, patience=patience, sleep=waits.append))
        return made[-1]

    monkeypatch.setattr(storage, "START_S", 1.0)
    yield KubernetesBackend(connected, sleep=waits.append, wall=lambda: NOW)
    for api in made:
        api.client.rest_client.pool_manager.clear()


@pytest.fixture
def run(tmp_path):
    found = tmp_path / "run"
    found.mkdir()
    return found


def submit(backend, run, **kwargs):
    files = bundle(run, **kwargs)
    for name, text in files.items():
        (run / name).write_text(text)
    extra = run / "submitted.json"
    if extra.exists():
        files["submitted.json"] = extra.read_text()
    return backend.submit(run, files)


def end(server, kind="Succeeded"):
    job = server.objects[f"{ROOT}/tiny-1"]
    job["status"] = {"conditions": [{"type": kind, "status": "True"}]}


def pod(index, run="tiny-1", **status):
    return {
        "metadata": {"name": f"{run}-worker-{index}", "labels": {"holdfast.dev/run": run}},
        "spec": {"nodeName": f"n{index}", "containers": [{"name": "pytorch"}]},
        "status": status
        or {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": [{"name": "pytorch", "state": {"running": {}}}],
        },
    }


def running(server, count=2):
    for index in range(count):
        server.put(f"{PODS}/tiny-1-worker-{index}", pod(index))
