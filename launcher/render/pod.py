"""The pod of an agent, one for each node; the same under every kind of job. Pure.

What a pod is given, and may rely on:

command      [PYTHON, -P, -m, launcher.node, pod, RUN_DIR], as PID 1, without a shell
preStop      [PYTHON, -P, -m, launcher.node, save, RUN_DIR]: ask for a save and wait for it
RUN_DIR      the run directory on the claim; made by the pod where `submit` has not been
/etc/holdfast/job.json   as rendered, read-only: copied to RUN_DIR should that have none
/dev/shm     of `kubernetes.shm`; /tmp is an empty folder where the root is read-only

POD_NAME POD_IP POD_UID NODE_NAME          who and where it is (downward API)
HOLDFAST_KIND          pytorchjob, jobset or trainjob: which exit codes its controller wants
HOLDFAST_JOB           name of the job, its label holdfast.dev/run
HOLDFAST_ATTEMPT       number of the submission, by its label holdfast.dev/attempt
HOLDFAST_BOARD         kubernetes://NAMESPACE/NAME of a ConfigMap, if the board is one
HOLDFAST_SECRET_FILE   with a board in a ConfigMap: what all agents of the run know, and nobody else
HOLDFAST_SAVE_WAIT_S   how long preStop may wait
HOLDFAST_FAILURE_DOMAIN  of `elastic.failure_domain`: the pod's label of that name
HOLDFAST_SHUTDOWN_S    from SIGTERM until workers are killed

and `env.variables`, `env.secrets` and what the network needs, as on Slurm. Kubernetes replaces
$(NAME) in commands and variables, so every $ in them is doubled; hooks are not looked into.
"""

from __future__ import annotations

from typing import Any, Final

from elastic_trainer.plan.config import NO_DOMAIN
from launcher.render.fabric import fabric_variables
from launcher.render.kubernetes_facts import TMP, PodJob, own_tmp
from launcher.render.kubernetes_names import (
    ATTEMPT_LABEL,
    CLAIM_VOLUME,
    CONFIG_DIR,
    CONFIG_VOLUME,
    CONTAINERS,
    RUN_LABEL,
    SECRET_DIR,
    SECRET_KEY,
    SECRET_VOLUME,
    SHM_VOLUME,
    TMP_VOLUME,
    WITHOUT_MESH,
    board_url,
    config_map_name,
    own_account,
    secret_name,
)
from launcher.spec.kubernetes import Kubernetes, Toleration, cpu_count
from launcher.spec.pod_patch import patched

Object = dict[str, Any]
METRICS_PORT: Final = "metrics"
"""Name of the port, as in manifests/monitoring/agents.yaml."""
HOSTNAME: Final = "kubernetes.io/hostname"
SHM: Final = "/dev/shm"  # noqa: S108  the pod's own
_LAST: Final = ("initContainers", "containers", "volumes")
"""Fields of a pod that people write last."""
_NODE: Final = ("-P", "-m", "launcher.node")
OF_POD: Final = (
    ("POD_NAME", "metadata.name"),
    ("POD_IP", "status.podIP"),
    ("POD_UID", "metadata.uid"),
    ("NODE_NAME", "spec.nodeName"),
)
"""Variables of every pod -> the field they have the value of."""


def pod_template(job: PodJob) -> Object:
    """Return metadata and spec of the pods."""
    return {"metadata": _metadata(job), "spec": _spec(job)}


def escape(text: str) -> str:
    """Return a text that Kubernetes leaves as it is where it replaces $(NAME).

    Two $ are one there, and nothing else begins a replacement (third_party/forked/golang/
    expansion/expand.go).
    """
    return text.replace("$", "$$")


def node_command(job: PodJob, verb: str) -> list[str]:
    """Return the words that run `launcher.node VERB RUN_DIR` in a pod."""
    return [job.python, *_NODE, verb, job.run_dir]


def _metadata(job: PodJob) -> Object:
    wish = job.spec.kubernetes
    near: dict[str, str] = {}
    if wish.topology is not None and wish.queue is not None:
        how = "required" if wish.topology.required else "preferred"
        label = wish.topology.required or wish.topology.preferred
        near = {f"kueue.x-k8s.io/podset-{how}-topology": str(label)}
    return {
        "labels": {**WITHOUT_MESH["labels"], **job.labels},
        "annotations": {
            **WITHOUT_MESH["annotations"],
            **wish.annotations,
            # A pod that is moved costs the others a recovery.
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
            "karpenter.sh/do-not-disrupt": "true",
            **near,
        },
    }


def _spec(job: PodJob) -> Object:
    wish = job.spec.kubernetes
    found = patched(_rendered_spec(job), wish.pod_patch, container=CONTAINERS[job.kind])
    if wish.exclude:
        affinity = found.get("affinity", {})
        kept_off = without_nodes(affinity.get("nodeAffinity"), wish.exclude)
        found["affinity"] = {**affinity, "nodeAffinity": kept_off}
    last: Object = {name: found.pop(name) for name in _LAST if name in found}
    return {**found, **last}


def _rendered_spec(job: PodJob) -> Object:
    wish = job.spec.kubernetes
    account = wish.service_account or (own_account(job.name) if job.registers else None)
    return given(
        serviceAccountName=account,
        # No rights in pods that need none.
        automountServiceAccountToken=bool(job.registers),
        enableServiceLinks=False,
        schedulerName=wish.scheduler,
        priorityClassName=wish.priority_class,
        nodeSelector=dict(wish.node_selector) or None,
        tolerations=_tolerations(job),
        affinity=_affinity(job),
        imagePullSecrets=[{"name": name} for name in wish.image_pull_secrets] or None,
        securityContext=_pod_security(wish),
        terminationGracePeriodSeconds=job.clock.grace_s,
        containers=[_container(job)],
        volumes=_volumes(job),
    )


def _container(job: PodJob) -> Object:
    wish = job.spec.kubernetes
    resources = _resources(job)
    return given(
        name=CONTAINERS[job.kind],
        image=job.image,
        imagePullPolicy=wish.image_pull_policy,
        command=[escape(word) for word in node_command(job, "pod")],
        env=_environment(job),
        ports=_ports(job),
        resources={"requests": resources, "limits": resources} if resources else None,
        volumeMounts=_mounts(job),
        securityContext=_container_security(wish),
        lifecycle={"preStop": {"exec": {"command": node_command(job, "save")}}},
        # What the agent said last, for `kubectl describe`.
        terminationMessagePolicy="FallbackToLogsOnError",
    )


def _ports(job: PodJob) -> list[Object] | None:
    """Return what a PodMonitor finds by its name; agents find each other without."""
    port = job.spec.network.metrics_port
    return None if port is None else [{"name": METRICS_PORT, "containerPort": port}]


def _environment(job: PodJob) -> list[Object]:
    spec, wish = job.spec, job.spec.kubernetes
    domain = spec.elastic.failure_domain
    fields = [
        *OF_POD,
        ("HOLDFAST_ATTEMPT", label_path(ATTEMPT_LABEL)),
    ]
    if domain not in (None, NO_DOMAIN):
        # The pod's own label: pods may not read nodes. See docs/kubernetes.md for who copies it.
        fields.append(("HOLDFAST_FAILURE_DOMAIN", label_path(domain)))
    found: list[Object] = [
        *(from_field(name, path) for name, path in fields),
        {"name": "HOLDFAST_KIND", "value": job.kind},
        {"name": "HOLDFAST_JOB", "value": job.name},
        *(
            [
                {"name": "HOLDFAST_BOARD", "value": board_url(wish.namespace, job.name)},
                {"name": "HOLDFAST_SECRET_FILE", "value": f"{SECRET_DIR}/{SECRET_KEY}"},
            ]
            if wish.board == "kubernetes"
            else ()
        ),
        {"name": "HOLDFAST_SAVE_WAIT_S", "value": str(job.clock.save_wait_s)},
        {"name": "HOLDFAST_SHUTDOWN_S", "value": str(job.clock.shutdown_s)},
    ]
    values = {"PYTHONUNBUFFERED": "1"}
    if wish.security.run_as_user is not None or wish.security.read_only_root:
        values["HOME"] = TMP  # a bare user id has no home
    if job.venv is not None:
        values["VIRTUAL_ENV"] = job.venv
    cpus = None if wish.cpus is None else int(cpu_count(wish.cpus))
    values |= {each.name: each.value for each in fabric_variables(spec, wish, cpus)}
    values |= spec.env.variables
    found += [{"name": name, "value": escape(value)} for name, value in values.items()]
    for name, secret in spec.env.secrets.items():
        assert secret.kubernetes is not None, "pod_job has checked it"
        where, _, key = secret.kubernetes.partition("/")
        found.append({"name": name, "valueFrom": {"secretKeyRef": {"name": where, "key": key}}})
    return found


def from_field(name: str, path: str) -> Object:
    """Return a variable that the kubelet fills in with a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def label_path(key: str) -> str:
    """Return the path of a label of the pod itself; empty where it has none."""
    return f"metadata.labels['{key}']"


def _resources(job: PodJob) -> dict[str, str]:
    """Return requests and limits, which are the same: such pods are the last to be evicted."""
    spec, wish = job.spec, job.spec.kubernetes
    gpus = str(spec.cluster.gpus_per_node) if spec.device == "cuda" else None
    found = given(**{"cpu": wish.cpus, "memory": wish.memory, wish.gpu_resource: gpus})
    return found | {name: str(count) for name, count in wish.rdma.items()}


def _tolerations(job: PodJob) -> list[Object] | None:
    wish = job.spec.kubernetes
    found = [_toleration(each) for each in wish.tolerations]
    if job.spec.device == "cuda":
        gpus = {"key": wish.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}
        found += [gpus] if gpus not in found else []
    return found or None


def _toleration(wish: Toleration) -> Object:
    return given(
        key=wish.key,
        operator=wish.operator or ("Equal" if wish.value is not None else "Exists"),
        value=wish.value,
        effect=wish.effect,
        tolerationSeconds=wish.seconds,
    )


def _affinity(job: PodJob) -> Object | None:
    near = job.spec.kubernetes.topology
    if near is None or job.spec.kubernetes.queue is not None:  # Kueue has an annotation for it
        return None
    term = {
        "labelSelector": {"matchLabels": {RUN_LABEL: job.name}},
        "topologyKey": near.required or near.preferred,
    }
    if near.required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    soft = {"weight": 100, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [soft]}}


def without_nodes(affinity: Object | None, hosts: tuple[str, ...]) -> Object:
    """Return a node affinity that keeps pods off `hosts`, besides what `affinity` wants.

    Terms are alternatives, so each gets the condition.
    """
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = affinity or {}
    terms = (affinity.get(required) or {}).get("nodeSelectorTerms") or [{}]
    wanted = []
    for term in terms:
        others, listed = [], set(hosts)
        for each in term.get("matchExpressions", ()):
            if (each["key"], each["operator"]) == (HOSTNAME, "NotIn"):
                listed |= set(each.get("values", ()))
            else:
                others.append(each)
        off = {"key": HOSTNAME, "operator": "NotIn", "values": sorted(listed)}
        wanted.append({**term, "matchExpressions": [*others, off]})
    return {**affinity, required: {"nodeSelectorTerms": wanted}}


def _pod_security(wish: Kubernetes) -> Object:
    asked = wish.security
    return given(
        runAsNonRoot=asked.is_restricted or None,
        runAsUser=asked.run_as_user,
        runAsGroup=asked.run_as_group,
        supplementalGroups=list(asked.supplemental_groups) or None,
        fsGroup=asked.fs_group,
        fsGroupChangePolicy=None if asked.fs_group is None else asked.fs_group_change_policy,
        seccompProfile={"type": "RuntimeDefault"},
    )


def _container_security(wish: Kubernetes) -> Object:
    """Return the container's rights: RDMA registers memory, so it may lock it."""
    asked = wish.security
    locks = wish.fabric != "none" or bool(wish.rdma)
    capabilities = given(
        drop=["ALL"] if asked.is_restricted else None, add=["IPC_LOCK"] if locks else None
    )
    return given(
        allowPrivilegeEscalation=False,
        readOnlyRootFilesystem=asked.read_only_root or None,
        capabilities=capabilities or None,
    )


def _volumes(job: PodJob) -> list[Object]:
    wish = job.spec.kubernetes
    found: list[Object] = [
        {"name": CONFIG_VOLUME, "configMap": {"name": config_map_name(job.name)}},
        {"name": SHM_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
        {"name": CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": wish.claim}},
    ]
    if wish.board == "kubernetes":
        source = {"secretName": secret_name(job.name), "defaultMode": _secret_mode(wish)}
        found.append({"name": SECRET_VOLUME, "secret": source})
    if own_tmp(wish):
        found.append({"name": TMP_VOLUME, "emptyDir": {}})
    for name, volume in wish.volumes.items():
        if volume.claim is not None:
            claim = given(claimName=volume.claim, readOnly=volume.read_only or None)
            source = {"persistentVolumeClaim": claim}
        else:
            source = {"hostPath": {"path": volume.host_path}}
        found.append({"name": name, **source})
    return found


def _secret_mode(wish: Kubernetes) -> int:
    """Return the mode of the mounted secret, which root owns: another user could not read 0400.

    With an `fs_group` the kubelet lets the group read.
    """
    of_root = wish.security.run_as_user == 0 or wish.security.fs_group is not None
    return 0o400 if of_root else 0o444


def _mounts(job: PodJob) -> list[Object]:
    wish = job.spec.kubernetes
    found: list[Object] = [
        {"name": CONFIG_VOLUME, "mountPath": CONFIG_DIR, "readOnly": True},
        {"name": SHM_VOLUME, "mountPath": SHM},
        {"name": CLAIM_VOLUME, "mountPath": wish.mount},
    ]
    if wish.board == "kubernetes":
        found.append({"name": SECRET_VOLUME, "mountPath": SECRET_DIR, "readOnly": True})
    if own_tmp(wish):
        found.append({"name": TMP_VOLUME, "mountPath": TMP})
    for name, volume in wish.volumes.items():
        found.append(given(name=name, mountPath=volume.mount, readOnly=volume.read_only or None))
    return found


def given(**fields: Any) -> Object:
    """Return the fields that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
