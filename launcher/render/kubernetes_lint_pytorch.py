"""What the training operator 1.9 takes and then does something else with. Pure.

Sources: pkg/apis/kubeflow.org/v1, pkg/controller.v1/common/{pod,job}.go,
pkg/controller.v1/pytorch, pkg/webhooks/pytorch of kubeflow/training-operator.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, Final

from launcher.render.kubernetes_documents import Document, Found, PodSpec, number, pods_of

_RUN_POLICY: Final = ("spec", "runPolicy")
_ELASTIC: Final = ("spec", "elasticPolicy")
_ROLES: Final = ("spec", "pytorchReplicaSpecs")
KNOWN: Final = {
    ("spec",): ("elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"),
    _RUN_POLICY: (
        "activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "managedBy",
        "schedulingPolicy", "suspend", "ttlSecondsAfterFinished",
    ),
    _ELASTIC: (
        "maxReplicas", "maxRestarts", "metrics", "minReplicas", "nProcPerNode", "rdzvBackend",
        "rdzvConf", "rdzvHost", "rdzvId", "rdzvPort", "standalone",
    ),
}  # fmt: skip
"""Keys of the CRD; all else is dropped without a word, unless validation is strict."""
_BACKENDS: Final = ("c10d", "etcd", "etcd-v2")
_RESTARTS: Final = ("Always", "OnFailure", "Never", "ExitCode")
_CLEAN: Final = ("All", "Running", "None")


def pytorchjob_rules(document: Document) -> Iterator[Found]:
    """Yield the mistakes of one PyTorchJob."""
    yield from _unknown(document)
    yield from _values(document)
    yield from _replicas(document)
    yield from _rendezvous(document)
    yield from _run_policy(document)
    for pod in pods_of(document):
        yield from _exit_codes(document, pod)
        yield from _webhook(pod)


def _unknown(document: Document) -> Iterator[Found]:
    for path, known in KNOWN.items():
        for key in document.mapping(*path):
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
                message = f"the server drops what it does not know without a word; {hint}"
                yield Found("HF715", (*path, key), message)


def _values(document: Document) -> Iterator[Found]:
    def one_of(path: tuple[str | int, ...], known: tuple[str, ...]) -> Iterator[Found]:
        value = document.get(*path)
        if value is not None and value not in known:
            message = f"{value} is taken by the server and unknown to the operator; use one of "
            yield Found("HF731", path, message + ", ".join(known))

    yield from one_of((*_RUN_POLICY, "cleanPodPolicy"), _CLEAN)
    yield from one_of((*_ELASTIC, "rdzvBackend"), _BACKENDS)
    for role in document.mapping(*_ROLES):
        yield from one_of((*_ROLES, role, "restartPolicy"), _RESTARTS)
    per_pod = document.get("spec", "nprocPerNode")
    path = ("spec", "nprocPerNode")
    ours = any(pod.is_ours() for pod in pods_of(document))
    if per_pod in ("auto", "cpu", "gpu") or (per_pod is None and not ours):
        if document.get(*_ELASTIC, "nProcPerNode") is None:
            shown = "left out" if per_pod is None else per_pod
            message = f"{shown}, so WORLD_SIZE counts one worker per pod; give the number, as '8'"
            yield Found("HF718", path, message)
    elif per_pod is not None and not (isinstance(per_pod, str) and per_pod.isdigit()):
        message = f"{per_pod!r} is no number of workers in quotes, as '8'; torchrun would refuse it"
        yield Found("HF731", path, message)
    if per_pod is not None and document.get(*_ELASTIC, "nProcPerNode") is not None:
        message = "the webhook refuses it beside spec.nprocPerNode; leave this one out"
        yield Found("HF742", (*_ELASTIC, "nProcPerNode"), message)


def _replicas(document: Document) -> Iterator[Found]:
    low = number(document.get(*_ELASTIC, "minReplicas"))
    high = number(document.get(*_ELASTIC, "maxReplicas"))
    workers = _num_workers(document)
    if low is not None and high is not None and low > high:
        message = (
            f"{low} is more than maxReplicas, {high}: no number of pods is both; use {high} or less"
        )
        yield Found("HF732", (*_ELASTIC, "minReplicas"), message)
    if workers is None:
        return
    path = (*_ROLES, "Worker", "replicas")
    if high is not None and workers > high:
        message = (
            f"{workers} pods are more than maxReplicas, {high}: torchrun takes no more than that; "
            f"use {high}, or raise maxReplicas"
        )
        yield Found("HF732", path, message)
    if low is not None and workers < low:
        message = (
            f"{workers} pods are fewer than minReplicas, {low}: the rendezvous never completes; "
            f"use {low} or more, or lower minReplicas"
        )
        yield Found("HF732", path, message)


def _rendezvous(document: Document) -> Iterator[Found]:
    elastic, roles = document.mapping("spec").get("elasticPolicy"), document.mapping(*_ROLES)
    has_master = "Master" in roles
    ours = any(pod.is_ours() for pod in pods_of(document))
    if elastic is not None and has_master:
        message = (
            "the operator leaves the master out of PET_NNODES and still points the rendezvous at "
            "worker 0; use Worker replicas alone"
        )
        yield Found("HF734", (*_ROLES, "Master"), message)
    if elastic is None and not ours:
        if has_master:
            message = (
                "without one torchrun's rendezvous is static: peers of a restarted pod never come "
                "back; use an elasticPolicy, and Worker replicas alone"
            )
        else:
            message = (
                "with neither Master nor elasticPolicy no pod is told where to meet; add an "
                "elasticPolicy"
            )
        yield Found("HF735", ("spec", "elasticPolicy"), message)
    if has_master and "Worker" in roles:
        message = (
            "workers get an init container, alpine:3.10, that looks the master up; where nodes "
            "cannot pull it, nothing starts; use Worker replicas alone"
        )
        yield Found("HF158", (*_ROLES, "Master"), message)
    if document.get(*_ELASTIC, "metrics") is not None:
        message = (
            "makes an autoscaler that changes the number of pods, which tp x pp x cp do not "
            "follow; leave metrics out"
        )
        yield Found("HF739", (*_ELASTIC, "metrics"), message)
    foreign = [pod for pod in pods_of(document) if not pod.is_ours()]
    if elastic is not None and not has_master and foreign:
        message = (
            "the first worker that ends with 0 ends the job, and the others are killed while they "
            "still save; only a command that ends with 0 when all is done may run here"
        )
        yield Found("HF159", ("spec", "elasticPolicy"), message)


def _run_policy(document: Document) -> Iterator[Found]:
    policy = document.mapping(*_RUN_POLICY)
    if policy.get("cleanPodPolicy", "None") == "None":
        message = "the operator's default, None, lets workers outlive the job on their GPUs"
        way_out = "use Running"
        yield Found("HF737", (*_RUN_POLICY, "cleanPodPolicy"), f"{message}; {way_out}")
    limit, pods = number(policy.get("backoffLimit")), _num_pods(document)
    if limit is not None and limit < pods:
        message = (
            f"{limit} is compared with the restarts of all {pods} pods together: one restart of "
            f"each ends the job; use {pods} times the restarts that you allow"
        )
        yield Found("HF736", (*_RUN_POLICY, "backoffLimit"), message)
    if policy.get("suspend") is True and not document.has_queue():
        message = "nobody will start it: add the label kueue.x-k8s.io/queue-name, or leave it out"
        yield Found("HF740", (*_RUN_POLICY, "suspend"), message)
    if policy.get("activeDeadlineSeconds") is not None and document.has_queue():
        message = "starts anew after each suspension: a job that Kueue preempts has it again"
        yield Found("HF158", (*_RUN_POLICY, "activeDeadlineSeconds"), message)
    if policy.get("schedulingPolicy") is not None:
        message = (
            "is looked at only if the operator runs with --gang-scheduler-name; Kueue takes "
            "nothing from it"
        )
        yield Found("HF158", (*_RUN_POLICY, "schedulingPolicy"), message)


def _exit_codes(document: Document, pod: PodSpec) -> Iterator[Found]:
    role = pod.path[2]
    if document.get(*_ROLES, role, "restartPolicy") == "ExitCode" and not pod.is_ours():
        what = "torchrun ends with 1" if pod.is_torchrun() else "Python ends with 1"
        message = (
            f"1 to 127 end the job for good, and {what} whatever happened: a lost node is fatal; "
            "use OnFailure, or holdfast's agent, which maps its codes"
        )
        yield Found("HF733", (*_ROLES, role, "restartPolicy"), message)


def _webhook(pod: PodSpec) -> Iterator[Found]:
    document, role = pod.document, pod.path[2]
    if role not in ("Master", "Worker"):
        yield Found("HF741", pod.path[:3], f"{role} is no role; use Master and Worker")
    if pod.main.get("name") != "pytorch":
        found = pod.main.get("name") or "none"
        message = (
            f"the webhook wants a container called pytorch, found {found}: rename the one that "
            "trains"
        )
        yield Found("HF741", (*pod.path, "containers"), message)
    if not pod.main.get("image"):
        yield Found("HF741", pod.main_path, "has no image, so the webhook refuses it; name one")
    masters = document.get(*_ROLES, role, "replicas", default=1)
    if role == "Master" and masters != 1:
        message = f"{masters} masters: the webhook wants one or no Master at all; use 1"
        yield Found("HF741", (*_ROLES, role, "replicas"), message)


def _num_workers(document: Document) -> int | None:
    if "Worker" not in document.mapping(*_ROLES):
        return None
    return number(document.get(*_ROLES, "Worker", "replicas", default=1))


def _num_pods(document: Document) -> int:
    roles: dict[str, Any] = document.mapping(*_ROLES)
    return sum(number(document.get(*_ROLES, role, "replicas", default=1)) or 1 for role in roles)
