"""Checks what comes out of JSON, and that it has the types its dataclass declares. Pure."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Final


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is no JSON, or nested too deeply to be ours.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def check_types(record: Any) -> None:
    """Refuse a dataclass with a field whose content is not of the declared type.

    Raises:
        ValueError: names the field and shows the start of its content.
    """
    cls: Any = type(record)
    for name, fits in _fields_of(cls):
        if not fits(getattr(record, name)):
            raise ValueError(f"{cls.__name__}.{name} is {getattr(record, name)!r:.80}")


@functools.cache
def _fields_of(cls: type) -> tuple[tuple[str, Callable[[Any], bool]], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((spec.name, _fits(hints[spec.name])) for spec in dataclasses.fields(cls))


@functools.cache
def _fits(want: Any) -> Callable[[Any], bool]:
    """Return the test whether a value is a `want`, for the types that messages are made of."""
    inner = [_fits(part) for part in typing.get_args(want) if part is not ...]
    match typing.get_origin(want):
        case types.UnionType:
            return lambda value: any(fits(value) for fits in inner)
        case builtins.tuple:
            return lambda value: type(value) is tuple and all(map(inner[0], value))
        case builtins.dict | collections.abc.Mapping:
            return lambda value: (
                type(value) is dict
                and all(map(inner[0], value))
                and all(map(inner[1], value.values()))
            )
    if dataclasses.is_dataclass(want) and isinstance(want, type):
        return lambda value: (
            isinstance(value, want)  # or of a subclass, which has fields of its own
            and all(fits(getattr(value, name)) for name, fits in _fields_of(type(value)))
        )
    return _SCALARS.get(want) or (lambda value: type(value) is want)


def _is_int(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


_SCALARS: Final[dict[Any, Callable[[Any], bool]]] = {
    Any: lambda _: True,
    float: lambda value: math.isfinite(value) if type(value) is float else _is_int(value),
    int: _is_int,  # what fits into the fields of heartbeats and snapshots
}
