"""What keeps a cluster from running a job whose documents it takes.

The server's dry run of a job's documents sees neither its pods nor the objects they name. `look_at`
asks the cluster, `problems` judges the answers; unknown facts are not judged.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from itertools import compress
from typing import Any, Final, NamedTuple, TypeVar

from elastic_trainer.plan.ladder import Ladder
from launcher.platforms.kubernetes.api import GLANCE, KubernetesApi
from launcher.platforms.kubernetes.documents import (
    CONFIG_MAP,
    NODE,
    POD,
    SECRET,
    Bundle,
    Object,
    Resource,
    resource_of,
)
from launcher.platforms.kubernetes.errors import missing_right
from launcher.platforms.kubernetes.pods import label_of, name_of
from launcher.render.kubernetes_names import CLAIM_VOLUME, QUEUE_LABEL, SECRET_VOLUME
from launcher.spec.errors import PlatformError, Problem, UserError, Where

CLAIM: Final = Resource("v1", "persistentvolumeclaims")
STORAGE_CLASS: Final = Resource("storage.k8s.io/v1", "storageclasses")
QUEUES: Final = tuple(
    Resource(f"kueue.x-k8s.io/{version}", "localqueues") for version in ("v1beta2", "v1beta1")
)
_SECRETS: Final = (SECRET,)
_CONFIG_MAPS: Final = (CONFIG_MAP,)
_KEYS: Final = {
    "cpu": "kubernetes.cpus",
    "memory": "kubernetes.memory",
    "pods": "cluster.nodes",
}
"""Resource of pods -> key of the job file; of any other: cluster.gpus_per_node."""
_MOST: Final = Decimal(2**63 - 1)
"""Kubernetes' own limit of amounts."""
_OWN_WORDS: Final = (
    (r"no PriorityClass with name", "kubernetes.priority_class"),
    (r'RuntimeClass "[^"]*" not found', "kubernetes.pod_patch"),
    # A namespace that was just made has its own account a moment later.
    (r'serviceaccount "(?!default")[^"]*" not found', "kubernetes.service_account"),
    (r"violates PodSecurity", "kubernetes.security"),
    (r"(maximum|minimum) [\w./-]+ usage per |limit to request ratio per ", "kubernetes.memory"),
    (r"failed quota: ", "kubernetes.cpus"),
    (r"Pod \"[^\"]*\" is invalid: ", "kubernetes.pod_patch"),
)
"""Words of Kubernetes' own admission, whoever makes a pod -> key of the job file."""


class Named(NamedTuple):
    """An object that the pods name."""

    versions: tuple[Resource, ...]
    """That may have it."""
    name: str
    key: str
    """Key of the job file that names it."""
    needed: bool = True
    """Pods do not start without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesCluster:
    """A cluster's answers; unknown ones are empty."""

    missing: Sequence[Named] = ()
    """Objects of `named` that it lacks."""
    claims: Sequence[Object] = ()
    """Existing claims that the pods mount."""
    quotas: Sequence[Object] = ()
    nodes: Sequence[Object] | None = None
    """Nodes with the labels that pods ask for; None: unknown."""
    no_namespace: bool = False
    """The namespace is missing, with everything in it."""
    pod_refused: str = ""
    """The server's answer to one of the pods; empty: it takes it, or has not said."""
    lacks_right: str = ""
    """What the user may not do and `submit` must, with the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsRequest:
    """A job's request to a cluster."""

    bundle: Bundle
    least: int
    """Pods of its smallest layout."""
    namespace: str
    resources: Mapping[str, Decimal] = field(default_factory=dict)
    """A pod's least need, in the names of nodes' resources."""

    @property
    def spec(self) -> Object:
        """The spec of its pods."""
        spec: Object = self.bundle.template["spec"]
        return spec


def request_of(bundle: Bundle, job_json: str, namespace: str) -> PodsRequest:
    """Return the request of a bundle; the ladder of `job_json` says how many pods suffice."""
    try:
        least = Ladder.from_ranges(json.loads(job_json)["ladder"]).min_nodes
    except (KeyError, TypeError, ValueError):
        least = 1
    found: dict[str, Decimal] = {"pods": Decimal(1)}
    for container in bundle.template["spec"]["containers"]:
        asked = container.get("resources") or {}
        for name, text in ((asked.get("limits") or {}) | (asked.get("requests") or {})).items():
            found[name] = found.get(name, Decimal()) + quantity(text)
    return PodsRequest(bundle=bundle, least=least, namespace=namespace, resources=found)


def quantity(value: object) -> Decimal:
    """Return the number that 250m, 1800Gi or 8 means; 0 for anything else."""
    from kubernetes.utils.quantity import parse_quantity

    try:
        found: Decimal = parse_quantity(str(value))
    except ValueError:
        return Decimal()
    return max(-_MOST, min(found, _MOST)) if found.is_finite() else Decimal()


def named(bundle: Bundle) -> list[Named]:
    """Return the objects that the pods name and that no document makes, once each."""
    made = {name_of(document) for document in bundle.documents}
    spec = bundle.template["spec"]
    found = [
        Named(_SECRETS, str(one.get("name")), "kubernetes.image_pull_secrets", needed=False)
        for one in spec.get("imagePullSecrets") or ()
    ]
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        sources = [one.get("valueFrom") or {} for one in container.get("env") or ()]
        for source in (*sources, *(container.get("envFrom") or ())):
            for field_name, resource, key in (
                ("secretKeyRef", _SECRETS, "env.secrets"),
                ("secretRef", _SECRETS, "kubernetes.pod_patch"),
                ("configMapKeyRef", _CONFIG_MAPS, "kubernetes.pod_patch"),
                ("configMapRef", _CONFIG_MAPS, "kubernetes.pod_patch"),
            ):
                if (ref := source.get(field_name)) and not ref.get("optional"):
                    found.append(Named(resource, str(ref.get("name")), key))
    for volume in spec.get("volumes") or ():
        own = volume.get("name") == CLAIM_VOLUME
        claim, secret = volume.get("persistentVolumeClaim"), volume.get("secret")
        if claim:
            key = "kubernetes.claim" if own else "kubernetes.volumes"
            found.append(Named((CLAIM,), str(claim.get("claimName")), key))
        if secret and volume.get("name") != SECRET_VOLUME and not secret.get("optional"):
            found.append(Named(_SECRETS, str(secret.get("secretName")), "kubernetes.pod_patch"))
    if queue := label_of(bundle.job, QUEUE_LABEL):
        found.append(Named(QUEUES, queue, "kubernetes.queue"))
    return [each for each in dict.fromkeys(found) if each.name not in made]


def class_of(claim: Mapping[str, Any]) -> str:
    """Return the storage class that a claim waits for, if any."""
    spec = claim.get("spec") or {}
    waits = (claim.get("status") or {}).get("phase") == "Pending" and not spec.get("volumeName")
    return str(spec.get("storageClassName") or "") if waits else ""


def sample_pod(request: PodsRequest) -> Object:
    """Return one of the pods, for the server's dry run."""
    template, spec = request.bundle.template, dict(request.spec)
    if any(one["kind"] == "ServiceAccount" for one in request.bundle.documents):
        spec.pop("serviceAccountName", None)  # not made yet
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{request.bundle.name}-sample",
            "namespace": request.namespace,
            **{key: template["metadata"].get(key) or {} for key in ("labels", "annotations")},
        },
        "spec": {"restartPolicy": "Never", **spec},
    }


def problems(request: PodsRequest, cluster: KubernetesCluster) -> list[Problem]:
    """Return what keeps the job from running; what it only waits for, as warnings.

    HF753 a right, HF755 the namespace, HF756 a quota, HF757 the server's answer to a pod, HF760 a
    missing object.
    """
    if cluster.no_namespace:
        return [_problem("HF755", "kubernetes.namespace", cluster.pod_refused)]
    return [
        *([_problem("HF753", "", cluster.lacks_right)] if cluster.lacks_right else ()),
        *_missing(request, cluster),
        *_claims(request, cluster),
        *_refused(cluster),
        *_quotas(request, cluster),
        *_nodes(request, cluster),
    ]


def _problem(code: str, key: str, message: str) -> Problem:
    return Problem(code, Where(key=key), message)


def _missing(request: PodsRequest, cluster: KubernetesCluster) -> Iterator[Problem]:
    for each in cluster.missing:
        resource = each.versions[0]
        where = "" if resource == STORAGE_CLASS else f" in namespace {request.namespace}"
        message = f"{resource.name}/{each.name} does not exist{where}; create it, or fix the name"
        yield _problem("HF760" if each.needed else "HF184", each.key, message)


def _claims(request: PodsRequest, cluster: KubernetesCluster) -> Iterator[Problem]:
    """Yield claims that pods on several nodes cannot mount together."""
    for claim in cluster.claims:
        modes = (claim.get("spec") or {}).get("accessModes") or ()
        if request.bundle.num_pods > 1 and modes and not {*modes} & _SHARED:
            message = (
                f"claim {name_of(claim)} is {', '.join(modes)}: the {request.bundle.num_pods:,} "
                "pods start only if all are on one node; use one that is ReadWriteMany"
            )
            yield _problem("HF185", "kubernetes.claim", message)


_SHARED: Final = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def _refused(cluster: KubernetesCluster) -> Iterator[Problem]:
    """Yield the server's refusal of a pod.

    Its own admission says the same to controllers. Webhooks and policies may not: they may look at
    who makes a pod.
    """
    said = cluster.pod_refused
    for pattern, key in _OWN_WORDS:
        if re.search(pattern, said):
            message = f"no pod of the job can be made: {said}"
            yield _problem("HF757", key, message)
            return
    if "denied" in said:
        message = f"a policy of the cluster may refuse the job's pods: {said}"
        yield _problem("HF183", "kubernetes", message)


def _quotas(request: PodsRequest, cluster: KubernetesCluster) -> Iterator[Problem]:
    """Yield quotas with too little room: first their limit, then what is left."""
    wanted = request.bundle.num_pods
    for quota in cluster.quotas:
        spec = quota.get("spec") or {}
        if not _applies(spec, request.spec):
            continue
        used = (quota.get("status") or {}).get("used") or {}
        for name, text in (spec.get("hard") or {}).items():
            each = _charged(request, name)
            if not each:
                continue
            hard = quantity(text)
            allowed, left = hard // each, max(Decimal(), hard - quantity(used.get(name, 0))) // each
            if min(allowed, left) >= wanted:
                continue
            message = (
                f"quota {name_of(quota)} of namespace {request.namespace} allows {name}={text}, "
                f"{used.get(name, 0)} used; {wanted:,} pods of {_shown(each)} ask for "
                f"{_shown(each * wanted)}"
            )
            code, fix = "HF181", f"{left:,f} of them start until others end"
            if allowed < request.least:
                code, fix = "HF756", "ask for less, or ask an administrator"
            elif allowed < wanted:
                fix = f"no more than {allowed:,f} of them ever start"
            yield _problem(code, _key(name), f"{message}; {fix}")


def _charged(request: PodsRequest, name: str) -> Decimal:
    """Return a pod's share of a quota's resource; 0: nothing, or unknown."""
    if name.startswith("limits."):
        limit = name.removeprefix("limits.")
        asked = (one.get("resources") or {} for one in request.spec["containers"])
        return sum((quantity((one.get("limits") or {}).get(limit, 0)) for one in asked), Decimal())
    plain = name.removeprefix("requests.").removeprefix("count/")
    return request.resources.get(plain, Decimal())


def _applies(spec: Mapping[str, Any], pod: Mapping[str, Any]) -> bool:
    """Return whether a quota is surely about such pods."""
    rows = [{"scopeName": name, "operator": "Exists"} for name in spec.get("scopes") or ()]
    rows += (spec.get("scopeSelector") or {}).get("matchExpressions") or ()
    timed = pod.get("activeDeadlineSeconds") is not None
    priority = pod.get("priorityClassName")

    def one(row: Mapping[str, Any]) -> bool:
        match row.get("scopeName"), row.get("operator"):
            case "Terminating", _:
                return timed
            case "NotTerminating", _:
                return not timed
            case "PriorityClass", "In":
                return priority in (row.get("values") or ())
            case "PriorityClass", "Exists":
                return priority is not None
        return False

    return all(map(one, rows))


def _nodes(request: PodsRequest, cluster: KubernetesCluster) -> Iterator[Problem]:
    """Yield that the nodes, were they empty, have too little room."""
    wanted = request.bundle.num_pods
    if cluster.nodes is None:
        return
    room = sum(fit_on(node, request) for node in cluster.nodes)
    if room < wanted:
        asked = ", ".join(f"{name} {_shown(n)}" for name, n in request.resources.items())
        message = (
            f"the cluster's nodes have room for {room:,} of {wanted:,} pods ({asked}), even "
            f"if nothing else runs: {len(cluster.nodes):,} nodes have the labels they ask for; "
            "ask for less, unless the cluster adds nodes on demand"
        )
        yield _problem("HF182", "cluster.nodes", message)


def fit_on(node: Mapping[str, Any], request: PodsRequest) -> int:
    """Return how many of the pods an empty node holds, by its taints and resources."""
    tolerated = request.spec.get("tolerations") or ()
    for taint in (node.get("spec") or {}).get("taints") or ():
        # Of these Kubernetes takes its own away: a node that is ill or cordoned.
        lasts = not str(taint.get("key", "")).startswith("node.kubernetes.io/")
        keeps_off = taint.get("effect") in {"NoSchedule", "NoExecute"} and lasts
        if keeps_off and not any(_tolerates(one, taint) for one in tolerated):
            return 0
    there = (node.get("status") or {}).get("allocatable") or {}
    return int(
        min(
            quantity(there.get(name, 0)) // each for name, each in request.resources.items() if each
        )
    )


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if any(toleration.get(name) not in {None, "", taint.get(name)} for name in ("effect", "key")):
        return False
    exists = toleration.get("operator") == "Exists"
    return exists or (toleration.get("value") or "") == (taint.get("value") or "")


def _key(name: str) -> str:
    plain = name.rpartition(".")[2] if "/" not in name else name
    return _KEYS.get(plain.removeprefix("count/"), "cluster.gpus_per_node")


def _shown(number: Decimal) -> str:
    """Return a number of bytes as Kubernetes writes it, any other unchanged."""
    for unit, size in (("Gi", 2**30), ("Mi", 2**20)):
        if number >= size and number % size == 0:
            return f"{int(number) // size}{unit}"
    return f"{number.normalize():f}"


# -- Asking the cluster, read-only and for seconds -------------------------------------------------
# All questions are asked together. Unknown answers are left out: the user may not read it, the
# cluster does not know it, or does not answer.


_Answer = TypeVar("_Answer")

NODES_S: Final = 5.0
"""No further page of nodes is asked for after this."""
_QUOTA: Final = Resource("v1", "resourcequotas")
_REVIEW: Final = Resource("authorization.k8s.io/v1", "selfsubjectaccessreviews")


def look_at(api: KubernetesApi, request: PodsRequest) -> KubernetesCluster:
    """Return the cluster's facts that concern a job; nothing is raised."""
    api = api.with_patience(GLANCE)
    space = request.namespace
    wanted = named(request.bundle)
    with ThreadPoolExecutor() as pool:
        quotas = pool.submit(_known, lambda: api.list_all(_QUOTA, space)[0])
        nodes = pool.submit(_known, partial(_list_nodes, api, request))
        refused = pool.submit(_known, partial(_try_pod, api, request))
        right = pool.submit(_known, partial(_lacking, api, request))
        claims = [one for one in wanted if one.versions == (CLAIM,)]
        there = list(pool.map(partial(_look_at_claim, api, space), claims))
        lacking = pool.map(partial(_lacks, api, space), wanted)
        classes = [one for _, one in there if one is not None]
        without = pool.map(partial(_lacks, api, ""), classes)
        said, no_namespace = refused.result() or ("", False)
        return KubernetesCluster(
            missing=[*compress(wanted, lacking), *compress(classes, without)],
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
    """Return whether the cluster says that it has no such object, in any version."""
    return all(
        _known(partial(api.exists, each, namespace, wanted.name)) is False
        for each in wanted.versions
    )


def _look_at_claim(
    api: KubernetesApi, namespace: str, wanted: Named
) -> tuple[Object | None, Named | None]:
    """Return a claim, and the storage class that it waits for."""
    found = _known(lambda: api.get(CLAIM, namespace, wanted.name))
    waits_for = class_of(found) if found else ""
    # Existing volumes may name a class without an object.
    waits = Named((STORAGE_CLASS,), waits_for, wanted.key, needed=False)
    return found, waits if waits_for else None


def _list_nodes(api: KubernetesApi, request: PodsRequest) -> list[Object] | None:
    """Return nodes with the labels that pods ask for: all, or as many as suffice.

    None: they are too many to be listed in time.
    """
    labels = ",".join(f"{k}={v}" for k, v in (request.spec.get("nodeSelector") or {}).items())
    found: list[Object] = []
    end, room = time.monotonic() + NODES_S, 0
    for page in api.pages(NODE, "", labels=labels):
        nodes = page.get("items") or ()
        found += nodes
        room += sum(fit_on(node, request) for node in nodes)
        if room >= request.bundle.num_pods:
            return found
        if time.monotonic() > end:
            return None
    return found


def _try_pod(api: KubernetesApi, request: PodsRequest) -> tuple[str, bool]:
    """Return the server's answer to one of the pods, and whether the namespace is missing."""
    try:
        api.create(POD, request.namespace, sample_pod(request), dry_run=True)
    except UserError as error:
        return error.message, error.code == "HF755"
    return "", False


def _lacking(api: KubernetesApi, request: PodsRequest) -> str:
    """Return the right that `submit` needs only once it has made something, if missing.

    The dry run of the documents asks for all others.
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
