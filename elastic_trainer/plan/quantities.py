"""Counts and sizes as people read them: `1 node`, `2,048 nodes`, `8.86 TiB`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_BYTES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def counted(number: int, noun: str) -> str:
    """Return `1 node` or `2,048 nodes`; the plural of `noun` ends in s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sized(num_bytes: float) -> str:
    """Return a size with three digits, in the largest binary unit that it fills."""
    return scaled(num_bytes, _BYTES, 1024)


def scaled(number: float, units: Sequence[str], base: int) -> str:
    """Return `number` with three digits and its unit, never with an exponent.

    Args:
        number: not negative.
        units: the smallest first, each `base` times the one before.
        base: 1000 or 1024.
    """
    power = 0
    while power + 1 < len(units) and number >= base - 0.5:
        number, power = number / base, power + 1
    digits = 0 if number >= 99.95 or power == 0 else 1 if number >= 9.995 else 2
    text = f"{number:,.{digits}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {units[power]}".rstrip()
