"""`kubernetes.pod_patch`: a strategic merge patch of the pods' spec, and what it may not change.

Pure. Lists with a merge key are merged by it, as `kubectl patch --type strategic` does; other lists
are replaced, and tolerations added to. null removes a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from launcher.spec.sections import variable_name
from launcher.spec.source import describe
from launcher.spec.values import refuse

Object = dict[str, Any]

AGENT_NAMES: Final = ("pytorch", "node")
"""What the agent's container is called, by kind of job; a patch may use either name for it."""
RESERVED: Final = "holdfast-"
"""How the names of volumes begin that are ours."""
_MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "resourceClaims": "name",
    "claims": "name",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
"""patchMergeKey of the fields of PodSpec and Container (k8s.io/api/core/v1/types.go)."""
_ADDED: Final = "tolerations"
_ROWS: Final[dict[str, tuple[str, ...]]] = {
    **{name: (key,) for name, key in _MERGE_KEYS.items()},
    _ADDED: (),
    "nodeSelectorTerms": (),
    "matchExpressions": ("key", "operator"),
}
"""Lists of mappings that are read here or in the renderer -> what each of them has."""
_NUMBERS: Final = ("containerPort",)
_MAPPINGS: Final = frozenset(
    {"resources", "requests", "limits", "affinity", "nodeAffinity", "securityContext"}
)
_NODES: Final = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
_WHOLE: Final = ("env", "volumes")
"""Their elements have one of several sources: two of them merged would have two."""
_OF_POD: Final = {
    "restartPolicy": "what follows a pod's end depends on it",
    "terminationGracePeriodSeconds": "use kubernetes.grace_s",
    "serviceAccountName": "use kubernetes.service_account",
    "serviceAccount": "use kubernetes.service_account",
    "automountServiceAccountToken": "kubernetes.board decides it",
    "schedulerName": "use kubernetes.scheduler",
    "priorityClassName": "use kubernetes.priority_class",
}
_OF_AGENT: Final = {
    "image": "use kubernetes.image",
    "imagePullPolicy": "use kubernetes.image_pull_policy",
    "command": "it is the agent",
    "args": "the agent takes none",
    "lifecycle": "it saves before the pod ends",
    "terminationMessagePolicy": "status and why read the message",
}
_MOST_DEPTH: Final = 20


def patched(pod: Object, patch: Object, *, container: str) -> Object:
    """Return a pod's spec with a checked patch merged; `container` is the agent's name in it."""
    if "containers" in patch:
        rows = [
            {**row, "name": container} if row["name"] in AGENT_NAMES else row
            for row in patch["containers"]
        ]
        patch = {**patch, "containers": rows}
    found: Object = _merged(pod, patch, "")
    return found


def _merged(base: Any, patch: Any, field: str) -> Any:
    if isinstance(patch, dict):
        found = dict(base) if isinstance(base, dict) else {}
        for name, value in patch.items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = _merged(found.get(name), value, name)
        return found
    if not isinstance(patch, list) or not isinstance(base, list):
        base = []
    if field == _ADDED:
        return [*base, *(row for row in patch if row not in base)]
    if not isinstance(patch, list) or field not in _MERGE_KEYS:
        return patch
    key = _MERGE_KEYS[field]
    rows = {row[key]: row for row in base}
    for row in patch:
        before = {} if field in _WHOLE else rows.get(row[key], {})
        rows[row[key]] = _merged(before, row, "")
    return list(rows.values())


def check_patch(patch: Any) -> Object:
    """Check the form of a patch, and that it holds no secret.

    Raises:
        PydanticCustomError: HF015 the form; HF163 a secret; HF165 a variable that is ours.
    """
    if not isinstance(patch, dict):
        raise refuse("HF012", f"expected fields of a pod's spec, found {describe(patch)}")
    _check_value(patch, "pod_patch", 0)
    for row in agent_rows(patch):
        for variable in row.get("env", ()):
            variable_name(variable["name"])
    return patch


def _check_value(value: Any, where: str, depth: int) -> None:
    if depth > _MOST_DEPTH:
        raise refuse("HF015", f"{where} is nested too deeply")
    if isinstance(value, str):
        if any(0xD800 <= ord(char) <= 0xDFFF or char == "\0" for char in value):
            raise refuse("HF015", f"{where} has something in it that is not a character")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check_field(name, inner, where)
            _check_value(inner, f"{where}.{name}", depth + 1)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _check_value(inner, f"{where}[{index}]", depth + 1)
    elif value is not None and not isinstance(value, bool | int | float):
        raise refuse("HF015", f"{where}: expected a value of JSON, found {describe(value)}")


def _check_field(name: Any, value: Any, where: str) -> None:
    if not isinstance(name, str) or name.startswith("$"):
        raise refuse("HF015", f"{where}: expected the name of a field, found {describe(name)}")
    here = f"{where}.{name}"
    is_mapping = name in _MAPPINGS or here.endswith(_NODES)
    if is_mapping and not isinstance(value, dict | None):
        raise refuse("HF015", f"{here}: expected a mapping, found {describe(value)}")
    are_texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if name == "values" and not are_texts:
        raise refuse("HF015", f"{here}: expected a list of texts, found {describe(value)}")
    keys = _ROWS.get(name)
    if keys is not None and not _are_rows(value, keys):
        named = f"mappings, each with {' and '.join(keys)}" if keys else "mappings"
        raise refuse("HF015", f"{here}: expected a list of {named}")


def _are_rows(value: Any, keys: tuple[str, ...]) -> bool:
    """Return whether a value is a list of mappings that have a name, or a number, at `keys`."""
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and all(
            row.get(key) and type(row[key]) is (int if key in _NUMBERS else str) for key in keys
        )
        for row in value
    )


def agent_rows(patch: Object) -> list[Object]:
    """Return what a checked patch says of the agent's container."""
    return [row for row in patch.get("containers", ()) if row["name"] in AGENT_NAMES]


def own_fields(
    patch: Object, *, resources: dict[str, str], mounts: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield (field, what to do instead) of fields that a checked patch may not change.

    Args:
        patch: the patch.
        resources: resource of the agent's container -> its key of the job file.
        mounts: where our volumes are mounted.
    """
    yield from ((name, why) for name, why in _OF_POD.items() if name in patch)
    for row in patch.get("volumes", ()):
        if str(row["name"]).startswith(RESERVED):
            yield f"volumes.{row['name']}", f"names with {RESERVED} are holdfast's own"
    for row in agent_rows(patch):
        here = f"containers.{row['name']}"
        yield from ((f"{here}.{name}", why) for name, why in _OF_AGENT.items() if name in row)
        needed = "it has the CPUs, the memory and the GPUs"
        if row.get("resources", {}) is None:
            yield f"{here}.resources", needed
        for kind in ("requests", "limits"):
            asked = (row.get("resources") or {}).get(kind, {})
            if asked is None:
                yield f"{here}.resources.{kind}", needed
                continue
            for name in asked.keys() & resources.keys():
                yield f"{here}.resources.{kind}.{name}", f"use {resources[name]}"
        for mount in row.get("volumeMounts", ()):
            if mount["mountPath"].rstrip("/") in mounts:
                yield f"{here}.volumeMounts.{mount['mountPath']}", "holdfast mounts a volume there"
