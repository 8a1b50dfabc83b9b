"""(spec, plan) -> the bundle of a JobSet, PyTorchJob (training operator 1.9) or TrainJob. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from launcher.plan.planning import Plan
from launcher.render.kubernetes_facts import PodJob, pod_job
from launcher.render.kubernetes_names import (
    API_VERSIONS,
    CONTAINERS,
    KINDS,
    QUEUE_LABEL,
    REPLICATED_JOB,
    RUN_LABEL,
    SECRET_KEY,
    board_name,
    config_map_name,
    own_account,
    secret_name,
)
from launcher.render.kubernetes_yaml import to_yaml
from launcher.render.local import MANIFESTS, Bundle, render_local, to_train_config
from launcher.render.pod import Object, given, pod_template
from launcher.spec.errors import UserError
from launcher.spec.spec import JobSpec

FINAL_CODES: Final = (93, 94)
"""Exit codes of an agent whose job has ended for good."""
AGAIN: Final = 143
"""Exit code of a pod that asks to be replaced: `launcher/node/decide.py:AGAIN`."""
NEVER_RAN_CODES: Final = (1, 2, 126, 127)
"""Python's or a shell's that finds no program to run; our pods end with none of them."""
_MAX_CONFIG_BYTES: Final = 1 << 20
"""The API server's limit of a ConfigMap (and etcd's behind it)."""
_KEEP: Final = {"holdfast.dev/keep": "true"}
"""Annotation of the board, which has the commits of checkpoints, and of the account of the agents,
which commit until they have ended: these outlive the job."""


def render_kubernetes(
    spec: JobSpec,
    plan: Plan,
    *,
    kind: str,
    run_id: str,
    run_dir: str | Path,
    base_dir: str | Path,
    python: str = "",
) -> Bundle:
    """Return manifests.yaml, job.json and job.yaml.

    Args:
        spec: the checked job.
        plan: its plan.
        kind: pytorchjob, jobset or trainjob.
        run_id: name of the run; the job's name is made of it.
        run_dir: run directory on the launcher's side, absolute.
        base_dir: folder that relative paths of the spec are relative to.
        python: the launcher's own interpreter, which no pod has: not used.

    Raises:
        UserError: HF160, HF720 to HF727.
    """
    del python
    job = pod_job(spec, plan, kind=kind, run_id=run_id, run_dir=run_dir, base_dir=base_dir)
    # Paths in job.json are those that pods see.
    files = render_local(
        spec, plan, run_id=run_id, run_dir=job.run_dir, base_dir=base_dir, fleet=job.fleet
    )
    documents = [
        _config_map(job, files["job.json"]),
        *_register_objects(job),
        *([_disruption_budget(job)] if job.num_pods > 1 else ()),
        *_DOCUMENTS[kind](job),
    ]
    return {MANIFESTS: to_yaml(documents, head=_head(job)), **files}


def check_pods(
    spec: JobSpec, plan: Plan, *, kind: str, run_id: str, run_dir: str | Path, base_dir: str | Path
) -> None:
    """Check what `render_kubernetes` would refuse, without the manifests.

    Raises:
        UserError: HF160, HF720 to HF727.
    """
    job = pod_job(spec, plan, kind=kind, run_id=run_id, run_dir=run_dir, base_dir=base_dir)
    config = to_train_config(
        spec, plan, run_id=run_id, run_dir=job.run_dir, base_dir=base_dir, fleet=job.fleet
    )
    _config_map(job, config.to_json())


def _head(job: PodJob) -> str:
    spares = job.spec.cluster.spares
    besides = f" and {counted(spares, 'spare')}" if spares else ""
    head = (
        f"Holdfast run of {job.spec.name}: {counted(job.plan.ladder.max_nodes, 'node')}{besides}.\n"
        "To change it, change the job file and render again.\n"
        f"When a pod must go: {job.clock}."
    )
    if job.kind == "trainjob":
        head += "\nA server's dry run of the TrainJob wants its runtime first."
    if job.spec.kubernetes.board == "kubernetes":
        head += (
            "\n`holdfast submit` makes the agents' secret. Without it, before: openssl rand -hex 32"
            f" |\nkubectl create secret generic {secret_name(job.name)} --namespace "
            f"{job.spec.kubernetes.namespace} --from-file={SECRET_KEY}=/dev/stdin"
        )
    return head


def _metadata(job: PodJob, name: str, annotations: dict[str, str] | None = None) -> Object:
    namespace = job.spec.kubernetes.namespace
    return given(name=name, namespace=namespace, labels=job.labels, annotations=annotations)


def _document(api_version: str, kind: str, metadata: Object, **fields: Any) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def _job_document(job: PodJob, body: Object) -> Object:
    """Return the job itself; `body` says in the place of its kind that its queue starts it."""
    head, queue = _metadata(job, job.name, job.annotations), job.spec.kubernetes.queue
    if queue is not None:
        head["labels"] = {**head["labels"], QUEUE_LABEL: queue}
    return _document(API_VERSIONS[job.kind], KINDS[job.kind], head, spec=body)


def _config_map(job: PodJob, job_json: str) -> Object:
    """Return the ConfigMap with job.json; one that cannot change is not watched by every node.

    Raises:
        UserError: HF726, it is too long.
    """
    size = len(job_json.encode())
    if size > _MAX_CONFIG_BYTES - 4096:
        raise UserError(
            "HF726",
            f"job.json has {size:,} bytes, a ConfigMap takes 1 MiB: raise elastic.min_nodes, so "
            "that there are fewer fallback layouts",
        )
    head = _metadata(job, config_map_name(job.name))
    return _document("v1", "ConfigMap", head, immutable=True, data={"job.json": job_json})


def _register_objects(job: PodJob) -> list[Object]:
    """Return the ConfigMap that is the board, and the right to write it and the fleet's ledger.

    The board is made here, empty, so that agents need no right to create any: a right to create
    cannot name what is created. The ledger is there already: it is not this run's.
    """
    if not job.registers:
        return []
    wish, name, group = job.spec.kubernetes, own_account(job.name), "rbac.authorization.k8s.io"
    head, version = _metadata(job, name, _KEEP), f"{group}/v1"
    board = _document("v1", "ConfigMap", _metadata(job, board_name(job.name), _KEEP))
    rule = {
        "apiGroups": [""],
        "resources": ["configmaps"],
        "resourceNames": list(job.registers),
        "verbs": ["get", "update"],
    }
    role = {"apiGroup": group, "kind": "Role", "name": name}
    subject = {
        "kind": "ServiceAccount",
        "name": wish.service_account or name,
        "namespace": wish.namespace,
    }
    return [
        *([board] if wish.board == "kubernetes" else ()),
        *([_document("v1", "ServiceAccount", head)] if wish.service_account is None else ()),
        _document(version, "Role", head, rules=[rule]),
        _document(version, "RoleBinding", head, roleRef=role, subjects=[subject]),
    ]


def _disruption_budget(job: PodJob) -> Object:
    """Return the PodDisruptionBudget: drains may take pods down to the smallest layout, or one.

    Each leaves after its save. Were all but one to stay, `kubectl drain` of a second node would
    wait for the first one's successor, for which there may be no room. A whole number of pods that
    stay: for pods of other controllers than the built-in ones nothing else is allowed (disruption
    controller, getExpectedPodCount).
    """
    budget = {
        "minAvailable": min(job.plan.ladder.min_nodes, job.num_pods - 1),
        "selector": {"matchLabels": {RUN_LABEL: job.name}},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return _document("policy/v1", "PodDisruptionBudget", _metadata(job, job.name), spec=budget)


# -- PyTorchJob -----------------------------------------------------------------------------------
# Only workers, all equal: a master would be one pod too many, with an init container that asks a
# public image for the master's address, and its exit would decide for all. Our agents meet over
# the board and take nothing from PET_... variables.
#
# restartPolicy ExitCode, since the agent's process says by its code what is to follow: 0 the job
# is done, 1 to 127 it has failed for good, 128 and more this pod alone is to be replaced (pod.go,
# ReconcilePods). What is replaced is never counted against backoffLimit then; agents keep the
# budget themselves.


def _pytorchjob(job: PodJob) -> list[Object]:
    wish, ladder = job.spec.kubernetes, job.plan.ladder
    gang = given(minAvailable=ladder.min_nodes, priorityClass=wish.priority_class)
    body = {
        "nprocPerNode": str(job.spec.cluster.gpus_per_node),
        "runPolicy": given(
            # With None, workers that outlive the job keep their GPUs.
            cleanPodPolicy="Running",
            # The operator adds up the restarts of all pods.
            backoffLimit=job.restart_limit,
            suspend=_suspended(job),
            activeDeadlineSeconds=wish.deadline_s,
            ttlSecondsAfterFinished=wish.ttl_s,
            schedulingPolicy=gang if wish.gang else None,
        ),
        "elasticPolicy": {
            "rdzvBackend": "c10d",
            "minReplicas": ladder.min_nodes,
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
    return [_job_document(job, body)]


def _suspended(job: PodJob) -> bool | None:
    return None if job.spec.kubernetes.queue is None else True


# -- JobSet ---------------------------------------------------------------------------------------
# A JobSet has one Indexed Job, an index for each node. By itself it answers one failed pod by
# deleting all of them, and with them every snapshot in memory. Here the Job replaces each failed
# pod alone, and an agent that says "never again" (93, 94) fails it. A pod whose node goes, or that
# keeps count of its failures itself (143), is not charged; one that never ran our code gives its
# index up at once, any other after `restart_limit`. A Job without an index left has failed, and its
# JobSet with it. Its successPolicy ends it with the first agent that says "done", so pods still
# waiting for a node hold nothing up.


def _jobset(job: PodJob) -> list[Object]:
    return [_job_document(job, given(**_jobset_spec(job), suspend=_suspended(job)))]


def _jobset_spec(job: PodJob, *, labels: dict[str, str] | None = None) -> Object:
    return given(
        failurePolicy={"maxRestarts": 0},
        replicatedJobs=[
            {
                "name": REPLICATED_JOB,
                "template": {
                    "metadata": {"labels": {**job.child_labels, **(labels or {})}},
                    "spec": _indexed_job(job),
                },
            }
        ],
        ttlSecondsAfterFinished=job.spec.kubernetes.ttl_s,
    )


def _indexed_job(job: PodJob) -> Object:
    template = pod_template(job)
    return given(
        **indexed_job(CONTAINERS[job.kind], limit=job.restart_limit, num_pods=job.num_pods),
        successPolicy={"rules": [{"succeededCount": 1}]},
        completions=job.num_pods,
        parallelism=job.num_pods,
        template={**template, "spec": {"restartPolicy": "Never", **template["spec"]}},
        activeDeadlineSeconds=job.spec.kubernetes.deadline_s,
    )


def indexed_job(container: str, *, limit: int, num_pods: int) -> Object:
    """Return what has a Job replace each failed pod of agents alone; see above.

    `container` is the agent's, `limit` how many failures of all pods are charged.
    """
    rules = [
        _on_codes(container, "FailJob", *FINAL_CODES),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        _on_codes(container, "Ignore", AGAIN),
        _on_codes(container, "FailIndex", *NEVER_RAN_CODES),
    ]
    return {
        "completionMode": "Indexed",
        "backoffLimit": limit,
        # By index, or the delay before a pod is replaced would grow with every other's failures.
        "backoffLimitPerIndex": math.ceil(limit / num_pods),
        "podFailurePolicy": {"rules": rules},
    }


def _on_codes(container: str, action: str, *codes: int) -> Object:
    return {
        "action": action,
        "onExitCodes": {"containerName": container, "operator": "In", "values": list(codes)},
    }


# -- TrainJob -------------------------------------------------------------------------------------
# The runtime carries the JobSet above. It asks for a number of nodes and nothing else: the torch
# plugin would set PET_... for torchrun, which our agents are not. What TrainJobs override runtimes
# by has changed its name with every release, so nothing is overridden.


def _trainjob(job: PodJob) -> list[Object]:
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    body = given(runtimeRef=reference, suspend=_suspended(job))
    head = _metadata(job, job.name)
    head["labels"] = {**head["labels"], "trainer.kubeflow.org/framework": "torch"}
    # On the Job whose number of pods is the number of nodes; its container is called node.
    ancestor = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template: Object = {
        "mlPolicy": {"numNodes": job.num_pods},
        "template": {
            "metadata": {"labels": job.child_labels},  # the JobSet's own
            "spec": _jobset_spec(job, labels=ancestor),
        },
    }
    if job.spec.kubernetes.gang:
        timeout = max(1, round(job.spec.elastic.join_timeout_s))
        template["podGroupPolicy"] = {"coscheduling": {"scheduleTimeoutSeconds": timeout}}
    runtime = _document(API_VERSIONS[job.kind], "TrainingRuntime", head, spec=template)
    return [runtime, _job_document(job, body)]


_DOCUMENTS: Final[dict[str, Callable[[PodJob], list[Object]]]] = {
    "pytorchjob": _pytorchjob,
    "jobset": _jobset,
    "trainjob": _trainjob,
}
"""Kind -> its own documents, the job itself last."""
