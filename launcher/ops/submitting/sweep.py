"""`--sweep KEY=V1,V2`: the values of each task of an array. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from launcher.errors import UserError

MAX_TASKS = 1000
"""Slurm's own default limit, MaxArraySize, is 1001."""

Values = dict[str, str]
"""Key of the job file -> value, as --set takes them."""


def sweep_tasks(texts: Sequence[str]) -> list[Values]:
    """Return the values of each task: every combination, the last key changing fastest.

    Args:
        texts: arguments of `--sweep`; commas within brackets, braces or quotes do not part.

    Raises:
        UserError: HF654 one of another form, a key twice, or too many tasks.
    """
    choices: dict[str, list[str]] = {}
    for text in texts:
        key, equals, rest = text.partition("=")
        key = key.strip()
        values = [value.strip() for value in _parts(rest)]
        if not equals or not key or not all(values):
            raise UserError(
                "HF654",
                f"--sweep {text!r}: expected KEY=V1,V2, as train.optimizer.lr=1e-4,3e-4",
            )
        if key in choices:
            raise UserError("HF654", f"--sweep {key} is there twice; put all its values into one")
        twice = [value for value in values if values.count(value) > 1]
        if twice:
            raise UserError("HF654", f"--sweep {key}: the value {twice[0]} is there twice")
        choices[key] = values
    count = 1
    for values in choices.values():
        count *= len(values)
    if count > MAX_TASKS:
        raise UserError(
            "HF654", f"--sweep makes {count:,} tasks, at most {MAX_TASKS:,} are allowed; split it"
        )
    combinations = itertools.product(*choices.values())
    return [dict(zip(choices, values, strict=True)) for values in combinations]


def as_sets(values: Values) -> list[str]:
    """Return values as arguments of `--set`."""
    return [f"{key}={value}" for key, value in values.items()]


def _parts(text: str) -> list[str]:
    """Split at the commas that are in no bracket and no quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "," and depth <= 0:
            parts.append(text[start:index])
            start = index + 1
    return [*parts, text[start:]]
