"""What may lie in a set beside good items: no reader of the set may stumble over it.

`items` makes each kind at a path. Tests compare a reader's result with that of the set without the
item. What only a user other than root cannot read is stood in for by names that are too long, and
by a file whose bytes give an I/O error, as of a failing disk.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DEEP = 100_000
VALUES = {
    "huge": "1e308", "beyond": "1e999", "negative": "-1e308", "nan": "NaN", "infinite": "-Infinity",
    "surrogate": '"\\ud800"', "deep": "[" * DEEP + "]" * DEEP, "deep map": '{"a":' * 900 + "1"
    + "}" * 900, "long": str(10**30), "very long": "9" * 5000, "null": "null", "list": "[[]]",
    "map": '{"a": {}}', "true": "true", "text": '"x"', "nul": '"\\u0000"', "year": "1e12",
}  # fmt: skip
"""JSON of a value where another was."""
TEXTS = {
    "nothing": b"", "no object": b"[]", "bytes": b"\xff\xfe{", "surrogate": b'{"": "\xed\xa0\x80"}',
    "nuls": bytes(4096), "torn": b'{"v": 1, "t_un', "no list": b"7", "deep": b"[" * DEEP,
}  # fmt: skip


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


def _unreadable(path: Path) -> None:
    path.touch()
    path.chmod(0)


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "1 GB": _sparse,
    "gone": _link("gone"),
    "loop": lambda path: path.symlink_to(path.name),
    "name too long": _link("x" * 300),
    "I/O error": _link("/proc/self/mem"),
    "device": _link("/dev/zero"),
    "no rights": _unreadable,
}
"""What is no file, or cannot be read."""


def clear(path: Path) -> None:
    """Remove what an item was."""
    if not path.is_symlink() and path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def files() -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield (kind, what makes it at a path) of items that no reader takes."""
    yield from KINDS.items()
    for kind, text in TEXTS.items():
        yield kind, lambda path, text=text: path.write_bytes(text)


def spoilt(good: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield (kind, JSON) of a good object with each of its values replaced by each of VALUES."""
    for key in good:
        for kind, value in VALUES.items():
            marked = json.dumps({**good, key: "@here@"})
            yield f"{key}: {kind}", marked.replace('"@here@"', value).encode()


def spoilt_inside(good: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, JSON) of a good value with each value in it, at any depth, replaced so."""
    for path in _paths(good):
        place = bad = copy.deepcopy(good)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "@here@"
        marked = json.dumps(bad)
        for kind, value in VALUES.items():
            yield f"{path}: {kind}", marked.replace('"@here@"', value)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield (*path, key)
        yield from _paths(each, (*path, key))


def items(good: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield (kind, what makes it at a path) of all hostile items of a set of JSON files."""
    yield from files()
    for kind, text in spoilt(good):
        yield kind, lambda path, text=text: path.write_bytes(text)
