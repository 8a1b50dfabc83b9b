"""(spec, plan) -> the bundle of a PyTorchJob (training operator 1.9). Pure.

Only workers, all equal: a master would be one pod too many, with an init container that asks a
public image for the master's address, and its exit would decide for all. Our agents meet over
the board and take nothing from PET_... variables.

restartPolicy ExitCode, since the agent's process says by its code what is to follow: 0 the job
is done, 1 to 127 it has failed for good, 128 and more this pod alone is to be replaced (pod.go,
ReconcilePods). What is replaced is never counted against backoffLimit then; agents keep the
budget themselves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.plan.search import Plan
from launcher.render.bundle import Bundle
from launcher.render.kubernetes_facts import PodJob, pod_job
from launcher.render.kubernetes_objects import job_document, kubernetes_bundle
from launcher.render.pod import pod_template
from launcher.spec.spec import JobSpec


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
