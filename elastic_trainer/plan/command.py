"""`command:` of a job file: what the workers run instead of the built-in trainer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

UNKNOWN_STEPS: Final = 10**12
"""`train.steps` of a command whose job file does not say it."""
_NOT_A_SCRIPT: Final = ("python", "python3", "torchrun", "holdfast", "holdfast-agent", "srun")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line, taken apart."""

    kind: str
    """`script`, `module` or `command` (an executable)."""
    target: str
    """Path of the script, name of the module or of the executable."""
    args: tuple[str, ...]
    """With placeholders, see templates.py."""
    fresh: bool = False
    """Never forked from the warm process."""


def split_command(words: Sequence[str]) -> Command:
    """Take a command line apart: `[-m | --no-python] [--fresh] TARGET [ARG]...`.

    Raises:
        ValueError: with what is wrong and how to fix it.
    """
    kind, fresh, rest = "script", False, list(words)
    while rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag == "--fresh":
            fresh = True
        elif kind != "script":
            raise ValueError(f"{flag}: only one of -m and --no-python, before the script")
        elif flag in ("-m", "--module"):
            kind = "module"
        elif flag in ("--no-python", "--no_python"):
            kind = "command"
        else:
            raise ValueError(
                f"{flag}: before the script only -m, --no-python and --fresh; the rest of "
                "torchrun's flags is in the job file's sections"
            )
    if not rest:
        raise ValueError("expected a script and its arguments, found none")
    target, *args = rest
    if kind == "script" and PurePath(target).name in _NOT_A_SCRIPT:
        raise ValueError(
            f"leave {target} out: the command is the script and its arguments, as under "
            "torchrun; for an executable begin with --no-python"
        )
    return Command(kind=kind, target=target, args=tuple(args), fresh=fresh)
