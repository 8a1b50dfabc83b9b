"""Names of thousands of nodes as ranges, in Slurm's notation: `gpu[001-512],login1`. Pure.

An epoch of 12,500 nodes is 200 KB of names, and a run has one after every failure. The names keep
their order, which is that of the ranks; `scontrol show hostnames` lists them too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

FEW: Final = 64
"""So many names are written one by one."""
MOST: Final = 100_000
"""Names of a list that is read; a longer one is damaged."""
_MOST_DIGITS: Final = 9
_PLAIN: Final = re.compile(r"[A-Za-z0-9._-]+")
_NUMBERED: Final = re.compile(r"(.*?)([0-9]{1,9})")
_RANGE: Final = re.compile(r"([A-Za-z0-9._-]+)(?:\[([0-9]{1,9})-([0-9]{1,9})\])?")


def folded(names: Sequence[str]) -> str | list[str]:
    """Return the names as ranges; as they are where they are few, or not plain host names."""
    if len(names) <= FEW or not all(map(_PLAIN.fullmatch, names)):
        return list(names)
    ranges: list[list[str]] = []
    """Prefix, number of the first one, of the last one."""
    for name in names:
        split = _NUMBERED.fullmatch(name)
        prefix, number = (split[1], split[2]) if split and split[1] else (name, "")
        if ranges and number and ranges[-1][0] == prefix and ranges[-1][2]:
            first, last = ranges[-1][1:]
            if number == f"{int(last) + 1:0{len(first)}}":
                ranges[-1][2] = number
                continue
        ranges.append([prefix, number, number])
    return ",".join(p + (a if a == b else f"[{a}-{b}]") for p, a, b in ranges)


class _Range(NamedTuple):
    """The names from `first` to `last`, padded to `width` digits; a single name has no digit."""

    prefix: str
    first: int = 0
    last: int = 0
    width: int = 0

    def name(self, number: int) -> str:
        return f"{self.prefix}{number:0{self.width}}" if self.width else self.prefix

    def has(self, name: str) -> bool:
        if not self.width or not name.startswith(self.prefix):
            return name == self.prefix
        number = name[len(self.prefix) :]
        if len(number) > _MOST_DIGITS or not (number.isascii() and number.isdecimal()):
            return False
        return self.first <= int(number) <= self.last and name == self.name(int(number))


class HostList(Sequence[str]):
    """The names that `folded` has written: they take as much memory as their text."""

    __slots__ = ("_len", "_text")

    def __init__(self, text: str) -> None:
        """Read the list.

        Raises:
            ValueError: it is none, or has more than MOST names.
        """
        self._text, self._len = text, _ranges(text)[1]

    def __len__(self) -> int:
        return self._len

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and any(each.has(name) for each in _ranges(self._text)[0])

    def __iter__(self) -> Iterator[str]:
        for each in _ranges(self._text)[0]:
            yield from map(each.name, range(each.first, each.last + 1))

    def __getitem__(self, index: Any) -> Any:
        places = range(self._len)[index]
        if isinstance(places, int):
            return next(islice(self, places, None))
        return tuple(islice(self, places.start, places.stop, places.step))


@lru_cache(maxsize=8)
def _ranges(text: str) -> tuple[tuple[_Range, ...], int]:
    """Return the ranges, and how many names they have."""
    if text.count(",") >= MOST:
        raise ValueError(f"a list of {text.count(','):,} hosts")
    found = []
    for part in text.split(","):
        split = _RANGE.fullmatch(part)
        if split is None or (split[2] and int(split[2]) > int(split[3])):
            raise ValueError(f"no list of hosts: {part[:80]!r}")
        prefix, first, last = split.groups()
        found.append(_Range(prefix, int(first), int(last), len(first)) if first else _Range(prefix))
    if (names := sum(each.last - each.first + 1 for each in found)) > MOST:
        raise ValueError(f"a list of {names:,} hosts")
    return tuple(found), names
