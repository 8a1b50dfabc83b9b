"""Which of a few strings a text must contain for a pattern to match in it. Pure.

A search for all patterns' literals at once is two orders of magnitude faster than the patterns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_Strings = frozenset[str]
_EMPTY: Final[_Strings] = frozenset({""})
_OPEN: Final[_Strings] = frozenset()
"""Stands for a part that can be too many strings to list."""
_MOST: Final = 256
"""Strings that one part of a pattern may stand for before it counts as open."""

_TOKEN: Final = re.compile(
    r"(?:(?P<edge>\\[bBAZ]|[\^$])"
    r"|(?P<open>\((?:\?(?::|<?[=!]))?)|(?P<end>[|)])"
    r"|\[(?P<one>-?[^\]\\^-]{1,10}-?)\]|(?P<gap>\[\^?\]?(?:\\.|[^\]\\])*\]|\\[A-Za-z0-9]|\.)"
    r"|\\?(?P<char>.))(?P<repeat>[*+?]|\{\d*,?\d*\})?",
    re.DOTALL,
)
"""Syntax of `re` without flags, names, references and lazy repeats."""

_COMMON: Final = re.compile(
    r" *(error|fail(ed|ure)?( to)?|unable to|hangs?|stuck|checkpoint|connect(ion)?|closed"
    r"|loss( scale)?|norm|grads?|loaded|timed? ?out|mismatch|missing|peer|rank|step|node|wait"
    r"|read|write|data|memory|time|slow|[Ff]ault|lost|Failure)s? *"
)
"""So frequent in healthy logs that a search for them rules nothing out."""
_COUNT: Final = re.compile(r"\{\d*,?\d*\}|\[0-9[^\]]*\]")
_NUMBER: Final = re.compile(r"(?<![A-Za-z_\\0-9])\d+(?![A-Za-z_0-9])")
"""A number of a pattern that is not part of a name, as in c10d."""


def literals_of(pattern: str) -> frozenset[str]:
    """Return strings of which each match of `pattern` contains one.

    Of the parts that must match, the one whose shortest string is the longest.

    Raises:
        ValueError: the pattern can match without any fixed string.
    """
    found, _, _ = _read(_TOKEN.finditer(f"{pattern})"))
    if not _worth(found):
        raise ValueError(f"no fixed string in {pattern!r}")
    return frozenset(
        each for each in found if not any(other != each and other in each for other in found)
    )


def _read(tokens: Iterator[re.Match[str]]) -> tuple[_Strings, _Strings, str]:
    """Read to the end of a group; return what it requires, what it can be, how it repeats."""
    ways: list[_Strings] = []
    exacts: list[_Strings] = []
    parts: list[_Strings] = []
    run, whole = _EMPTY, True
    for token in tokens:
        if token["end"]:
            ways.append(max(reversed([*parts, run]), key=_worth))
            exacts.append(run if whole else _OPEN)
            parts, run, whole = [], _EMPTY, True
            if token["end"] == ")":
                break
            continue
        required, exact = _part(token, tokens)
        if exact and len(run) * len(exact) <= _MOST:
            run = frozenset(a + b for a in run for b in exact)
        else:
            parts += [run, required]
            run, whole = exact or _EMPTY, False
    exact = frozenset().union(*exacts) if all(exacts) else _OPEN
    return frozenset().union(*ways), exact, token["repeat"] or ""


def _part(token: re.Match[str], tokens: Iterator[re.Match[str]]) -> tuple[_Strings, _Strings]:
    """Return what one part of a pattern requires, and what it can be."""
    exact, repeat = frozenset(token["char"] or token["one"] or ""), token["repeat"] or ""
    required = exact or _EMPTY
    if token["open"]:
        required, exact, repeat = _read(tokens)
    if token["edge"] or token["open"] not in (None, "(", "(?:"):  # of no width
        return _EMPTY, _EMPTY
    if repeat:
        exact = exact | _EMPTY if repeat == "?" and exact else _OPEN
    return _EMPTY if repeat.startswith(("?", "*", "{0", "{,")) else required, exact


def _worth(strings: _Strings) -> int:
    return min(1 if _COMMON.fullmatch(each) else len(each) for each in strings)


def names_numbers(pattern: str) -> bool:
    """Return whether `pattern` tells one number from another."""
    return _NUMBER.search(_COUNT.sub("", pattern)) is not None
