"""Files of a run that others may read at any time: complete or not at all. Needs no package."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_trainer.record.typed import parse_json
from elastic_trainer.storage.atomic_file import write_atomic
from elastic_trainer.storage.regular_file import read_regular

__all__ = ["check_output", "read_json", "write_atomic", "write_json"]


def check_output(path: Path) -> None:
    """Check that nothing but a plain file is where a user wants one written: no link above all.

    Raises:
        OSError: there is something else.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and where it leads is not written", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is no regular file", str(path))


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write an object as `write_atomic` does.

    Raises:
        OSError: the folder cannot be written.
    """
    write_atomic(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return an object; empty where there is none, or nothing that can be read."""
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
