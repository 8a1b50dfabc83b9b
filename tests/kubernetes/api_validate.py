"""Which fields a kind has: CRD schemas for custom kinds, the client's models for the others.

The CRDs are read from HOLDFAST_TEST_CRDS or ../shared/data/crds; without them custom kinds are
checked as far as their pod templates go (api_rules.py).
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import yaml
from api_resources import CLUSTER_RUNTIMES, JOBSETS, RUNTIMES, ApiError, Object, Resource

_FOLDERS = (
    os.environ.get("HOLDFAST_TEST_CRDS", ""),
    str(Path(__file__).resolve().parents[3] / "shared" / "data" / "crds"),
)
_JSON: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("str", "bytes", "datetime"), str),
    "int": int,
    "bool": bool,
    "float": (int, float),
}
"""What JSON has for the models' types; bytes are base64."""
_QUANTITIES = re.compile(r"\.(limits|requests|hard|capacity|allocatable|overhead)$")


class Findings(NamedTuple):
    """What is wrong with an object's fields."""

    unknown: list[str]
    """Paths of fields the kind does not have."""
    mistyped: list[str]
    """As the decoder words it: 400."""
    invalid: list[str]
    """As the validator words it: 422."""


class Schemas:
    """The fields of all kinds."""

    def check(self, resource: Resource, obj: Object, mode: str) -> list[str]:
        """Check an object; unknown fields are removed unless `mode` is Strict. Return warnings.

        Raises:
            ApiError: 400 for unknown fields (Strict) and wrong types, 422 for wrong values.
        """
        found = Findings([], [], [])
        schema = crd_schema(resource)
        if schema is not None:
            _unknown(schema, obj, "", found)
            found.invalid.extend(_violations(schema, obj))
        elif not resource.is_custom:
            _typed(_model_name(resource), obj, "", found)
        start = f'{resource.kind} in version "{resource.version}" cannot be handled as a '
        start += f"{resource.kind}: "
        if found.mistyped:
            raise ApiError(400, start + found.mistyped[0])
        messages = [f'unknown field "{path}"' for path in found.unknown]
        if messages and mode == "Strict":
            raise ApiError(400, f"{start}strict decoding error: {', '.join(messages)}")
        if found.invalid:
            raise invalid(resource, obj, found.invalid)
        for path in found.unknown:
            _remove(obj, path)
        return messages if mode == "Warn" else []


def invalid(resource: Resource, obj: Object, causes: list[str]) -> ApiError:
    """Return 422 with its causes, each as `path: what`."""
    name = obj["metadata"].get("name", "")
    text = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    rows = [
        {"field": field, "message": message, "reason": "FieldValueInvalid"}
        for field, _, message in (cause.partition(": ") for cause in causes)
    ]
    details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": rows}
    return ApiError(422, f'{kind} "{name}" is invalid: {text}', details=details)


# Custom kinds


@functools.cache
def crd_schema(resource: Resource) -> Object | None:
    """Return the schema of a custom kind; None: it is not at hand."""
    if not resource.is_custom:
        return None
    if resource in {RUNTIMES, CLUSTER_RUNTIMES}:
        return _runtime_schema()
    for folder in filter(None, _FOLDERS):
        path = Path(folder) / f"{resource.group}_{resource.plural}.yaml"
        if path.exists():
            return _read(path, resource.version)
    return None


def _read(path: Path, version: str) -> Object:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    crd = yaml.load(path.read_text(), Loader=loader)  # noqa: S506  # a safe loader, the fast one
    [schema] = [v["schema"] for v in crd["spec"]["versions"] if v["name"] == version]
    return _as_json_schema(schema["openAPIV3Schema"])


def _runtime_schema() -> Object | None:
    """Return what is known of a TrainingRuntime: its template is that of a JobSet."""
    jobset = crd_schema(JOBSETS)
    if jobset is None:
        return None
    free = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    template = {"metadata": free, "spec": jobset["properties"]["spec"]}
    spec = {
        "mlPolicy": free,
        "podGroupPolicy": free,
        "template": {"type": "object", "properties": template},
    }
    return {
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {"type": "object", "properties": spec, "required": ["template"]},
        },
    }


def _as_json_schema(node: Any) -> Any:
    """Return an OpenAPI v3 schema as JSON schema reads it."""
    if isinstance(node, list):
        return [_as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {
        key: {name: _as_json_schema(sub) for name, sub in value.items()}
        if key == "properties"
        else _as_json_schema(value)
        for key, value in node.items()
        if key not in {"description", "format", "default"} or not isinstance(value, str)
    }
    if result.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if result.pop("nullable", False) and "type" in result:
        result["type"] = [result["type"], "null"]
    return result


def _unknown(schema: Object, value: Any, path: str, found: Findings) -> None:
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for i, item in enumerate(value):
            _unknown(schema["items"], item, f"{path}[{i}]", found)
    if not isinstance(value, dict) or (path == "metadata"):
        return
    fields, more = schema.get("properties", {}), schema.get("additionalProperties")
    keeps = schema.get("x-kubernetes-preserve-unknown-fields") or more is True
    for key, item in value.items():
        where = f"{path}.{key}" if path else key
        if key in fields:
            _unknown(fields[key], item, where, found)
        elif isinstance(more, dict):
            _unknown(more, item, where, found)
        elif not keeps:
            found.unknown.append(where)


def _violations(schema: Object, obj: Object) -> Iterator[str]:
    validator = jsonschema.Draft202012Validator(schema)
    for error in sorted(validator.iter_errors(obj), key=lambda e: list(map(str, e.path))):
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in error.path)
        where = where.removeprefix(".") or "<nil>"
        if error.validator == "required":
            missing = [key for key in error.validator_value if key not in error.instance]
            yield f"{where}.{missing[0]}: Required value"
        elif error.validator == "enum":
            allowed = ", ".join(f'"{v}"' for v in error.validator_value)
            yield f'{where}: Unsupported value: "{error.instance}": supported values: {allowed}'
        elif error.validator == "type":
            got = _type_name(error.instance)
            wanted = error.validator_value
            wanted = wanted[0] if isinstance(wanted, list) else wanted
            yield (
                f'{where}: Invalid value: "{got}": {where} in body must be of type '
                f'{wanted}: "{got}"'
            )
        else:
            yield f"{where}: Invalid value: {error.instance!r}: {error.message}"


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


# The kinds of Kubernetes itself, by the models of its client


def _model_name(resource: Resource) -> str:
    special = {"events": "CoreV1Event"}
    return special.get(resource.plural, "V1" + resource.kind)


@functools.cache
def _model(name: str) -> tuple[dict[str, str], dict[str, str]] | None:
    """Return a model's JSON names -> types; None: there is no such model."""
    from kubernetes.client import models

    model = getattr(models, name, None)
    if model is None:
        return None
    types, names = model.openapi_types, model.attribute_map
    return {names[key]: type_name for key, type_name in types.items()}, names


def _typed(kind: str, value: Any, path: str, found: Findings) -> None:
    if value is None or kind == "object":
        return
    if match := re.match(r"[Ll]ist\[(.*)\]$", kind):
        if not isinstance(value, list):
            found.mistyped.append(_cannot(value, path, "[]" + match[1]))
            return
        for i, item in enumerate(value):
            _typed(match[1], item, f"{path}[{i}]", found)
    elif match := re.match(r"[Dd]ict[(\[]str, (.*)[)\]]$", kind):
        if not isinstance(value, dict):
            found.mistyped.append(_cannot(value, path, f"map[string]{match[1]}"))
            return
        for key, item in value.items():
            if not (_QUANTITIES.search(path) and isinstance(item, (int, float))):
                _typed(match[1], item, f"{path}.{key}", found)
    elif kind in _JSON:
        fits = _JSON[kind]
        if not isinstance(value, fits) or (isinstance(value, bool) and kind != "bool"):
            found.mistyped.append(_cannot(value, path, {"str": "string"}.get(kind, kind)))
    else:
        _typed_object(kind, value, path, found)


def _typed_object(kind: str, value: Any, path: str, found: Findings) -> None:
    model = _model(kind)
    if model is None:
        return
    if not isinstance(value, dict):
        found.mistyped.append(_cannot(value, path, kind))
        return
    for key, item in value.items():
        where = f"{path}.{key}" if path else key
        if key not in model[0]:
            found.unknown.append(where)
        else:
            _typed(model[0][key], item, where, found)


def _cannot(value: Any, path: str, wanted: str) -> str:
    got = _type_name(value)
    return f"json: cannot unmarshal {got} into Go struct field {path} of type {wanted}"


def _remove(obj: Any, path: str) -> None:
    """Remove the field at a path as spec.a[0].b; the last step is a key."""
    steps = re.findall(r"[^.\[\]]+|\[\d+\]", path)
    for step in steps[:-1]:
        if obj is None:
            return
        obj = obj[int(step[1:-1])] if step.startswith("[") else obj.get(step)
    if isinstance(obj, dict):
        obj.pop(steps[-1], None)
