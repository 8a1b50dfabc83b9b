"""Label and field selectors, and patches, as the API server reads them; pure."""

from __future__ import annotations

import copy
import re
from typing import Any

from api_resources import ApiError, Object

_TERM = re.compile(r"\s*(?P<key>[\w./-]+)\s+(?P<how>in|notin)\s+\((?P<values>[^)]*)\)\s*$")
_MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "conditions": "type",
    "ownerReferences": "uid",
    "secrets": "name",
    "imagePullSecrets": "name",
}


def labels_match(selector: str, obj: Object) -> bool:
    """Return whether a selector as `a=b,c in (d,e),!f` fits the labels of an object."""
    labels = obj["metadata"].get("labels") or {}
    return all(_term(term, labels) for term in re.split(r",(?![^(]*\))", selector) if term.strip())


def expressions_match(selector: Object, labels: dict[str, str]) -> bool:
    """Return whether matchLabels and matchExpressions fit."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    for term in selector.get("matchExpressions") or ():
        there, values = term["key"] in labels, term.get("values", ())
        fits = {
            "In": there and labels.get(term["key"]) in values,
            "NotIn": not there or labels.get(term["key"]) not in values,
            "Exists": there,
            "DoesNotExist": not there,
        }[term["operator"]]
        if not fits:
            return False
    return True


def fields_match(selector: str, obj: Object) -> bool:
    """Return whether a selector as `metadata.name=x,status.phase!=Running` fits."""
    for term in filter(None, selector.split(",")):
        path, sign, value = re.split(r"(!=|==|=)", term, maxsplit=1)
        if (_field(obj, path.strip()) == value.strip()) == (sign == "!="):
            return False
    return True


def merge(target: Any, patch: Any, *, strategic: bool) -> Any:
    """Return an RFC 7386 merge; a strategic one merges the lists whose key is known."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif strategic and isinstance(value, list) and _by_key(key, value):
            result[key] = _merge_list(result.get(key) or [], value, _MERGE_KEYS[key])
        else:
            result[key] = merge(result.get(key), value, strategic=strategic)
    return result


def json_patch(target: Object, operations: list[Object]) -> Object:
    """Return the object after RFC 6902 operations (add, replace, remove, test).

    Raises:
        ApiError: 422, a path is not there or a test fails.
    """
    result = copy.deepcopy(target)
    for op in operations:
        keys = [k.replace("~1", "/").replace("~0", "~") for k in op["path"].split("/")[1:]]
        try:
            _apply(result, keys, op)
        except (KeyError, IndexError, ValueError, TypeError):
            text = f"the server rejected our request due to an error in our request: {op}"
            raise ApiError(422, text) from None
    return result


def _apply(result: Any, keys: list[str], op: Object) -> None:
    for key in keys[:-1]:
        result = result[int(key) if isinstance(result, list) else key]
    key: Any = keys[-1]
    if isinstance(result, list):
        if op["op"] == "add":
            result.insert(len(result) if key == "-" else int(key), op["value"])
            return
        key = int(key)
    if op["op"] == "test":
        if result[key] != op["value"]:
            raise ValueError
    elif op["op"] == "remove":
        del result[key]
    elif op["op"] == "add":
        result[key] = op["value"]
    elif op["op"] == "replace":
        result[key] = (result[key], op["value"])[1]  # it must be there
    else:
        raise ValueError


def _by_key(key: str, value: list[Any]) -> bool:
    return key in _MERGE_KEYS and all(isinstance(v, dict) and _MERGE_KEYS[key] in v for v in value)


def _merge_list(old: list[Any], new: list[Any], key: str) -> list[Any]:
    result = list(old)
    for entry in new:
        at = [i for i, o in enumerate(result) if o.get(key) == entry[key]]
        if entry.get("$patch") == "delete":
            result = [o for o in result if o.get(key) != entry[key]]
        elif at:
            result[at[0]] = merge(result[at[0]], entry, strategic=True)
        else:
            result.append(merge({}, entry, strategic=True))
    return result


def _term(term: str, labels: dict[str, str]) -> bool:
    if match := _TERM.match(term):
        values = {v.strip() for v in match["values"].split(",")}
        inside = labels.get(match["key"]) in values
        return inside == (match["how"] == "in")
    parts = re.split(r"(!=|==|=)", term.strip(), maxsplit=1)
    if len(parts) == 3:
        return (labels.get(parts[0].strip()) == parts[2].strip()) == (parts[1] != "!=")
    key = parts[0].strip()
    return key[1:].strip() not in labels if key.startswith("!") else key in labels


def _field(obj: Any, path: str) -> str:
    for key in path.split("."):
        obj = obj.get(key) if isinstance(obj, dict) else None
    if isinstance(obj, bool):
        return str(obj).lower()
    return "" if obj is None else str(obj)
