"""Which of a few strings a text must contain for a pattern to match in it. Pure.

A search for all patterns' literals at once is two orders of magnitude faster than the patterns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from re import _constants as op  # type: ignore[attr-defined]  # the parsed pattern has no public form
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

_MOST: Final = 256
"""Strings that one part of a pattern may stand for before it counts as open."""

_COMMON: Final = re.compile(
    r" *(error|fail(ed|ure)?( to)?|unable to|hangs?|stuck|checkpoint|connect(ion)?|closed"
    r"|loss( scale)?|norm|grads?|loaded|timed? ?out|mismatch|missing|peer|rank|step|node|wait"
    r"|read|write|data|memory|time|slow|[Ff]ault|lost|Failure)s? *"
)
"""In so many lines of healthy logs that a search for them sorts out nothing."""

_COUNT: Final = re.compile(r"\{\d*,?\d*\}|\[0-9[^\]]*\]")
_NUMBER: Final = re.compile(r"(?<![A-Za-z_\\0-9])\d+(?![A-Za-z_0-9])")
"""In a pattern: not a part of a name, as in c10d."""
_EMPTY: Final = frozenset({""})


def literals_of(pattern: str) -> frozenset[str]:
    """Return strings of which each match of `pattern` contains one.

    Of the parts that must match, the one whose shortest string is the longest.

    Raises:
        ValueError: the pattern can match without any fixed string.
    """
    _, required = _sets(parser.parse(pattern))
    if required is None:
        raise ValueError(f"no fixed string in {pattern!r}")
    shortest = [each for each in required if each]
    return frozenset(
        each for each in shortest if not any(o != each and o in each for o in shortest)
    )


def names_numbers(pattern: str) -> bool:
    """Return whether `pattern` tells one number from another."""
    return _NUMBER.search(_COUNT.sub("", pattern)) is not None


def _sets(items: Iterable[Any]) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    """Return all strings a sequence can be (None: too many), and the best set it requires."""
    found: list[frozenset[str]] = []
    run, whole = _EMPTY, True
    for code, value in items:
        exact, required = _one(code, value)
        if required is not None:
            found.append(required)
        if exact is not None and len(run) * len(exact) <= _MOST:
            run = frozenset(a + b for a, b in itertools.product(run, exact))
            continue
        whole = False
        found.append(run)
        run = exact if exact is not None else _EMPTY
    found.append(run)
    best = max(reversed(found), key=_worth)
    return run if whole else None, best if _worth(best) > 0 else None


def _worth(strings: frozenset[str]) -> int:
    return min((1 if _COMMON.fullmatch(each) else len(each) for each in strings), default=0)


def _one(code: Any, value: Any) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    match code:
        case op.LITERAL:
            found: tuple[Any, Any] = frozenset({chr(value)}), None
        case op.AT | op.ASSERT | op.ASSERT_NOT:  # of no width
            found = _EMPTY, None
        case op.IN:
            found = _characters(value), None
        case op.SUBPATTERN:
            found = _sets(value[3])
        case op.BRANCH:
            found = _branch([_sets(each) for each in value[1]])
        case op.MAX_REPEAT:
            found = _repeated(*value)
        case _:
            found = None, None
    return found


def _repeated(
    least: int, most: int, item: Iterable[Any]
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    exact, required = _sets(item)
    if exact is not None and (least, most) == (0, 1):
        return exact | _EMPTY, None
    if least == most == 1:
        return exact, required
    return None, required or exact if least else None


def _characters(items: Sequence[tuple[Any, Any]]) -> frozenset[str] | None:
    if len(items) > 10 or any(code is not op.LITERAL for code, _ in items):
        return None
    return frozenset(chr(value) for _, value in items)


def _branch(
    ways: Sequence[tuple[frozenset[str] | None, frozenset[str] | None]],
) -> tuple[frozenset[str] | None, frozenset[str] | None]:
    exacts = [exact for exact, _ in ways if exact is not None]
    exact = frozenset().union(*exacts) if len(exacts) == len(ways) else None
    best = [_better(*way) for way in ways]
    required = None if None in best else frozenset().union(*(each for each in best if each))
    if exact is not None and len(exact) > _MOST:
        exact = None
    return exact, required


def _better(exact: frozenset[str] | None, required: frozenset[str] | None) -> frozenset[str] | None:
    both = [each for each in (exact, required) if each is not None and _worth(each) > 0]
    return max(both, key=_worth, default=None)


def compiled(patterns: Iterable[re.Pattern[str]]) -> dict[str, list[int]]:
    """Return literal -> indices of the patterns that need it."""
    index: dict[str, list[int]] = {}
    for number, pattern in enumerate(patterns):
        for literal in literals_of(pattern.pattern):
            index.setdefault(literal, []).append(number)
    return index
