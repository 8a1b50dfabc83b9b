"""Small handwritten manifests for the tests of the cluster itself."""

from __future__ import annotations

from typing import Any

from k8s_cluster import Cluster

Object = dict[str, Any]


def container(cluster: Cluster, script: str, **more: Any) -> Object:
    """Return a container that runs a shell script."""
    return {
        "name": "pytorch",
        "image": cluster.image,
        "command": ["sh", "-c", script],
        **more,
    }


def template(cluster: Cluster, script: str, **more: Any) -> Object:
    """Return a pod template; `more` goes into its spec."""
    spec = {"containers": [container(cluster, script)], "terminationGracePeriodSeconds": 2}
    return {"metadata": {"labels": {"app": "t"}}, "spec": {**spec, **more}}


def pod(cluster: Cluster, name: str, script: str, **more: Any) -> Object:
    """Return a pod that is not restarted."""
    found = template(cluster, script, restartPolicy="Never", **more)
    found["metadata"]["name"] = name
    return {"apiVersion": "v1", "kind": "Pod", **found}


def pytorchjob(
    cluster: Cluster, name: str, script: str, *, workers: int = 2, policy: str = "ExitCode"
) -> Object:
    """Return an elastic PyTorchJob of workers only."""
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {
            "nprocPerNode": "2",
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 100},
            "elasticPolicy": {"rdzvBackend": "c10d", "minReplicas": 1, "maxReplicas": workers},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": workers,
                    "restartPolicy": policy,
                    "template": template(cluster, script),
                }
            },
        },
    }


def jobset_spec(cluster: Cluster, script: str, *, workers: int = 2) -> Object:
    """Return the spec of a JobSet in which one lost pod does not recreate the others."""
    return {
        "failurePolicy": {
            "maxRestarts": 0,
            "rules": [
                {
                    "name": "final",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": "node",
                "replicas": 1,
                "template": {
                    "metadata": {
                        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
                    },
                    "spec": {
                        "completionMode": "Indexed",
                        "parallelism": workers,
                        "completions": workers,
                        "backoffLimit": 2147483647,
                        "podFailurePolicy": {
                            "rules": [
                                {
                                    "action": "Ignore",
                                    "onPodConditions": [
                                        {"type": "DisruptionTarget", "status": "True"}
                                    ],
                                },
                                {
                                    "action": "FailJob",
                                    "onExitCodes": {
                                        "containerName": "pytorch",
                                        "operator": "In",
                                        "values": [93, 94],
                                    },
                                },
                            ]
                        },
                        "template": template(cluster, script, restartPolicy="Never"),
                    },
                },
            }
        ],
    }


def jobset(cluster: Cluster, name: str, script: str, *, workers: int = 2) -> Object:
    """Return a JobSet."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name},
        "spec": jobset_spec(cluster, script, workers=workers),
    }


def runtime(cluster: Cluster, name: str, script: str) -> Object:
    """Return a TrainingRuntime."""
    spec = {"mlPolicy": {"numNodes": 1}, "template": {"spec": jobset_spec(cluster, script)}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name},
        "spec": spec,
    }


def trainjob(name: str, runtime_name: str, *, nodes: int = 2) -> Object:
    """Return a TrainJob of a runtime of the same namespace."""
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime_name}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {"runtimeRef": ref, "trainer": {"numNodes": nodes}},
    }
