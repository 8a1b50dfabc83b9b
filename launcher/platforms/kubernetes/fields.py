"""Which fields of the API's objects are read, and of which type: others need not be thought of.

Pure. A field of another type counts as one that is missing, which any may be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from elastic_trainer.storage.files import skipped
from launcher.platforms.kubernetes.documents import Object

_TEXTS: Final = {...: str}
_AMOUNTS: Final = {...: (str, int)}
_CONDITIONS: Final = [
    {"type": str, "status": str, "reason": str, "message": str, "lastTransitionTime": str}
]
_STATE: Final = {
    "waiting": {"reason": str, "message": str},
    "running": {"startedAt": str},
    "terminated": {"exitCode": int, "reason": str, "message": str, "finishedAt": str},
}
_CONTAINERS: Final = [{"name": str, "restartCount": int, "state": _STATE, "lastState": _STATE}]
_SHAPE: Final[dict[Any, Any]] = {
    "apiVersion": str,
    "kind": str,
    "metadata": {
        **dict.fromkeys(("name", "namespace", "uid", "resourceVersion", "continue"), str),
        **dict.fromkeys(("creationTimestamp", "deletionTimestamp"), str),
        "labels": _TEXTS,
        "annotations": _TEXTS,
        "finalizers": [str],
        "ownerReferences": [{"uid": str}],
    },
    "spec": {
        "suspend": bool,
        "runPolicy": {"suspend": bool},
        "nodeName": str,
        "containers": [{"name": str}],
        "readinessGates": [dict],
        "unschedulable": bool,
        "taints": [{"key": str, "value": str, "effect": str}],
        "hard": _AMOUNTS,
        "scopes": [str],
        "scopeSelector": {
            "matchExpressions": [{"scopeName": str, "operator": str, "values": [str]}]
        },
        "accessModes": [str],
        "storageClassName": str,
        "volumeName": str,
    },
    "status": {
        **dict.fromkeys(("phase", "reason", "message", "startTime"), str),
        "conditions": _CONDITIONS,
        "containerStatuses": _CONTAINERS,
        "initContainerStatuses": _CONTAINERS,
        **dict.fromkeys(("capacity", "allocatable", "used"), _AMOUNTS),
        "allowed": bool,
    },
    # Of events, and of ConfigMaps.
    **dict.fromkeys(("reason", "message", "lastTimestamp", "eventTime"), str),
    "count": int,
    "involvedObject": {"kind": str, "name": str, "uid": str},
    "data": _TEXTS,
}
_SHAPE["items"] = [_SHAPE]


def read_object(text: str | bytes) -> Object | None:
    """Return the object in an answer; None: it is not one."""
    try:
        found = json.loads(text, parse_int=_in_64_bits)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _in_64_bits(text: str) -> int | None:
    return int(text) if len(text) < 20 else None


def well_typed(thing: Object) -> Object:
    """Take out of an object, or of a list of some, what its readers do not expect; return it.

    Which object and which field is said, once a process. A list's objects have names.
    """
    _take_out(thing, _SHAPE, "an object")
    if "items" in thing:
        thing["items"] = [one for one in thing["items"] if (one.get("metadata") or {}).get("name")]
    return thing


def _take_out(thing: Object, shape: Mapping[Any, Any], where: str) -> None:
    about = thing.get("metadata")
    if isinstance(about, dict) and isinstance(name := about.get("name"), str):
        where = name
    every = shape.get(...)
    for key in [*thing] if every else [key for key in shape if key in thing]:
        value = _fitting(thing[key], every or shape[key], where, key)
        if value is None:
            del thing[key]
        else:
            thing[key] = value


def _fitting(value: Any, shape: Any, where: str, key: str) -> Any:
    """Return what fits of a value; None: nothing."""
    if isinstance(shape, dict) and isinstance(value, dict):
        _take_out(value, shape, where)
        return value
    if isinstance(shape, list) and isinstance(value, list):
        found = (_fitting(each, shape[0], where, key) for each in value)
        return [each for each in found if each is not None]
    if isinstance(shape, type | tuple) and isinstance(value, shape):
        if isinstance(value, str) and not value.isascii():  # there may be half a surrogate pair
            return value.encode(errors="replace").decode()
        return value
    if value is not None:
        skipped(f"{where}: {key}", f"{value!r:.40} is of another type than Kubernetes documents")
    return None
