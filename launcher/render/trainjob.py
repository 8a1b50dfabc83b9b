"""(spec, plan) -> the bundle of a TrainJob, with the TrainingRuntime it refers to. Pure.

The runtime carries the JobSet of `render/jobset.py`. It asks for a number of nodes and nothing
else: the torch plugin would set PET_... for torchrun, which our agents are not. What TrainJobs
override runtimes by has changed its name with every release, so nothing is overridden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from launcher.plan.search import Plan
from launcher.render.bundle import Bundle
from launcher.render.jobset import jobset_spec
from launcher.render.kubernetes_facts import PodJob, pod_job
from launcher.render.kubernetes_names import API_VERSIONS
from launcher.render.kubernetes_objects import job_document, kubernetes_bundle, metadata
from launcher.spec.spec import JobSpec

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
