"""The JSON schema of job files, for editors: it refuses no file that the launcher takes. Pure."""

from __future__ import annotations

from typing import Any

from launcher.spec.reading import FOR_COMMANDS
from launcher.spec.spec import OPTIONAL, JobSpec

_HAS_COMMAND = {"required": ["command"], "properties": {"command": {"not": {"type": "null"}}}}


def job_schema() -> dict[str, Any]:
    """Return the JSON schema (2020-12) of job files.

    What only a script knows may be left out beside `command`, so these keys are required by an
    `else`. An empty section is one with its defaults.
    """
    schema = JobSpec.model_json_schema()
    schema["title"] = "Holdfast job file"
    without = [key for key in schema["required"] if key in FOR_COMMANDS]
    schema["required"] = [key for key in schema["required"] if key not in FOR_COMMANDS]
    steps = schema["$defs"]["Train"].pop("required")  # each has a default beside a command
    assert set(steps) <= FOR_COMMANDS["train"].keys(), steps
    schema["if"], schema["then"] = _HAS_COMMAND, {}
    schema["else"] = {
        "required": without,
        "properties": {
            **{key: {"not": {"type": "null"}} for key in without},
            "train": {"type": "object", "required": steps},
        },
    }
    for key in sorted(OPTIONAL):
        if key not in schema["required"]:
            schema["properties"][key] = _or_empty(schema["properties"][key])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _or_empty(field: dict[str, Any]) -> dict[str, Any]:
    """Allow a section to have no content."""
    about = {name: value for name, value in field.items() if name in {"title", "description"}}
    kinds = field.get("oneOf") or [{k: v for k, v in field.items() if k not in about}]
    return {**about, "anyOf": [*kinds, {"type": "null"}]}
