"""What a job on Kubernetes needs besides itself, and the bundle of all of it. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.quantities import counted
from launcher.plan.search import Plan
from launcher.render.kubernetes_facts import PodJob, pod_job
from launcher.render.kubernetes_names import (
    API_VERSIONS,
    KINDS,
    QUEUE_LABEL,
    RUN_LABEL,
    SECRET_KEY,
    board_name,
    config_map_name,
    own_account,
    secret_name,
)
from launcher.render.kubernetes_yaml import to_yaml
from launcher.render.local import MANIFESTS, Bundle, render_local, to_train_config
from launcher.spec.errors import UserError
from launcher.spec.spec import JobSpec

Object = dict[str, Any]
MAX_CONFIG_BYTES: Final = 1 << 20
"""Of a ConfigMap, by the API server (and etcd's limit behind it)."""
KEEP_ANNOTATION: Final = "holdfast.dev/keep"
"""On the board, which has the commits of checkpoints, and on the account of the agents, which
commit until they have ended: these outlive the job."""


def kubernetes_bundle(job: PodJob, documents: list[Object]) -> Bundle:
    """Return manifests.yaml, job.json and job.yaml.

    Args:
        job: the job.
        documents: its own, the job itself last.

    Raises:
        UserError: HF726, job.json is too long for a ConfigMap.
    """
    # Paths in job.json are those that pods see.
    files = render_local(
        job.spec,
        job.plan,
        run_id=job.run_id,
        run_dir=job.run_dir,
        base_dir=job.base_dir,
        fleet=job.fleet,
    )
    before = [config_map(job, files["job.json"]), *register_objects(job), *disruption_budget(job)]
    spares = job.spec.cluster.spares
    besides = f" and {counted(spares, 'spare')}" if spares else ""
    head = (
        f"Holdfast run of {job.spec.name}: {counted(job.plan.ladder.max_nodes, 'node')}{besides}.\n"
        "To change it, change the job file and render again.\n"
        f"When a pod must go: {job.clock}."
    )
    if job.spec.kubernetes.board == "kubernetes":
        head += (
            "\n`holdfast submit` makes the agents' secret. Without it, before: openssl rand -hex 32"
            f" |\nkubectl create secret generic {secret_name(job.name)} --namespace "
            f"{job.spec.kubernetes.namespace} --from-file={SECRET_KEY}=/dev/stdin"
        )
    return {MANIFESTS: to_yaml([*before, *documents], head=head), **files}


def check_pods(
    spec: JobSpec, plan: Plan, *, kind: str, run_id: str, run_dir: str | Path, base_dir: str | Path
) -> None:
    """Check what the renderer of `kind` would refuse, without the manifests.

    Raises:
        UserError: HF160, HF720 to HF726.
    """
    job = pod_job(spec, plan, kind=kind, run_id=run_id, run_dir=run_dir, base_dir=base_dir)
    config = to_train_config(
        spec, plan, run_id=run_id, run_dir=job.run_dir, base_dir=base_dir, fleet=job.fleet
    )
    config_map(job, config.to_json())


def metadata(job: PodJob, name: str, **annotations: str) -> Object:
    """Return the metadata of one object."""
    head = {"name": name, "namespace": job.spec.kubernetes.namespace, "labels": job.labels}
    return {**head, "annotations": annotations} if annotations else head


def job_document(job: PodJob, body: Object) -> Object:
    """Return the job itself, for its queue if it has one.

    Args:
        job: the job.
        body: its spec; a kind says in its own place that a queue starts it.
    """
    head, queue = metadata(job, job.name, **job.annotations), job.spec.kubernetes.queue
    if queue is not None:
        head["labels"] = {**head["labels"], QUEUE_LABEL: queue}
    return {
        "apiVersion": API_VERSIONS[job.kind],
        "kind": KINDS[job.kind],
        "metadata": head,
        "spec": body,
    }


def config_map(job: PodJob, job_json: str) -> Object:
    """Return the ConfigMap with job.json; one that cannot change is not watched by every node.

    Raises:
        UserError: HF726, it is too long.
    """
    size = len(job_json.encode())
    if size > MAX_CONFIG_BYTES - 4096:
        raise UserError(
            "HF726",
            f"job.json has {size:,} bytes, a ConfigMap takes 1 MiB: raise elastic.min_nodes, so "
            "that there are fewer fallback layouts",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, config_map_name(job.name)),
        "immutable": True,
        "data": {"job.json": job_json},
    }


def register_objects(job: PodJob) -> list[Object]:
    """Return the ConfigMap that is the board, and the right to write it and the fleet's ledger.

    The board is made here, empty, so that agents need no right to create any: a right to create
    cannot name what is created. The ledger is there already: it is not this run's.
    """
    wish = job.spec.kubernetes
    if not job.registers:
        return []
    kept = {KEEP_ANNOTATION: "true"}
    board = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, board_name(job.name), **kept),
    }
    name, group = own_account(job.name), "rbac.authorization.k8s.io"
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job, name, **kept),
    }
    subject = {
        "kind": "ServiceAccount",
        "name": wish.service_account or name,
        "namespace": wish.namespace,
    }
    return [
        *([board] if wish.board == "kubernetes" else ()),
        *([account] if wish.service_account is None else ()),
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": metadata(job, name, **kept),
            "rules": [
                {
                    "apiGroups": [""],
                    "resources": ["configmaps"],
                    "resourceNames": list(job.registers),
                    "verbs": ["get", "update"],
                }
            ],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(job, name, **kept),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [subject],
        },
    ]


def disruption_budget(job: PodJob) -> list[Object]:
    """Return the PodDisruptionBudget: drains may take pods down to the smallest layout, or one.

    Each leaves after its save. Were all but one to stay, `kubectl drain` of a second node would
    wait for the first one's successor, for which there may be no room. A whole number of pods that
    stay: for pods of other controllers than the built-in ones nothing else is allowed (disruption
    controller, getExpectedPodCount).
    """
    if job.num_pods < 2:
        return []
    return [
        {
            "apiVersion": "policy/v1",
            "kind": "PodDisruptionBudget",
            "metadata": metadata(job, job.name),
            "spec": {
                "minAvailable": min(job.plan.ladder.min_nodes, job.num_pods - 1),
                "selector": {"matchLabels": {RUN_LABEL: job.name}},
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            },
        }
    ]
