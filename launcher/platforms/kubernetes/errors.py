"""Refusals of the API server, as errors with their fixes. Pure.

Whether to try again is a type. An answer that the caller may expect (no such object, it exists
already) has its own type.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from launcher.platforms.kubernetes.documents import Resource
from launcher.platforms.kubernetes.fields import read_object
from launcher.render.kubernetes_names import KINDS
from launcher.spec.errors import HoldfastError, PermanentError, TemporaryError, UserError

ROLE: Final = "holdfast-submitter"
"""The Role in manifests/ with the launcher's rights."""
ACCOUNTS_ROLE: Final = "holdfast-accounts"
"""The Role for runs with an account of their own."""
SECRETS_ROLE: Final = "holdfast-secrets"
"""The Role for runs whose board is a ConfigMap."""
NODES_ROLE: Final = "holdfast-nodes"
"""The ClusterRole for looking at nodes."""
OPERATOR_ROLE: Final = "holdfast-operator"
"""The ClusterRole for draining them."""
_OF_ACCOUNTS: Final = ("serviceaccounts", "roles", "rolebindings")
_OF_NODES: Final = ("pods/log", "pods/exec")
"""Calls that the server hands on to the node of a pod."""
POD_SECURITY: Final = (
    "leave kubernetes.security.non_root at its default; RDMA (kubernetes.fabric, rdma) needs a "
    "namespace that allows IPC_LOCK, as manifests/rdma does, host_path one that allows hostPath"
)
"""A user's way out of Pod Security."""
_MOST_WAIT_S: Final = 60.0
"""Limit of a server's Retry-After."""
_INSTALL: Final[dict[str, str]] = {
    "pytorchjobs": (
        "the Kubeflow Training Operator v1: kubectl apply --server-side -k "
        "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3'"
    ),
    "jobsets": (
        "JobSet: kubectl apply --server-side -f "
        "https://github.com/kubernetes-sigs/jobset/releases/download/v0.8.0/manifests.yaml"
    ),
    "trainjobs": (
        "the Kubeflow Trainer v2: kubectl apply --server-side -k "
        "'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.0.0'"
    ),
}
_RIGHT: Final = re.compile(r'User "([^"]+)" cannot (\w+) resource "([^"]+)" in API group "([^"]*)"')
_INSTALL["trainingruntimes"] = _INSTALL["trainjobs"]


class NotThereError(PermanentError):
    """The object does not exist (any more)."""


class ConflictError(PermanentError):
    """An object of that name exists already, or has changed since it was read."""


class GoneError(PermanentError):
    """The server has forgotten that state (410): list again."""


class BusyError(TemporaryError):
    """The server is busy or away; nothing was done.

    `retry_after_s`: when it wants to be asked again, if it said so.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnreachableError(BusyError):
    """The server answers, but the node of a pod does not: other pods can be asked."""


class BrokenOffError(TemporaryError):
    """The connection broke off: whether the call did its work is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the API, for messages."""

    verb: str
    """A verb of Roles: get, list, create, delete, …"""
    resource: Resource
    namespace: str
    name: str = ""
    server: str = ""
    """Its address."""

    def __str__(self) -> str:
        name = f" {self.name}" if self.name else ""
        where = f" in namespace {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource.name}{name}{where}"


def refusal(call: Call, status: int, body: str, headers: Mapping[str, str]) -> HoldfastError:
    """Return the error for an answer of the API server other than success."""
    answer = read_object(body) or {}
    message = " ".join(str(answer.get("message") or body or f"HTTP {status}").split())[:1000]
    found: HoldfastError
    match status:
        case 401:
            found = UserError(
                "HF752",
                f"the cluster at {call.server} does not accept the kubeconfig's credentials: "
                f"{message}; log in again, or use another context (kubernetes.context)",
            )
        case 403:
            found = _forbidden(call, message)
        case 404:
            found = _not_found(call, answer, message)
        case 409:
            found = ConflictError(f"cannot {call}: {message}")
        case 410:
            found = GoneError(message)
        case 400 | 413 | 422:
            found = UserError(
                "HF757",
                f"Kubernetes refuses to {call}: {message}; fix what it names in the job file's "
                "section kubernetes",
            )
        case _ if status >= 500 and call.resource.plural in _OF_NODES:
            found = UnreachableError(f"pod {call.name} does not answer: {message}")
        case _ if status == 429 or status >= 500:
            known = {key.lower(): value for key, value in headers.items()}
            found = BusyError(
                f"the Kubernetes API at {call.server} is busy or away: {message}",
                retry_after(known.get("retry-after", "")),
            )
        case _:
            found = PermanentError(f"cannot {call}: HTTP {status}: {message}")
    return found


def retry_after(text: str) -> float | None:
    """Return the seconds of a header Retry-After, if it can be read."""
    try:
        found = float(text)
    except ValueError:
        return None
    return min(found, _MOST_WAIT_S) if found >= 0 else None


def _forbidden(call: Call, message: str) -> UserError:
    if "exceeded quota" in message or "failed quota" in message:
        return UserError(
            "HF756",
            f"a quota of namespace {call.namespace} forbids it: {message}; ask for less, end other "
            "jobs, or ask an administrator (kubectl describe resourcequota --namespace "
            f"{call.namespace})",
        )
    if "being terminated" in message:
        return UserError(
            "HF755",
            f"namespace {call.namespace} is being removed; name another in kubernetes.namespace, "
            "or make it again once it is gone",
        )
    if "violates PodSecurity" in message:
        return UserError(
            "HF757",
            f"Pod Security of namespace {call.namespace} does not allow it: {message}; "
            f"{POD_SECURITY}",
        )
    if "service account" in message or re.search(r'serviceaccount "[^"]*" not found', message):
        return UserError("HF757", f"cannot {call}: {message}; fix kubernetes.service_account")
    # Of who lacks a right it says: … is forbidden: User "eve" cannot …
    if re.search(r'denied the request| is forbidden: (?!user ")', message, re.IGNORECASE):
        return UserError(
            "HF757", f"a policy of the cluster refuses to {call}: {message}; fix what it names"
        )
    match = _RIGHT.search(message)
    if match is None:
        said = missing_right(call.verb, call.resource.name, call.namespace, said=f": {message}")
    else:  # then all of it is said in our words
        who, verb, plural, group = match.groups()
        resource = f"{plural}.{group}" if group else plural
        said = missing_right(verb, resource, call.namespace, who=who, said=f", as {who}")
    return UserError("HF753", said)


def missing_right(
    verb: str, resource: str, namespace: str, *, who: str = "", said: str = ""
) -> str:
    """Return that a right is missing, and what grants it.

    An empty `namespace` is the whole cluster. `resource` is written as in names of CRDs, `verb` as
    in rules of Roles.
    """
    plain, user = resource.partition(".")[0], shlex.quote(who) if who else "YOU"
    if not namespace:  # nodes, and the pods of all namespaces
        looks = plain == "nodes" and verb in ("get", "list")
        role = NODES_ROLE if looks else OPERATOR_ROLE
        return (
            f"you may not {verb} {resource} of the cluster{said}; the ClusterRole {role} of "
            "manifests/base grants it: an administrator binds you: kubectl create "
            f"clusterrolebinding NAME --clusterrole {role} --user {user}"
        )
    role = ACCOUNTS_ROLE if plain in _OF_ACCOUNTS else SECRETS_ROLE if plain == "secrets" else ROLE
    return (
        f"you may not {verb} {resource} in namespace {namespace}{said}; the Role {role} of "
        "manifests/base grants it: an administrator applies that to the namespace once, and binds "
        f"you: kubectl create rolebinding NAME --role {role} --user {user} --namespace {namespace}"
    )


def _not_found(call: Call, answer: Mapping[str, Any], message: str) -> HoldfastError:
    details = answer.get("details")
    about = details if isinstance(details, dict) else {}
    if about.get("kind") == "namespaces" or re.search(r'namespaces? "[^"]*" not found', message):
        return UserError(
            "HF755",
            f"namespace {call.namespace} does not exist: create it with kubectl create namespace "
            f"{call.namespace}, or fix kubernetes.namespace",
        )
    if about.get("name") or not call.resource.group:
        return NotThereError(f"cannot {call}: {message}")
    plural = call.resource.plural
    if plural in _INSTALL:
        others = " or ".join(kind for kind in KINDS if _INSTALL[f"{kind}s"] != _INSTALL[plural])
        return UserError(
            "HF754",
            f"the cluster does not know {call.resource.name} ({call.resource.api}): an "
            f"administrator has to install {_INSTALL[plural]}; or submit --to {others}, where the "
            "cluster has that",
        )
    return NotThereError(f"the cluster does not know {call.resource.name}")
