"""Reads JSON that all later code can take, and builds dataclasses of it by the types of fields.

Pure. What is refused here need not be thought of where it is used.
"""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, NoReturn, TypeAlias, TypeVar

_T = TypeVar("_T")

MAX_NESTING: Final = 100
"""Values in values; code that walks them calls itself as often."""
MAX_UNIX: Final = 1e11
"""Times of which calendars know the year; a few more than those of four digits."""
Unix: TypeAlias = Annotated[float, "unix"]
"""Type of a field for seconds since 1970, from 0 to MAX_UNIX."""


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is not JSON; or says what cannot be written again, or counted with: NaN,
            an infinity, a whole number of more than 64 bits, half a surrogate pair; or is nested
            too deeply.
    """
    if isinstance(text, bytes):  # json.loads would let surrogates pass
        text = text.decode().removeprefix("\ufeff")
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_NESTING:
        _check_nesting(value)
    if not text.isascii() or "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        inner = (each.values() if type(each) is dict else each for each in level)
        level = [one for each in inner for one in each if type(one) in (dict, list)]
        if not level:
            return
    raise ValueError("nested too deeply")


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _finite(text: str) -> float:
    if math.isfinite(value := float(text)):
        return value
    _no_number(text)


def _in_64_bits(text: str) -> int:
    if len(text) <= _INT_CHARS:
        return int(text)
    _no_number(text)


_INT_CHARS: Final = len(str(1 << 64))
_DECODER: Final = json.JSONDecoder(
    parse_constant=_no_number, parse_float=_finite, parse_int=_in_64_bits
)


def build(cls: type[_T], raw: Any) -> _T:
    """Build a dataclass, and all in it, from what came out of JSON.

    An object gives fields by name; an array gives them in order, unless they are keyword-only. A
    class with a method `from_wire` reads itself. An instance of the class is checked and returned.

    Raises:
        ValueError: names the field that is missing, unknown or of another type.
    """
    want: Any = cls
    try:
        built: _T = _builder(want)(raw)
    except TypeError:
        raise ValueError(f"not a {cls.__name__}: {raw!r:.80}") from None
    return built


@functools.cache
def _builder(want: Any) -> Callable[[Any], Any]:
    """Return the function that makes a `want` of a value, or raises TypeError."""
    if known := _SCALARS.get(want):
        return known
    args = typing.get_args(want)
    inner = [_builder(arg) for arg in args if arg is not ...]
    match typing.get_origin(want):
        case None:
            return _class_builder(want)
        case types.UnionType | typing.Union:  # of Annotated
            return _union_builder(args, inner)
        case builtins.dict | collections.abc.Mapping:
            key, item = inner
            return lambda value: {key(k): item(v) for k, v in _of_type(value, dict).items()}
    assert typing.get_origin(want) is tuple, want
    if ... in args:
        return lambda value: tuple(map(inner[0], _of_type(value, list, tuple)))
    return lambda value: _pairwise(inner, _of_type(value, list, tuple))


def _union_builder(
    args: tuple[Any, ...], inner: list[Callable[[Any], Any]]
) -> Callable[[Any], Any]:
    makers = [make for arg, make in zip(args, inner, strict=True) if arg is not type(None)]
    one = makers[0] if len(makers) == 1 else functools.partial(_first, makers)
    return one if len(makers) == len(args) else lambda value: None if value is None else one(value)


def _class_builder(want: type) -> Callable[[Any], Any]:
    if dataclasses.is_dataclass(want):
        return functools.partial(_record, want)
    if issubclass(want, enum.Enum):
        return functools.partial(_member, want)
    if hasattr(want, "from_wire"):
        return lambda value: value if isinstance(value, want) else want.from_wire(value)
    return lambda value: _of_type(value, want)


def _member(want: Any, value: Any) -> Any:
    try:
        return want(value)
    except ValueError:
        raise TypeError from None  # of a union, the next type may fit


def _of_type(value: Any, *wanted: type) -> Any:
    if type(value) not in wanted:
        raise TypeError
    return value


def _first(makers: list[Callable[[Any], Any]], value: Any) -> Any:
    for make in makers:
        try:
            return make(value)
        except TypeError:
            continue
    raise TypeError


def _pairwise(makers: list[Callable[[Any], Any]], values: Any) -> tuple[Any, ...]:
    if len(values) != len(makers):
        raise TypeError
    return tuple(make(value) for make, value in zip(makers, values, strict=True))


def _record(cls: Any, value: Any) -> Any:
    if isinstance(value, cls):
        actual: Any = type(value)  # a subclass has fields of its own
        _fields(actual, {name: getattr(value, name) for name in _makers(actual)})
        return value
    if type(value) is list and not any(spec.kw_only for spec in dataclasses.fields(cls)):
        value = dict(zip(_makers(cls), value, strict=True))
    made = _fields(cls, _of_type(value, dict))
    try:
        return cls(**made)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _fields(cls: Any, raw: Mapping[str, Any]) -> dict[str, Any]:
    makers, made = _makers(cls), {}
    for name, value in raw.items():
        try:
            made[name] = makers[name](value)
        except (TypeError, KeyError):
            raise ValueError(f"{cls.__name__}.{name} is {value!r:.80}") from None
    return made


@functools.cache
def _makers(cls: type) -> dict[str, Callable[[Any], Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {spec.name: _builder(hints[spec.name]) for spec in dataclasses.fields(cls)}


def _int(value: Any) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        raise TypeError
    return value


def _float(value: Any) -> float:
    if type(value) is not float:
        return _int(value)
    if not math.isfinite(value):
        raise TypeError
    return value


def _unix(value: Any) -> float:
    if not 0 <= _float(value) < MAX_UNIX:
        raise TypeError
    return float(value)


def unix_time(value: Any) -> float:
    """Return a time out of JSON, as of a field of type Unix.

    Raises:
        ValueError: it is none.
    """
    try:
        return _unix(value)
    except TypeError:
        raise ValueError(f"{value!r:.40} is no time") from None


_SCALARS: Final[dict[Any, Callable[[Any], Any]]] = {
    Any: lambda value: value,
    dict[str, Any]: lambda value: dict(_of_type(value, dict)),  # JSON has no other keys
    float: _float,
    Unix: _unix,
    int: _int,  # what fits into the fields of heartbeats and snapshots
}
