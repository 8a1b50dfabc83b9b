"""(spec, plan) -> the bundle of a JobSet, PyTorchJob (training operator 1.9) or TrainJob. Pure.

A JobSet has one Indexed Job, an index for each node. By itself it answers one failed pod by
deleting all of them, and with them every snapshot in memory. Here the Job replaces each failed pod
alone, and an agent that says "never again" (93, 94) fails it. A pod whose node goes, or that keeps
count of its failures itself (143), is not charged; one that never ran our code gives its index up
at once, any other after `restart_limit`. A Job without an index left has failed, and its JobSet
with it. Its successPolicy ends it with the first agent that says "done", so pods still waiting for
a node hold nothing up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from launcher.plan.search import Plan
from launcher.render.kubernetes_facts import PodJob, pod_job
from launcher.render.kubernetes_names import API_VERSIONS, CONTAINERS, REPLICATED_JOB
from launcher.render.kubernetes_objects import job_document, kubernetes_bundle, metadata
from launcher.render.local import Bundle
from launcher.render.pod import pod_template
from launcher.spec.spec import JobSpec

FINAL_CODES: Final = (93, 94)
"""Of an agent whose job has ended for good."""
AGAIN: Final = 143
"""Of a pod that asks to be replaced: `launcher/node/decide.py:AGAIN`."""
NEVER_RAN_CODES: Final = (1, 2, 126, 127)
"""Of Python or a shell that finds no program to run; our pods end with none of them."""


def render_jobset(
    spec: JobSpec,
    plan: Plan,
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "",
) -> Bundle:
    """Return the bundle of a JobSet; arguments and errors are those of `render_pytorchjob`."""
    del python
    job = pod_job(spec, plan, kind="jobset", run_id=run_id, run_dir=run_dir, base_dir=base_dir)
    body = jobset_spec(job)
    if job.spec.kubernetes.queue is not None:
        body["suspend"] = True
    return kubernetes_bundle(job, [job_document(job, body)])


def jobset_spec(job: PodJob, *, labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Return the spec of a JobSet.

    Args:
        job: the job.
        labels: more labels of the Job.
    """
    wish = job.spec.kubernetes
    body: dict[str, Any] = {
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": [
            {
                "name": REPLICATED_JOB,
                "template": {
                    "metadata": {"labels": {**job.child_labels, **(labels or {})}},
                    "spec": _indexed_job(job),
                },
            }
        ],
    }
    if wish.ttl_s is not None:
        body["ttlSecondsAfterFinished"] = wish.ttl_s
    return body


def _indexed_job(job: PodJob) -> dict[str, Any]:
    wish = job.spec.kubernetes
    template = pod_template(job)
    body: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.num_pods,
        "parallelism": job.num_pods,
        "backoffLimit": job.restart_limit,
        # By index, or the delay before a pod is replaced would grow with every other's failures.
        "backoffLimitPerIndex": math.ceil(job.restart_limit / job.num_pods),
        "podFailurePolicy": {
            "rules": [
                _on_codes(job, "FailJob", *FINAL_CODES),
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
                _on_codes(job, "Ignore", AGAIN),
                _on_codes(job, "FailIndex", *NEVER_RAN_CODES),
            ]
        },
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "template": {
            "metadata": template["metadata"],
            "spec": {"restartPolicy": "Never", **template["spec"]},
        },
    }
    if wish.deadline_s is not None:
        body["activeDeadlineSeconds"] = wish.deadline_s
    return body


def _on_codes(job: PodJob, action: str, *codes: int) -> dict[str, Any]:
    return {
        "action": action,
        "onExitCodes": {
            "containerName": CONTAINERS[job.kind],
            "operator": "In",
            "values": list(codes),
        },
    }


# -- PyTorchJob -----------------------------------------------------------------------------------
# Only workers, all equal: a master would be one pod too many, with an init container that asks a
# public image for the master's address, and its exit would decide for all. Our agents meet over
# the board and take nothing from PET_... variables.
#
# restartPolicy ExitCode, since the agent's process says by its code what is to follow: 0 the job
# is done, 1 to 127 it has failed for good, 128 and more this pod alone is to be replaced (pod.go,
# ReconcilePods). What is replaced is never counted against backoffLimit then; agents keep the
# budget themselves.


def render_pytorchjob(
    spec: JobSpec,
    plan: Plan,
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "",
) -> Bundle:
    """Return the bundle of a PyTorchJob: manifests.yaml, job.json, job.yaml.

    Args:
        spec: the checked job.
        plan: its plan.
        run_id: name of the run; the job's name is made of it.
        run_dir: where the bundle will lie on the launcher's side, absolute.
        base_dir: folder that relative paths of the spec are relative to.
        python: the launcher's own interpreter, which no pod has: not used.

    Raises:
        UserError: HF160, HF720 to HF726.
    """
    del python
    job = pod_job(spec, plan, kind="pytorchjob", run_id=run_id, run_dir=run_dir, base_dir=base_dir)
    body = {
        "nprocPerNode": str(spec.cluster.gpus_per_node),
        "runPolicy": _run_policy(job),
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": plan.ladder.min_nodes,
            "maxReplicas": job.num_pods,
        },
        "pytorchReplicaSpecs": {
            "Worker": {
                "replicas": job.num_pods,
                "restartPolicy": "ExitCode",
                "template": pod_template(job),
            }
        },
    }
    return kubernetes_bundle(job, [job_document(job, body)])


def _run_policy(job: PodJob) -> dict[str, Any]:
    wish = job.spec.kubernetes
    policy: dict[str, Any] = {
        # With None, workers that outlive the job keep their GPUs.
        "cleanPodPolicy": "Running",
        # The operator adds up the restarts of all pods.
        "backoffLimit": job.restart_limit,
    }
    if wish.queue is not None:
        policy["suspend"] = True
    if wish.deadline_s is not None:
        policy["activeDeadlineSeconds"] = wish.deadline_s
    if wish.ttl_s is not None:
        policy["ttlSecondsAfterFinished"] = wish.ttl_s
    if wish.gang:
        policy["schedulingPolicy"] = {"minAvailable": job.plan.ladder.min_nodes}
        if wish.priority_class is not None:
            policy["schedulingPolicy"]["priorityClass"] = wish.priority_class
    return policy


# -- TrainJob -------------------------------------------------------------------------------------
# The runtime carries the JobSet above. It asks for a number of nodes and nothing
# else: the torch plugin would set PET_... for torchrun, which our agents are not. What TrainJobs
# override runtimes by has changed its name with every release, so nothing is overridden.


ANCESTOR: Final = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
"""On the Job whose number of pods is the number of nodes; its container is called node."""
FRAMEWORK: Final = {"trainer.kubeflow.org/framework": "torch"}


def render_trainjob(
    spec: JobSpec,
    plan: Plan,
    *,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "",
) -> Bundle:
    """Return the bundle of a TrainJob; arguments and errors are those of `render_pytorchjob`."""
    del python
    job = pod_job(spec, plan, kind="trainjob", run_id=run_id, run_dir=run_dir, base_dir=base_dir)
    return kubernetes_bundle(job, [_runtime(job), _job(job)])


def _runtime(job: PodJob) -> dict[str, Any]:
    head = metadata(job, job.name)
    head["labels"] = {**head["labels"], **FRAMEWORK}
    body: dict[str, Any] = {
        "mlPolicy": {"numNodes": job.num_pods},
        "template": {
            "metadata": {"labels": job.child_labels},  # the JobSet's own
            "spec": jobset_spec(job, labels=ANCESTOR),
        },
    }
    if job.spec.kubernetes.gang:
        timeout = max(1, round(job.spec.elastic.join_timeout_s))
        body["podGroupPolicy"] = {"coscheduling": {"scheduleTimeoutSeconds": timeout}}
    return {
        "apiVersion": API_VERSIONS[job.kind],
        "kind": "TrainingRuntime",
        "metadata": head,
        "spec": body,
    }


def _job(job: PodJob) -> dict[str, Any]:
    body: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",
            "name": job.name,
        }
    }
    if job.spec.kubernetes.queue is not None:
        body["suspend"] = True
    return job_document(job, body)
