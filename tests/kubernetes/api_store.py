"""What the API server stand-in remembers: objects, their versions, and the changes for watches."""

from __future__ import annotations

import copy
import datetime as dt
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from random import SystemRandom
from typing import Literal, NamedTuple

from api_resources import PODS, ApiError, Object, Resource, not_found, now

Part = Literal["all", "spec", "status"]
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class Change(NamedTuple):
    """One entry of the log that watches read."""

    version: int
    kind: str
    """ADDED, MODIFIED or DELETED."""
    resource: Resource
    old: Object | None
    new: Object


def suffix(length: int = 5) -> str:
    """Return letters as generateName appends them."""
    return "".join(SystemRandom().choices(_LETTERS, k=length))


class Store:
    """Objects by kind, namespace and name; stored ones are never edited, only replaced.

    Args:
        keep: how many changes a watch may lie behind; older ones answer 410.
    """

    def __init__(self, keep: int = 5000) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._objects: dict[Resource, dict[tuple[str, str], Object]] = {}
        self._log: deque[Change] = deque(maxlen=keep)
        self._version = self._compacted = 1000

    @property
    def version(self) -> int:
        return self._version

    # Reading

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """Return a copy that may be edited.

        Raises:
            ApiError: 404.
        """
        found = self.find(resource, namespace, name)
        if found is None:
            raise not_found(resource, name)
        return copy.deepcopy(found)

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        """Return the stored object, not to be edited; None: there is none."""
        key = (namespace if resource.namespaced else "", name)
        with self._changed:
            return self._objects.get(resource, {}).get(key)

    def list(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Return the stored objects, not to be edited; of all namespaces if none is given."""
        with self._changed:
            items = self._objects.get(resource, {}).items()
            found = [obj for (space, _), obj in items if not namespace or space == namespace]
        return sorted(found, key=lambda o: (o["metadata"].get("namespace", ""), _name(o)))

    def wait(self, version: int, timeout_s: float) -> int:
        """Wait for a change after `version`; return the newest version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > version, timeout=timeout_s)
            return self._version

    def changes_since(self, version: int) -> list[Change]:
        """Return all changes after `version`.

        Raises:
            ApiError: 410, some of them are forgotten.
        """
        with self._changed:
            if version < self._compacted:
                text = f"too old resource version: {version} ({self._compacted})"
                raise ApiError(410, text)
            found: list[Change] = []
            for change in reversed(self._log):
                if change.version <= version:
                    break
                found.append(change)
        return found[::-1]

    def compact(self) -> None:
        """Forget all changes: every older version answers 410 from now on."""
        with self._changed:
            self._version += 1
            self._compacted = self._version
            self._log.clear()
            self._changed.notify_all()

    # Writing

    def create(self, resource: Resource, obj: Object, *, dry_run: bool = False) -> Object:
        """Store a new object; return a copy with all that the server fills in.

        Raises:
            ApiError: 409, the name is taken.
        """
        obj = copy.deepcopy(obj)
        meta = obj.setdefault("metadata", {})
        if not meta.get("name") and meta.get("generateName"):
            meta["name"] = meta["generateName"][:58] + suffix()
        if resource.namespaced:
            meta.setdefault("namespace", "default")
        else:
            meta.pop("namespace", None)
        obj["apiVersion"], obj["kind"] = resource.api_version, resource.kind
        meta |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "generation": 1}
        for key in ("deletionTimestamp", "deletionGracePeriodSeconds", "resourceVersion"):
            meta.pop(key, None)
        with self._changed:
            if self.find(resource, meta.get("namespace", ""), meta["name"]) is not None:
                text = f'{resource.full_name} "{meta["name"]}" already exists'
                details = {"name": meta["name"], "group": resource.group, "kind": resource.plural}
                raise ApiError(409, text, reason="AlreadyExists", details=details)
            if not dry_run:
                self._put(resource, obj, "ADDED", None)
        return copy.deepcopy(obj)

    def replace(
        self, resource: Resource, obj: Object, *, part: Part = "all", dry_run: bool = False
    ) -> Object:
        """Replace an object, or only its status or all but its status.

        Raises:
            ApiError: 404; 409 where obj's resourceVersion or uid is not the stored one's.
        """
        meta = obj["metadata"]
        with self._changed:
            old = self.get(resource, meta.get("namespace", ""), meta["name"])
            _check_version(resource, old, meta)
            new = _merged(old, copy.deepcopy(obj), part)
            if new == old:
                return old
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            if dry_run:
                return new
            if _may_go(new):
                return self._drop(resource, new)
            self._put(resource, new, "MODIFIED", old)
            return copy.deepcopy(new)

    def change(
        self, resource: Resource, namespace: str, name: str, edit: Callable[[Object], object]
    ) -> Object | None:
        """Edit a copy and store it; None: it is gone. For controllers, whom nobody overtakes."""
        with self._changed:
            found = self.find(resource, namespace, name)
            if found is None:
                return None
            obj = copy.deepcopy(found)
            edit(obj)
            return self.replace(resource, obj)

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        grace_s: int | None = None,
        propagation: str = "Background",
        uid: str | None = None,
        dry_run: bool = False,
    ) -> Object:
        """Delete an object, or mark it as to be deleted where somebody must agree first.

        Raises:
            ApiError: 404; 409 where `uid` is not its own.
        """
        with self._changed:
            obj = self.get(resource, namespace, name)
            meta = obj["metadata"]
            if uid is not None and uid != meta["uid"]:
                text = f"Precondition failed: UID in precondition: {uid}, UID in object meta: "
                raise ApiError(409, text + str(meta["uid"]))
            if dry_run:
                return obj
            if propagation == "Orphan":
                self._orphan(meta["uid"])
            elif propagation == "Foreground" and resource != PODS and self.dependents(meta["uid"]):
                meta["finalizers"] = [*meta.get("finalizers", ()), "foregroundDeletion"]
            grace = _grace_s(resource, obj, grace_s)
            if grace == 0 and not meta.get("finalizers"):
                return self._drop(resource, obj)
            before = meta.get("deletionGracePeriodSeconds")
            if before is None or grace < before:
                end = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=grace)
                meta["deletionTimestamp"] = end.strftime("%Y-%m-%dT%H:%M:%SZ")
                meta["deletionGracePeriodSeconds"] = grace
                self._put(resource, obj, "MODIFIED", self.find(resource, namespace, name))
            return copy.deepcopy(obj)

    def dependents(self, uid: str) -> list[tuple[Resource, Object]]:
        """Return the objects owned by the one of this uid."""
        with self._changed:
            everything = [(r, o) for r, objs in self._objects.items() for o in objs.values()]
        return [(r, o) for r, o in everything if uid in owners(o)]

    def uids(self) -> set[str]:
        """Return the uids of all objects there are."""
        with self._changed:
            return {o["metadata"]["uid"] for objs in self._objects.values() for o in objs.values()}

    def everything(self) -> list[tuple[Resource, Object]]:
        """Return all objects, not to be edited."""
        with self._changed:
            return [(r, o) for r, objs in self._objects.items() for o in list(objs.values())]

    # Inside

    def _orphan(self, uid: str) -> None:
        for resource, obj in self.dependents(uid):

            def leave(o: Object) -> None:
                refs = o["metadata"]["ownerReferences"]
                o["metadata"]["ownerReferences"] = [ref for ref in refs if ref["uid"] != uid]

            self.change(resource, obj["metadata"].get("namespace", ""), _name(obj), leave)

    def _put(self, resource: Resource, obj: Object, kind: str, old: Object | None) -> None:
        self._version += 1
        obj["metadata"]["resourceVersion"] = str(self._version)
        stored = copy.deepcopy(obj)
        self._objects.setdefault(resource, {})[_key(stored)] = stored
        self._tell(Change(self._version, kind, resource, old, stored))

    def _drop(self, resource: Resource, obj: Object) -> Object:
        old = self._objects[resource].pop(_key(obj))
        self._version += 1
        last = copy.deepcopy(obj)
        last["metadata"]["resourceVersion"] = str(self._version)
        self._tell(Change(self._version, "DELETED", resource, old, last))
        return copy.deepcopy(last)

    def _tell(self, change: Change) -> None:
        if len(self._log) == self._log.maxlen:
            self._compacted = self._log[0].version
        self._log.append(change)
        self._changed.notify_all()


def owners(obj: Object) -> Iterable[str]:
    """Return the uids of an object's owners."""
    return [ref["uid"] for ref in obj["metadata"].get("ownerReferences", ())]


def _name(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def _key(obj: Object) -> tuple[str, str]:
    return (obj["metadata"].get("namespace", ""), _name(obj))


def _check_version(resource: Resource, old: Object, meta: Object) -> None:
    details = {"name": meta["name"], "group": resource.group, "kind": resource.plural}
    start = f'Operation cannot be fulfilled on {resource.full_name} "{meta["name"]}": '
    if meta.get("uid") not in {None, "", old["metadata"]["uid"]}:
        text = f"{start}Precondition failed: UID in precondition: {meta['uid']}"
        raise ApiError(409, text, details=details)
    if meta.get("resourceVersion") not in {None, "", old["metadata"]["resourceVersion"]}:
        text = (
            f"{start}the object has been modified; please apply your changes to the latest "
            "version and try again"
        )
        raise ApiError(409, text, details=details)


def _merged(old: Object, new: Object, part: Part) -> Object:
    """Return the stored object with that part of the new one; the server's own fields stay."""
    if part == "status":
        result = copy.deepcopy(old)
        result["status"] = new.get("status", {})
        return result
    if part == "spec":
        new.pop("status", None)
        if "status" in old:
            new["status"] = copy.deepcopy(old["status"])
    for key in (
        *("uid", "creationTimestamp", "generation", "namespace", "resourceVersion"),
        *("deletionTimestamp", "deletionGracePeriodSeconds"),
    ):
        if key in old["metadata"]:
            new["metadata"][key] = old["metadata"][key]
        else:
            new["metadata"].pop(key, None)
    new["apiVersion"], new["kind"] = old["apiVersion"], old["kind"]
    return new


def _may_go(obj: Object) -> bool:
    """Return whether an object waited only for its finalizers, and they are gone."""
    meta = obj["metadata"]
    marked = "deletionTimestamp" in meta and not meta.get("finalizers")
    return marked and not meta.get("deletionGracePeriodSeconds")


def _grace_s(resource: Resource, obj: Object, asked_s: int | None) -> int:
    """Return how long the kubelet has; only for pods that a node may be running."""
    if resource != PODS or "nodeName" not in obj["spec"]:
        return 0
    if obj.get("status", {}).get("phase") in {"Succeeded", "Failed"}:
        return 0
    return int(obj["spec"].get("terminationGracePeriodSeconds", 30) if asked_s is None else asked_s)
