"""The kinds the API server stand-in knows, its answers to discovery, and its errors."""

from __future__ import annotations

import datetime as dt
from typing import Any, NamedTuple

Object = dict[str, Any]

_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    409: "Conflict",
    410: "Expired",
    415: "UnsupportedMediaType",
    422: "Invalid",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


class ApiError(Exception):
    """An answer that is no success, as the server words it."""

    def __init__(
        self,
        code: int,
        message: str,
        *,
        reason: str = "",
        details: Object | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason or _REASONS.get(code, "Unknown")
        self.details = details
        self.retry_after_s = retry_after_s

    def status(self) -> Object:
        """Return the body of the answer."""
        body: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "code": self.code,
        }
        if self.details or self.retry_after_s is not None:
            body["details"] = dict(self.details or {})
            if self.retry_after_s is not None:
                body["details"]["retryAfterSeconds"] = self.retry_after_s
        return body


class Resource(NamedTuple):
    """One kind and how it is reached."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    parts: tuple[str, ...] = ()
    """Subresources."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def full_name(self) -> str:
        """As messages name it: pods, pytorchjobs.kubeflow.org."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def is_custom(self) -> bool:
        return self.group in _CUSTOM_GROUPS


_CUSTOM_GROUPS = frozenset(
    {"kubeflow.org", "jobset.x-k8s.io", "trainer.kubeflow.org", "kueue.x-k8s.io"}
)
_RBAC = "rbac.authorization.k8s.io"

NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False, parts=("status",))
NODES = Resource("", "v1", "nodes", "Node", namespaced=False, parts=("status",))
PODS = Resource("", "v1", "pods", "Pod", parts=("status", "log", "exec", "eviction", "binding"))
CONFIGMAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICES = Resource("", "v1", "services", "Service", parts=("status",))
EVENTS = Resource("", "v1", "events", "Event")
CLAIMS = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim", parts=("status",))
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount", parts=("token",))
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", parts=("status",))
JOBS = Resource("batch", "v1", "jobs", "Job", parts=("status",))
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", parts=("status",))
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
PRIORITIES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False
)
ROLES = Resource(_RBAC, "v1", "roles", "Role")
ROLE_BINDINGS = Resource(_RBAC, "v1", "rolebindings", "RoleBinding")
CLUSTER_ROLES = Resource(_RBAC, "v1", "clusterroles", "ClusterRole", namespaced=False)
CLUSTER_ROLE_BINDINGS = Resource(
    _RBAC, "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io",
    "v1",
    "selfsubjectaccessreviews",
    "SelfSubjectAccessReview",
    namespaced=False,
)
DEFINITIONS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
    parts=("status",),
)
PYTORCHJOBS = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob", parts=("status",))
JOBSETS = Resource("jobset.x-k8s.io", "v1alpha2", "jobsets", "JobSet", parts=("status",))
TRAINJOBS = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob", parts=("status",))
RUNTIMES = Resource("trainer.kubeflow.org", "v1alpha1", "trainingruntimes", "TrainingRuntime")
CLUSTER_RUNTIMES = Resource(
    "trainer.kubeflow.org",
    "v1alpha1",
    "clustertrainingruntimes",
    "ClusterTrainingRuntime",
    namespaced=False,
)
LOCAL_QUEUES = Resource("kueue.x-k8s.io", "v1beta2", "localqueues", "LocalQueue", parts=("status",))
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads", "Workload", parts=("status",))

RESOURCES = tuple(value for value in list(globals().values()) if isinstance(value, Resource))
BY_PLURAL = {(r.group, r.version, r.plural): r for r in RESOURCES}
BY_KIND = {(r.api_version, r.kind): r for r in RESOURCES}
NAMESPACE_FINALIZER = "stand-in/namespace"
"""Holds a namespace until it is empty."""
SHORT_NAMES = {
    "namespaces": "ns",
    "nodes": "no",
    "pods": "po",
    "configmaps": "cm",
    "services": "svc",
    "events": "ev",
    "persistentvolumeclaims": "pvc",
    "serviceaccounts": "sa",
    "resourcequotas": "quota",
    "poddisruptionbudgets": "pdb",
    "priorityclasses": "pc",
    "customresourcedefinitions": "crd",
}
VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


def now() -> str:
    """Return the time as the API writes it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """Return the time as events and logs write it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def seconds_since(text: str) -> float:
    """Return how long ago a time of the API was."""
    then = dt.datetime.fromisoformat(text)
    return (dt.datetime.now(dt.UTC) - then).total_seconds()


def not_found(resource: Resource, name: str) -> ApiError:
    details = {"name": name, "group": resource.group, "kind": resource.plural}
    return ApiError(404, f'{resource.full_name} "{name}" not found', details=details)


def resource_list(group: str, version: str, known: tuple[Resource, ...]) -> Object:
    """Return the answer to GET /apis/GROUP/VERSION."""
    entries = []
    for resource in known:
        if (resource.group, resource.version) != (group, version):
            continue
        entry = {
            "name": resource.plural,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": list(VERBS),
        }
        parts = [{**entry, "name": f"{resource.plural}/{part}"} for part in resource.parts]
        if short := SHORT_NAMES.get(resource.plural):
            entry["shortNames"] = [short]
        entries += [entry, *parts]
    name = f"{group}/{version}" if group else version
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": name,
        "resources": entries,
    }


def group_list(known: tuple[Resource, ...]) -> Object:
    """Return the answer to GET /apis."""
    groups = {r.group: r.version for r in known if r.group}
    entries = [group_entry(group, version) for group, version in groups.items()]
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": entries}


def group_entry(group: str, version: str) -> Object:
    """Return the answer to GET /apis/GROUP."""
    preferred = {"groupVersion": f"{group}/{version}", "version": version}
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": group,
        "versions": [preferred],
        "preferredVersion": preferred,
    }
