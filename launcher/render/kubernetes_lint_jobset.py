"""What JobSet and TrainJob do that a training job does not expect. Pure.

Sources: pkg/controllers/failure_policy.go and pkg/webhooks of kubernetes-sigs/jobset;
pkg/webhooks and pkg/runtime/framework/plugins of kubeflow/trainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from launcher.render.kubernetes_documents import (
    Document,
    Found,
    Path,
    as_list,
    at,
    jobset_path,
    number,
    pods_of,
    replicated_jobs,
)

ANCESTOR: Final = "trainer.kubeflow.org/trainjob-ancestor-step"
_SET_BY_TORCH: Final = re.compile(r"PET_(NNODES|NPROC_PER_NODE|NODE_RANK|MASTER_ADDR|MASTER_PORT)")
_OVERRIDES: Final = {
    "podSpecOverrides": "2.0",
    "podTemplateOverrides": "2.1",
    "runtimePatches": "2.2 and later",
}


def jobset_rules(document: Document) -> Iterator[Found]:
    """Yield the mistakes of one JobSet, or of the one in a runtime."""
    path = jobset_path(document)
    if document.kind == "JobSet" and document.get(*path, "suspend") is True:
        yield from _suspended(document, (*path, "suspend"))
    for where, job in replicated_jobs(document):
        yield from _one_lost_pod(document, where, job)
        if "Runtime" in document.kind:
            yield from _ancestor(where, job)
    yield from _names(document)
    if "Runtime" in document.kind:
        yield from _torch_policy(document)


def trainjob_rules(document: Document) -> Iterator[Found]:
    """Yield the mistakes of one TrainJob."""
    if document.get("spec", "suspend") is True:
        yield from _suspended(document, ("spec", "suspend"))
    for index, row in enumerate(as_list(document.get("spec", "trainer", "env"))):
        name = at(row, ("name",), "")
        if _SET_BY_TORCH.fullmatch(str(name)):
            message = f"{name} is set by the trainer, which refuses it here; leave it out"
            yield Found("HF748", ("spec", "trainer", "env", index), message)
    for key, version in _OVERRIDES.items():
        if key in document.mapping("spec"):
            message = f"exists in trainer {version} alone; look at the installed CRD"
            yield Found("HF158", ("spec", key), message)


def _suspended(document: Document, path: Path) -> Iterator[Found]:
    if not document.has_queue():
        message = "nobody will start it: add the label kueue.x-k8s.io/queue-name, or leave it out"
        yield Found("HF740", path, message)


def _one_lost_pod(document: Document, path: Path, job: dict[str, Any]) -> Iterator[Found]:
    """Yield what makes one failed pod the failure of its Job, and that a restart of all pods."""
    spec: Path = (*path, "template", "spec")
    body = document.mapping(*spec)
    if _is_initializer(job):
        return
    pods = number(body.get("parallelism")) or number(body.get("completions")) or 1
    numbers = document.get("spec", "mlPolicy", "numNodes")
    pods = max(pods, number(numbers) or 1)
    if pods < 2:
        return
    limit = number(body.get("backoffLimit"))
    if limit is None and body.get("backoffLimitPerIndex") is not None:
        limit = 2**31 - 1
    restarts = document.get(*jobset_path(document), "failurePolicy", "maxRestarts", default=0)
    then = "and JobSet recreates all" if restarts else "and with it the JobSet"
    if (6 if limit is None else limit) < pods:
        shown = "the default, 6," if limit is None else str(limit)
        message = (
            f"{shown} failed pods of {pods} fail the Job, {then}; use 2147483647 and let "
            "podFailurePolicy say what is final"
        )
        yield Found("HF744", (*spec, "backoffLimit"), message)
    rules = as_list(at(body, ("podFailurePolicy", "rules")))
    ignored = any(
        at(rule, ("action",)) == "Ignore" and as_list(at(rule, ("onPodConditions",)))
        for rule in rules
    )
    if not ignored:
        message = (
            "a drained or preempted pod counts as failed: add a rule with action Ignore for the "
            "pod condition DisruptionTarget"
        )
        yield Found("HF744", (*spec, "podFailurePolicy"), message)
    if rules and at(body, ("template", "spec", "restartPolicy")) != "Never":
        message = (
            "podFailurePolicy is taken only with Never, JobSet's default is OnFailure: use Never"
        )
        yield Found("HF744", (*spec, "template", "spec", "restartPolicy"), message)
    codes = [rule for rule in rules if at(rule, ("onExitCodes",)) is not None]
    for pod in pods_of(document):
        if codes and pod.path[: len(path)] == path and pod.is_torchrun():
            message = (
                "torchrun ends with 1 whatever happened, so a rule on exit codes tells nothing: "
                "leave it out, or use holdfast's agent, which maps its codes"
            )
            yield Found("HF733", (*spec, "podFailurePolicy"), message)


def _ancestor(path: Path, job: dict[str, Any]) -> Iterator[Found]:
    if at(job, ("template", "metadata", "labels", ANCESTOR)) != "trainer":
        return
    containers = as_list(at(job, ("template", "spec", "template", "spec", "containers")))
    if not any(at(each, ("name",)) == "node" for each in containers):
        found = ", ".join(str(at(each, ("name",))) for each in containers) or "none"
        message = (
            "the webhook wants a container called node in the step labelled trainer, found "
            f"{found}: rename the one that trains"
        )
        yield Found("HF741", (*path, "template", "spec", "template", "spec", "containers"), message)


def _names(document: Document) -> Iterator[Found]:
    """Yield a JobSet whose pods' names would be too long: they are checked when it is made."""
    if document.kind != "JobSet":
        return
    for path, job in replicated_jobs(document):
        body = document.mapping(*path, "template", "spec")
        last_job = (number(job.get("replicas")) or 1) - 1
        last_pod = (number(body.get("completions")) or number(body.get("parallelism")) or 1) - 1
        pod = f"{document.name}-{job.get('name', '')}-{last_job}-{last_pod}-abcde"
        if len(pod) > 63:
            message = (
                f"its pods' names would have {len(pod)} characters, as {pod}; 63 are taken: "
                f"shorten it by {len(pod) - 63}"
            )
            yield Found("HF745", ("metadata", "name"), message)


def _torch_policy(document: Document) -> Iterator[Found]:
    has_torch = document.mapping("spec", "mlPolicy").get("torch") is not None
    for pod in pods_of(document):
        names = [name for name in pod.variables() if _SET_BY_TORCH.fullmatch(name)]
        if has_torch and names:
            message = f"{', '.join(names)} are set by the torch policy; leave them out"
            yield Found("HF748", (*pod.main_path, "env"), message)
        if has_torch and pod.is_ours():
            message = "sets PET_... for torchrun, which this agent is not; use numNodes alone"
            yield Found("HF748", ("spec", "mlPolicy", "torch"), message)


def _is_initializer(job: dict[str, Any]) -> bool:
    step = at(job, ("template", "metadata", "labels", ANCESTOR))
    return step in ("dataset-initializer", "model-initializer")
