"""Asks a cluster, read-only, what is judged of a job before it is submitted (`admission`).

Each question has seconds, all are asked together, and whatever cannot be had is left out: the
user may not read it, the cluster does not know it, or does not answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from launcher.platforms.kubernetes.admission import (
    CLAIM,
    STORAGE_CLASS,
    KubernetesCluster,
    Named,
    PodsRequest,
    class_of,
    fit_on,
    named,
    sample_pod,
)
from launcher.platforms.kubernetes.api import GLANCE, KubernetesApi
from launcher.platforms.kubernetes.documents import NODE, POD, Object, Resource, resource_of
from launcher.platforms.kubernetes.errors import missing_right
from launcher.platforms.kubernetes.pods import name_of
from launcher.spec.errors import PlatformError, UserError

_Answer = TypeVar("_Answer")

NODES_S: Final = 5.0
"""No further page of nodes is asked for after this."""
_QUOTA: Final = Resource("v1", "resourcequotas")
_REVIEW: Final = Resource("authorization.k8s.io/v1", "selfsubjectaccessreviews")


def look_at(api: KubernetesApi, request: PodsRequest) -> KubernetesCluster:
    """Return what the cluster says that concerns a job; nothing is raised."""
    api = api.with_patience(GLANCE)
    space = request.namespace
    wanted = named(request.bundle)
    with ThreadPoolExecutor() as pool:
        quotas = pool.submit(_known, lambda: api.list_all(_QUOTA, space)[0])
        nodes = pool.submit(_known, partial(_nodes, api, request))
        refused = pool.submit(_known, partial(_refused, api, request))
        right = pool.submit(_known, partial(_lacking, api, request))
        claims = [one for one in wanted if one.versions == (CLAIM,)]
        there = list(pool.map(lambda one: _claim(api, space, one), claims))
        lacking = pool.map(lambda one: _lacks(api, space, one), wanted)
        classes = [one for _, one in there if one is not None]
        without = pool.map(lambda one: _lacks(api, "", one), classes)
        said, no_namespace = refused.result() or ("", False)
        return KubernetesCluster(
            missing=[one for one, lacks in zip(wanted, lacking, strict=True) if lacks]
            + [one for one, lacks in zip(classes, without, strict=True) if lacks],
            claims=[found for found, _ in there if found is not None],
            quotas=quotas.result() or (),
            nodes=nodes.result(),
            no_namespace=no_namespace,
            pod_refused=said,
            lacks_right=right.result() or "",
        )


def _known(ask: Callable[[], _Answer]) -> _Answer | None:
    try:
        return ask()
    except (UserError, PlatformError):
        return None


def _lacks(api: KubernetesApi, namespace: str, wanted: Named) -> bool:
    """Whether the cluster says that it has no such object, in any version."""
    found: Sequence[bool | None] = [
        _known(partial(api.exists, each, namespace, wanted.name)) for each in wanted.versions
    ]
    return all(each is False for each in found)


def _claim(api: KubernetesApi, namespace: str, wanted: Named) -> tuple[Object | None, Named | None]:
    """Return a claim, and the storage class that it waits for."""
    found = _known(lambda: api.get(CLAIM, namespace, wanted.name))
    waits_for = class_of(found) if found else ""
    # Volumes that are there may name a class of which there is no object.
    waits = Named((STORAGE_CLASS,), waits_for, wanted.key, needed=False)
    return found, waits if waits_for else None


def _nodes(api: KubernetesApi, request: PodsRequest) -> list[Object] | None:
    """Return nodes with the labels that pods ask for: all, or as many as are room enough.

    None: there are too many to be listed in time.
    """
    labels = ",".join(f"{k}={v}" for k, v in (request.spec.get("nodeSelector") or {}).items())
    found: list[Object] = []
    end, room = time.monotonic() + NODES_S, 0
    for page in api.pages(NODE, "", labels=labels):
        found += page
        room += sum(fit_on(node, request) for node in page)
        if room >= request.bundle.num_pods:
            return found
        if time.monotonic() > end:
            return None
    return found


def _refused(api: KubernetesApi, request: PodsRequest) -> tuple[str, bool]:
    """Return what the server says to one of the pods, and if that is for want of the namespace."""
    try:
        api.create(POD, request.namespace, sample_pod(request), dry_run=True)
    except UserError as error:
        return error.message, error.code == "HF755"
    return "", False


def _lacking(api: KubernetesApi, request: PodsRequest) -> str:
    """Return the right that `submit` comes to need only once it has made something.

    All others the dry run of the documents asks for.
    """
    if len(request.bundle.documents) < 2:
        return ""
    resource = resource_of(request.bundle.documents[0])
    about = {
        "namespace": request.namespace,
        "verb": "patch",
        "group": resource.group,
        "name": name_of(request.bundle.documents[0]),  # Roles may name what they are about
    }
    review = {
        "apiVersion": _REVIEW.api,
        "kind": "SelfSubjectAccessReview",
        "metadata": {},
        "spec": {"resourceAttributes": about | {"resource": resource.plural}},
    }
    answer = api.create(_REVIEW, "", review)
    status = answer.get("status") or {}
    if status.get("allowed") is not False or status.get("evaluationError"):
        return ""
    return missing_right("patch", resource.name, request.namespace)
