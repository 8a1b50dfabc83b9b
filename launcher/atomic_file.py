"""Files of a run that others may read at any time: complete or not at all. Needs no package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.atomic_file import write_atomic

__all__ = ["read_json", "write_atomic", "write_json"]


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write an object as `write_atomic` does.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomic(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return an object; empty where there is none, or nothing that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
