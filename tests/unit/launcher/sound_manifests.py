"""Manifests of each kind in which nothing is wrong, and a way to change them."""

from __future__ import annotations

import copy

CONTAINER = {
    "name": "pytorch",
    "image": "torch:2",
    "command": ["python3", "-m", "launcher.node", "pod", "/runs/r"],
    "resources": {"limits": {"nvidia.com/gpu": "8", "memory": "512Gi"}},
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
}
POD = {
    "terminationGracePeriodSeconds": 600,
    "containers": [CONTAINER],
    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}],
}
PYTORCHJOB = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "PyTorchJob",
    "metadata": {"name": "train", "labels": {}},
    "spec": {
        "nprocPerNode": "8",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 40},
        "elasticPolicy": {"rdzvBackend": "c10d", "minReplicas": 2, "maxReplicas": 4},
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": 4,
                "restartPolicy": "ExitCode",
                "template": {"spec": POD},
            }
        },
    },
}
INDEXED = {
    "completionMode": "Indexed",
    "completions": 4,
    "parallelism": 4,
    "backoffLimit": 2147483647,
    "podFailurePolicy": {
        "rules": [
            {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [93]}},
            {
                "action": "Ignore",
                "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        ]
    },
    "template": {"spec": {"restartPolicy": "Never", **POD}},
}
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": "train", "labels": {}},
    "spec": {
        "failurePolicy": {"maxRestarts": 3},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": INDEXED}}],
    },
}
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
RUNTIME = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainingRuntime",
    "metadata": {"name": "train", "labels": {}},
    "spec": {
        "mlPolicy": {"numNodes": 4},
        "template": {
            "spec": {
                "replicatedJobs": [
                    {
                        "name": "node",
                        "template": {
                            "metadata": {"labels": {STEP: "trainer"}},
                            "spec": {
                                **INDEXED,
                                "template": {
                                    "spec": {
                                        "restartPolicy": "Never",
                                        **POD,
                                        "containers": [{**CONTAINER, "name": "node"}],
                                    }
                                },
                            },
                        },
                    }
                ]
            }
        },
    },
}
TRAINJOB = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "train", "labels": {}},
    "spec": {"runtimeRef": {"name": "train", "kind": "TrainingRuntime"}, "trainer": {}},
}
BUDGET = {
    "apiVersion": "policy/v1",
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "train"},
    "spec": {"minAvailable": 3},
}
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "runs"},
    "spec": {"accessModes": ["ReadWriteMany"]},
}
CONFIG = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {}}
SOUND = {
    "pytorchjob": PYTORCHJOB,
    "jobset": JOBSET,
    "runtime": RUNTIME,
    "trainjob": TRAINJOB,
    "budget": BUDGET,
    "claim": CLAIM,
    "config": CONFIG,
}

WORKER = "spec.pytorchReplicaSpecs.Worker"
PYTORCH_POD = f"{WORKER}.template.spec"
JOB = "spec.replicatedJobs.0.template.spec"
RUNTIME_JOB = "spec.template.spec.replicatedJobs.0.template.spec"
TORCHRUN = ["torchrun", "--nnodes=2:4", "train.py"]
GONE = object()


def changed(document, changes):
    """Return a copy with the values at dotted paths set; GONE removes one."""
    document = copy.deepcopy(document)
    for path, value in changes.items():
        *outer, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        here = document
        for part in outer:
            here = here[part]
        if value is GONE:
            del here[last]
        elif isinstance(here, list) and last == len(here):
            here.append(value)
        else:
            here[last] = copy.deepcopy(value)
    return document
