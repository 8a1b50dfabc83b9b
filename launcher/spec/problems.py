"""Validation errors -> Problems in the user's words, with lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from launcher.spec.errors import Offer, Problem
from launcher.spec.source import Path, SpecSource, describe, dotted

MODEL_TAGS: Final = ("by-name", "by-dimensions")
"""What the `model` union adds to the path of an error."""

_EXPECTED: Final[dict[str, str]] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "bool_type": "true or false",
    "model_type": "a section (a mapping of keys)",
    "model_attributes_type": "a section (a mapping of keys)",
    "dict_type": "a section (a mapping of keys)",
    "tuple_type": "a list as [a, b]",
    "list_type": "a list as [a, b]",
}
_BOUNDS: Final[dict[str, tuple[str, str]]] = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}
_MAX_ITEMS: Final = 50
"""Of a list that a message writes out."""
_NUMBER: Final = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,9})?([eE][-+]?[0-9]{1,2})?")
_TOO_BIG: Final = ("int_parsing_size", "string_too_long")
_REMOVED: Final[dict[str, str]] = {
    "env.conda": "write the environment's folder as env.venv: /shared/envs/NAME, or activate it by "
    "slurm.setup: ['source /shared/conda/etc/profile.d/conda.sh', 'conda activate NAME']; it needs "
    "holdfast",
    "env.stage": "environments are not copied to nodes; use an image (env.image), or let env.venv "
    "name a squashfs mount or a copy that the nodes have already (docs/submitted.md)",
}
"""Key that job files had once, or that is looked for -> what to use instead."""


Keys = Mapping[str, Mapping[str, FieldInfo]]
"""Dotted path of a section -> key -> field."""


def problems_of(error: ValidationError, source: SpecSource, sections: Keys) -> list[Problem]:
    """Return one problem for each error, at its line."""
    return [_problem(detail, source, sections) for detail in error.errors(include_url=False)]


def _problem(detail: ErrorDetails, source: SpecSource, sections: Keys) -> Problem:
    path: Path = tuple(detail["loc"])
    if len(path) > 1 and path[0] == "model" and path[1] in MODEL_TAGS:
        path = (path[0], *path[2:])
    if path and path[-1] == "[key]":  # a wrong name in a mapping of names: it is its own place
        path = path[:-1]
    kind = detail["type"]
    where = source.where(path)
    if kind == "extra_forbidden":
        return Problem("HF010", where, _unknown(path, sections))
    if kind == "missing":
        outer = source.where(path[:-1]) if len(path) > 1 else where
        place = type(where)(outer.file, outer.line, where.key)
        return Problem("HF011", place, _missing(path, sections))
    code, message = _value_message(kind, detail)
    return Problem(code, where, message, tuple(_instead(code, path, detail, source)))


def _instead(code: str, path: Path, detail: ErrorDetails, source: SpecSource) -> Iterator[Offer]:
    """Yield what was most likely meant, or all that there is; not all of it need be taken."""
    value, kind, key = detail.get("input"), detail["type"], dotted(path)
    if kind == "literal_error":  # the choices are in pydantic's own words only
        for choice in re.findall(r"'([^']*)'", detail["ctx"]["expected"]):
            yield {key: choice}
    for choice in detail.get("ctx", {}).get("instead", ()):
        yield {key: choice}
    if kind.startswith("int") and isinstance(value, float) and value.is_integer():
        yield {key: int(value)}
    if isinstance(value, str):
        yield from _rewritten(code, kind, path, value, source)


def _rewritten(code: str, kind: str, path: Path, value: str, source: SpecSource) -> Iterator[Offer]:
    """Yield what a text stands for that should have been something else, or no list with blanks."""
    key = dotted(path)
    number = value.replace("_", "").replace(",", "")
    if kind in ("int_type", "float_type") and _NUMBER.fullmatch(number):
        yield {key: int(number) if number.lstrip("-").isdigit() else float(number)}
    if kind == "bool_type" and value.lower() in ("yes", "no", "on", "off"):
        yield {key: value.lower() in ("yes", "on")}
    parts = [part.strip() for part in value.split(",")]
    if code == "HF015" and len(parts) > 1:
        yield {key: ",".join(parts)}
    if kind in ("tuple_type", "list_type"):
        yield {key: parts}
    whole = source.at(path[:-1]) if path and isinstance(path[-1], int) else ()
    if len(parts) > 1 and 0 < len(whole) <= _MAX_ITEMS:
        texts = [text for each in whole for text in str(each).split(",")]
        yield {dotted(path[:-1]): [text.strip() for text in texts]}


def _value_message(kind: str, detail: ErrorDetails) -> tuple[str, str]:  # noqa: PLR0911  a table of cases
    value, context = detail.get("input"), detail.get("ctx", {})
    found = describe(value)
    if kind.startswith("HF"):
        return kind, detail["msg"]
    if kind in _EXPECTED:
        hint = "" if kind != "bool_type" else "; YAML 1.2 knows only true and false"
        return "HF012", f"expected {_EXPECTED[kind]}, found {found}{hint}"
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return "HF013", f"expected {words} {_number(context[key])}, found {found}"
    if kind == "finite_number":
        return "HF013", f"expected a finite number, found {found}"
    if kind == "literal_error":
        return "HF014", f"{found} is not one of its choices"
    if kind in _TOO_BIG:
        return "HF013", f"{found} is too long"
    return "HF012", f"{detail['msg']}, found {found}"


def _number(bound: Any) -> str:
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def _missing(path: Path, sections: Keys) -> str:
    info = sections.get(".".join(str(part) for part in path[:-1]), {}).get(str(path[-1]))
    meaning = f": {info.description}" if info and info.description else ""
    return f"is missing{meaning}"


def _unknown(path: Path, sections: Keys) -> str:
    """Return a message that names the nearest known key, here or in another section."""
    *outer, last = [str(part) for part in path]
    section = ".".join(outer)
    if (removed := _REMOVED.get(f"{section}.{last}")) is not None:
        return f"unknown key: {removed}"
    known = list(sections.get(section, ()))
    import difflib

    near = difflib.get_close_matches(last.lower(), known, n=1, cutoff=0.6)
    elsewhere = [
        f"{name}.{key}".lstrip(".")
        for name, keys in sections.items()
        for key in keys
        if key == last and name != section
    ]
    if near:
        return f"unknown key; did you mean {'.'.join([*outer, near[0]])}?"
    if elsewhere:
        return f"unknown key here; did you mean {elsewhere[0]}?"
    if not known:
        return "unknown key"
    return f"unknown key; {section or 'a job file'} has {', '.join(known)}"
