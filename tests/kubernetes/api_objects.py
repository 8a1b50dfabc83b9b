"""Writing objects: defaults, validation, quota, dry run, patches; tokens, reviews, evictions."""

from __future__ import annotations

from typing import Any

from api_faults import Access, check_quota
from api_request import Request
from api_resources import (
    ACCESS_REVIEWS,
    BUDGETS,
    BY_PLURAL,
    CLUSTER_RUNTIMES,
    CONFIGMAPS,
    NAMESPACE_FINALIZER,
    NAMESPACES,
    PODS,
    RUNTIMES,
    SERVICE_ACCOUNTS,
    TRAINJOBS,
    ApiError,
    Object,
    Resource,
    not_found,
    now,
)
from api_rules import check_rules
from api_select import expressions_match, json_patch, merge
from api_store import Store, suffix
from api_validate import Schemas
from api_watch import wanted

_DONE = {"kind": "Status", "apiVersion": "v1", "status": "Success"}
_TRIES = 20
"""Of a patch that names no version, when somebody is faster."""
Answer = tuple[int, Object, list[str]]
_PATCHES = {
    "application/merge-patch+json": False,
    "application/strategic-merge-patch+json": True,
    "application/apply-patch+yaml": True,
}


class Objects:
    """What reads one object and what writes."""

    def __init__(self, store: Store, access: Access) -> None:
        self._store, self._access = store, access
        self._schemas = Schemas()

    def handle(self, request: Request, body: Any, content_type: str, user: str) -> Answer:
        """Return code, body and warnings.

        Raises:
            ApiError: as a real server would answer.
        """
        if request.part in {"eviction", "token"} and request.verb == "create":
            return getattr(self, f"_{request.part}")(request, body)
        if request.resource == ACCESS_REVIEWS:
            return self._review(body, user)
        if request.verb == "get":
            return 200, self._get(request), []
        handler = {
            "create": self._create,
            "update": self._update,
            "patch": self._patch,
            "delete": self._delete,
            "deletecollection": self._delete_all,
        }[request.verb]
        if handler == self._patch:
            return self._patch(request, body, content_type)
        return handler(request, body)

    def _get(self, request: Request) -> Object:
        return self._store.get(request.resource, request.namespace, request.name)

    def _create(self, request: Request, body: Object) -> Answer:
        resource = request.resource
        obj = self._received(request, body)
        meta = obj["metadata"]
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"][:58] + suffix()
        warnings = self._checked(request, obj, None)
        if resource.namespaced:
            self._check_namespace(request.namespace)
            self._check_runtime(resource, obj)
            _default(resource, obj)
            if resource == PODS:
                self._check_account(obj)
            check_quota(self._store, resource, obj)
        if "status" in resource.parts:
            obj.pop("status", None)
        if resource == PODS:
            obj["status"] = {"phase": "Pending", "qosClass": "BestEffort"}
        made = self._store.create(resource, obj, dry_run=request.dry_run)
        if resource == NAMESPACES and not request.dry_run:
            self.furnish(made["metadata"]["name"])
        return 201, made, warnings

    def _check_account(self, pod: Object) -> None:
        meta, account = pod["metadata"], pod["spec"]["serviceAccountName"]
        if self._store.find(SERVICE_ACCOUNTS, meta["namespace"], account) is None:
            raise ApiError(
                403,
                f'pods "{meta["name"]}" is forbidden: error looking up service account '
                f'{meta["namespace"]}/{account}: serviceaccount "{account}" not found',
            )

    def furnish(self, namespace: str) -> None:
        """Put into a namespace what every one has."""

        def open_it(obj: Object) -> None:
            obj["status"] = {"phase": "Active"}
            obj["metadata"]["finalizers"] = [NAMESPACE_FINALIZER]

        self._store.change(NAMESPACES, "", namespace, open_it)
        meta = {"name": "default", "namespace": namespace}
        self._store.create(SERVICE_ACCOUNTS, {"metadata": meta})
        meta = {"name": "kube-root-ca.crt", "namespace": namespace}
        self._store.create(CONFIGMAPS, {"metadata": meta, "data": {"ca.crt": ""}})

    def _update(self, request: Request, body: Object) -> Answer:
        obj = self._received(request, body)
        old = self._get(request)
        if request.resource.is_custom and not obj["metadata"].get("resourceVersion"):
            text = f'{request.resource.full_name} "{request.name}" is invalid: '
            text += "metadata.resourceVersion: Invalid value: 0x0: must be specified for an update"
            raise ApiError(422, text)
        warnings = self._checked(request, obj, old)
        return 200, self._stored(request, obj), warnings

    def _patch(self, request: Request, body: Any, content_type: str) -> Answer:
        for _ in range(_TRIES):
            try:
                return self._patch_once(request, body, content_type)
            except ApiError as error:
                own = isinstance(body, dict) and "resourceVersion" in body.get("metadata", {})
                if error.code != 409 or own:
                    raise
        raise ApiError(409, "the object changes too often")

    def _patch_once(self, request: Request, body: Any, content_type: str) -> Answer:
        try:
            old = self._get(request)
        except ApiError:
            if content_type != "application/apply-patch+yaml":
                raise
            return self._create(request, body)
        if content_type == "application/json-patch+json":
            obj = json_patch(old, body)
        elif content_type in _PATCHES and not (
            request.resource.is_custom and content_type == "application/strategic-merge-patch+json"
        ):
            obj = merge(old, body, strategic=_PATCHES[content_type])
        else:
            text = "the body of the request was in an unknown format - accepted media types "
            raise ApiError(415, text + f"include: {', '.join(_PATCHES)}: {content_type}")
        warnings = self._checked(request, obj, old)
        return 200, self._stored(request, obj), warnings

    def _stored(self, request: Request, obj: Object) -> Object:
        part = "status" if request.part == "status" else "all"
        if part == "all" and "status" in request.resource.parts:
            part = "spec"
        return self._store.replace(request.resource, obj, part=part, dry_run=request.dry_run)

    def _delete(self, request: Request, body: Object) -> Answer:
        grace_s = request.query.number("gracePeriodSeconds")
        resource = request.resource
        deleted = self._store.delete(
            resource,
            request.namespace,
            request.name,
            grace_s=body.get("gracePeriodSeconds") if grace_s is None else grace_s,
            propagation=body.get("propagationPolicy")
            or request.query.get("propagationPolicy", "Background"),
            uid=(body.get("preconditions") or {}).get("uid"),
            dry_run=request.dry_run or "All" in body.get("dryRun", ()),
        )
        if resource != PODS and self._store.find(resource, request.namespace, request.name) is None:
            details = {"name": request.name, "group": resource.group, "kind": resource.plural}
            details["uid"] = deleted["metadata"]["uid"]
            return 200, {**_DONE, "details": details}, []
        return 200, deleted, []

    def _delete_all(self, request: Request, body: Object) -> Answer:
        for obj in self._store.list(request.resource, request.namespace):
            if wanted(request, obj):
                meta = obj["metadata"]
                one = request._replace(name=meta["name"], namespace=meta.get("namespace", ""))
                self._delete(one, body)
        return 200, dict(_DONE), []

    # Parts and reviews

    def _eviction(self, request: Request, body: Object) -> Answer:
        pod = self._get(request)
        labels = pod["metadata"].get("labels") or {}
        for budget in self._store.list(BUDGETS, request.namespace):
            spec = budget["spec"]
            if not expressions_match(spec.get("selector") or {}, labels):
                continue
            if _allowed(spec, self._fellows(budget)) < 1:
                text = "Cannot evict pod as it would violate the pod's disruption budget."
                raise ApiError(429, text, retry_after_s=10)
        condition = {
            "type": "DisruptionTarget",
            "status": "True",
            "reason": "EvictionByEvictionAPI",
            "message": "Eviction API: evicting",
            "lastTransitionTime": now(),
        }
        self._store.change(
            PODS,
            request.namespace,
            request.name,
            lambda o: o["status"].setdefault("conditions", []).append(condition),
        )
        self._delete(request, body.get("deleteOptions") or {})
        return 201, dict(_DONE), []

    def _fellows(self, budget: Object) -> list[Object]:
        selector = budget["spec"].get("selector") or {}
        return [
            pod
            for pod in self._store.list(PODS, budget["metadata"]["namespace"])
            if expressions_match(selector, pod["metadata"].get("labels") or {})
        ]

    def _token(self, request: Request, body: Object) -> Answer:
        self._get(request)
        token = self._access.token(f"system:serviceaccount:{request.namespace}:{request.name}")
        return 201, {**body, "status": {"token": token, "expirationTimestamp": now()}}, []

    def _review(self, body: Object, user: str) -> Answer:
        asked = body["spec"].get("resourceAttributes") or {}
        group, plural = asked.get("group", ""), asked.get("resource", "")
        resource = next(
            (r for (g, _, p), r in BY_PLURAL.items() if (g, p) == (group, plural)),
            Resource(group, "v1", plural, plural),
        )
        allowed = self._access.allowed(
            user,
            asked.get("verb", ""),
            resource,
            asked.get("namespace", ""),
            part=asked.get("subresource", ""),
            name=asked.get("name", ""),
        )
        return 201, {**body, "status": {"allowed": allowed}}, []

    # Checks

    def _received(self, request: Request, body: Any) -> Object:
        resource = request.resource
        if not isinstance(body, dict):
            raise ApiError(400, "json: cannot unmarshal the body into an object")
        for key, expected in (("apiVersion", resource.api_version), ("kind", resource.kind)):
            if body.get(key, expected) != expected:
                text = f"{key} in the data ({body[key]}) does not match the expected {key} "
                raise ApiError(400, f"{text}({expected})")
        obj: Object = {**body, "metadata": dict(body.get("metadata") or {})}
        meta = obj["metadata"]
        if resource.namespaced:
            if meta.get("namespace") not in {None, "", request.namespace}:
                text = "the namespace of the provided object does not match the namespace sent on "
                raise ApiError(400, text + "the request")
            meta["namespace"] = request.namespace
        if request.name and meta.setdefault("name", request.name) != request.name:
            text = f"the name of the object ({meta['name']}) does not match the name on the URL "
            raise ApiError(400, f"{text}({request.name})")
        return obj

    def _checked(self, request: Request, obj: Object, old: Object | None) -> list[str]:
        """Check fields and rules; return warnings of unknown fields, which are removed."""
        mode = request.query.get("fieldValidation", "Warn")
        warnings = self._schemas.check(request.resource, obj, mode)
        check_rules(request.resource, obj, old)
        return warnings

    def _check_runtime(self, resource: Resource, obj: Object) -> None:
        """Refuse a TrainJob without its runtime, as the trainer's webhook does."""
        if resource != TRAINJOBS:
            return
        ref = obj["spec"]["runtimeRef"]
        kind = ref.get("kind", "ClusterTrainingRuntime")
        where = RUNTIMES if kind == "TrainingRuntime" else CLUSTER_RUNTIMES
        if self._store.find(where, obj["metadata"]["namespace"], ref["name"]) is None:
            hook = "validator.trainjob.trainer.kubeflow.org"
            text = (
                f'admission webhook "{hook}" denied the request: spec.runtimeRef: Invalid value: '
            )
            text += f'{kind} "{ref["name"]}" not found: it must be created before the TrainJob'
            raise ApiError(403, text)

    def _check_namespace(self, name: str) -> None:
        space = self._store.find(NAMESPACES, "", name)
        if space is None:
            raise not_found(NAMESPACES, name)
        if "deletionTimestamp" in space["metadata"]:
            text = (
                f"unable to create new content in namespace {name} because it is being terminated"
            )
            raise ApiError(403, text)


def _allowed(spec: Object, pods: list[Object]) -> int:
    """Return how many of a budget's pods may be disrupted now."""
    healthy = sum(1 for p in pods if p.get("status", {}).get("phase") == "Running")
    if "maxUnavailable" in spec:
        return _count(spec["maxUnavailable"], len(pods)) - (len(pods) - healthy)
    return healthy - _count(spec.get("minAvailable", 0), len(pods))


def _count(value: int | str, whole: int) -> int:
    if isinstance(value, str):
        return -(-int(value.rstrip("%")) * whole // 100)
    return value


def _default(resource: Resource, obj: Object) -> None:
    """Fill in what clients read back."""
    if resource == PODS:
        spec = obj["spec"]
        spec.setdefault("restartPolicy", "Always")
        spec.setdefault("terminationGracePeriodSeconds", 30)
        spec.setdefault("serviceAccountName", "default")
        spec.setdefault("schedulerName", "default-scheduler")
        for container in spec["containers"]:
            container.setdefault("imagePullPolicy", "IfNotPresent")
