"""(spec, plan) -> the bundle of a JobSet: one Indexed Job, an index for each node. Pure.

JobSet by itself answers one failed pod by deleting all of them, and with them every snapshot in
memory. Here the Job replaces each failed pod alone, and an agent that says "never again" (93, 94)
fails it. A pod whose node goes, or that keeps count of its failures itself (143), is not charged;
one that never ran our code gives its index up at once, any other after `restart_limit`. A Job
without an index left has failed, and its JobSet with it. Its successPolicy ends it with the first
agent that says "done", so pods still waiting for a node hold nothing up.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

from launcher.plan.search import Plan
from launcher.render.bundle import Bundle
from launcher.render.kubernetes_facts import PodJob, pod_job
from launcher.render.kubernetes_names import CONTAINERS, REPLICATED_JOB
from launcher.render.kubernetes_objects import job_document, kubernetes_bundle
from launcher.render.pod import pod_template
from launcher.spec.spec import JobSpec

FINAL_CODES: Final = (93, 94)
"""Of an agent whose job has ended for good."""
AGAIN: Final = 143
"""Of a pod that asks to be replaced: `launcher/node/pod_decide.py:AGAIN`."""
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
