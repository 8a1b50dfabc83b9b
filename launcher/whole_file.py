"""Files of a run that others may read at any time: complete or not at all. Needs no package."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write a file, complete or not at all; one that is there is replaced.

    Raises:
        OSError: the folder cannot be written; nothing is left of the attempt.
    """
    fresh = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write an object as `write_whole` does.

    Raises:
        OSError: the folder cannot be written.
    """
    write_whole(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return an object; empty where there is none, or nothing that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
