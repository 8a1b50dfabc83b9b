"""What the controllers share: one thread that calls them, owners, conditions, pods of templates."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable

from api_faults import check_quota
from api_resources import (
    CONFIGMAPS,
    EVENTS,
    LEASES,
    PODS,
    SECRETS,
    ApiError,
    Object,
    Resource,
    now,
)
from api_store import Store, owners
from pod_kubelet import tell

_EVERY_S = 0.25
"""How long nothing may happen before the clocks (deadlines, back-offs) are looked at."""
_QUIET = frozenset({CONFIGMAPS, EVENTS, LEASES, SECRETS})
"""Their changes wake no controller."""

Sync = Callable[[], None]


class Manager:
    """Calls the controllers, one after the other, whenever something has changed.

    Each looks at all objects of its kind and writes only what differs, so one call too many does
    nothing.
    """

    def __init__(
        self, store: Store, controllers: Iterable[Sync], errors: list[BaseException]
    ) -> None:
        self._store, self._controllers, self._errors = store, list(controllers), errors
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="controllers", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping = True
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._stopping:
            version = self._store.version
            for sync in self._controllers:
                try:
                    each([{}], lambda _, one=sync: one())
                except Exception as error:  # noqa: BLE001  # a thread has nobody to raise to
                    self._errors.append(error)
                    return
            self._sleep(version)

    def _sleep(self, version: int) -> None:
        """Wait for a change that matters, or for the clocks."""
        deadline = time.monotonic() + _EVERY_S
        while not self._stopping and (left_s := deadline - time.monotonic()) > 0:
            if self._store.wait(version, left_s) == version:
                return
            try:
                changes = self._store.changes_since(version)
            except ApiError:  # forgotten
                return
            if any(change.resource not in _QUIET for change in changes):
                return
            version = changes[-1].version


def each(objects: Iterable[Object], sync: Callable[[Object], None]) -> None:
    """Call `sync` with each object; who was overtaken is looked at again next time."""
    for obj in objects:
        try:
            sync(obj)
        except ApiError as error:
            if error.code not in {403, 404, 409, 422}:
                raise


def owned(store: Store, resource: Resource, owner: Object) -> list[Object]:
    """Return the objects of a kind that an object owns, not to be edited."""
    meta = owner["metadata"]
    return [o for o in store.list(resource, meta["namespace"]) if meta["uid"] in owners(o)]


def reference(owner: Object) -> Object:
    """Return the reference a controller puts into what it creates."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pod_from(template: Object, owner: Object, name: str) -> Object:
    """Return a pod of a template, to be completed and created."""
    meta = copy.deepcopy(template.get("metadata") or {})
    return {
        "metadata": {
            "name": name,
            "namespace": owner["metadata"]["namespace"],
            "labels": dict(meta.get("labels") or {}),
            "annotations": dict(meta.get("annotations") or {}),
            "ownerReferences": [reference(owner)],
        },
        "spec": copy.deepcopy(template["spec"]),
        "status": {"phase": "Pending"},
    }


def create_pod(store: Store, pod: Object, *, of: Object, by: str, reason: str) -> bool:
    """Create a pod with what the server would fill in, and tell it of its owner.

    Args:
        store: all objects.
        pod: of a template.
        of: its owner.
        by: the controller.
        reason: of the event, SuccessfulCreate or SuccessfulCreatePod.

    Returns:
        Whether there was room for it.
    """
    pod["spec"].setdefault("restartPolicy", "Always")
    pod["spec"].setdefault("terminationGracePeriodSeconds", 30)
    pod["spec"].setdefault("serviceAccountName", "default")
    try:
        check_quota(store, PODS, pod)
    except ApiError as error:
        failed = reason.replace("Successful", "Failed")
        say(store, of, failed, f"Error creating: {error}", by=by, level="Warning")
        return False
    store.create(PODS, pod)
    say(store, of, reason, f"Created pod: {pod['metadata']['name']}", by=by)
    return True


def phase(pod: Object) -> str:
    return str((pod.get("status") or {}).get("phase", "Pending"))


def is_over(pod: Object) -> bool:
    return phase(pod) in {"Succeeded", "Failed"}


def is_leaving(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def is_true(obj: Object, kind: str) -> bool:
    """Return whether a condition of a status is true."""
    rows = (obj.get("status") or {}).get("conditions") or ()
    return any(row["type"] == kind and row["status"] == "True" for row in rows)


def put_condition(
    status: Object, kind: str, reason: str, message: str, *, value: bool = True
) -> bool:
    """Put a condition into a status; return whether that changes it."""
    row = {
        "type": kind,
        "status": str(value),
        "reason": reason,
        "message": message,
        "lastTransitionTime": now(),
        "lastUpdateTime": now(),
    }
    rows = status.setdefault("conditions", [])
    for i, old in enumerate(rows):
        if old["type"] == kind:
            if (old["status"], old["reason"]) == (row["status"], reason):
                return False
            rows[i] = row
            return True
    rows.append(row)
    return True


def store_status(store: Store, resource: Resource, obj: Object, status: Object) -> None:
    """Store a status; nothing happens where it is the one there."""
    meta = obj["metadata"]

    def edit(stored: Object) -> None:
        if stored["metadata"]["uid"] == meta["uid"]:
            stored["status"] = status

    store.change(resource, meta["namespace"], meta["name"], edit)


def say(
    store: Store, obj: Object, reason: str, message: str, *, by: str, level: str = "Normal"
) -> None:
    """Tell an event of an object."""
    tell(store, obj, (level, reason, message), source=by)


def delete(
    store: Store,
    resource: Resource,
    obj: Object,
    *,
    grace_s: int | None = None,
    propagation: str = "Background",
) -> None:
    """Delete an object if it is still the same one and not leaving already."""
    if is_leaving(obj) and grace_s is None:
        return
    meta = obj["metadata"]
    try:
        store.delete(
            resource,
            meta.get("namespace", ""),
            meta["name"],
            grace_s=grace_s,
            propagation=propagation,
            uid=meta["uid"],
        )
    except ApiError as error:
        if error.code not in {404, 409}:
            raise
