"""`command:` of a job file: what workers run instead of the trainer, and its placeholders. Pure.

Placeholders in arguments are filled from the rung of each epoch. `{dp}` becomes the degree of this
epoch; `{{dp}}` is the text `{dp}`. Only braces around a name mean anything, so JSON passes through
as it is. torchrun's `${local_rank}` is known too, and doubled it is the text; other `${...}` are
left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from elastic_trainer.plan.ladder import Rung

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
    """With placeholders."""
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


# --- placeholders ---------------------------------------------------------------------

NAMES: Final = ("dp", "tp", "pp", "cp", "nodes", "world_size", "run_dir")
"""What may be in braces: degrees and sizes of the epoch, and the job's folder."""

_FIELD = re.compile(
    r"(?P<rank>\$\{local_rank\})|(?P<no_rank>\$\{\{local_rank\}\})"
    r"|\$\{\{?[A-Za-z_]\w*\}?\}"  # another tool's
    r"|\{\{(?P<literal>[A-Za-z_]\w*)\}\}"
    r"|\{(?P<name>[A-Za-z_]\w*)\}"
)
_GIVEN = re.compile(
    r"\$(?P<dollar>\$(?:\{\{?[A-Za-z_]\w*\}?\})?)"
    r"|(?P<rank>\$\{local_rank\}|\$local_rank(?![A-Za-z0-9_]))"
    r"|\$\{\{?[A-Za-z_]\w*\}?\}"
    r"|\{\{?[A-Za-z_]\w*\}?\}"
)
"""What `fill` or torchrun would take for more than text."""


def names_in(args: Sequence[str]) -> list[str]:
    """Return the names in braces, in order, once each."""
    found = (match["name"] for text in args for match in _FIELD.finditer(text))
    return list(dict.fromkeys(name for name in found if name))


def unknown_names(args: Sequence[str]) -> list[str]:
    """Return the names in braces that nothing is known to fill, in order, once each."""
    return [name for name in names_in(args) if name not in NAMES]


def preset(args: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return `args` with the names of `values` filled in; all else stays for `fill`."""
    return tuple(
        _FIELD.sub(lambda match: values.get(match["name"] or "", match[0]), text) for text in args
    )


def literal(args: Sequence[str]) -> tuple[str, ...]:
    """Return `args` of a command line, as `fill` takes them, so that it does what torchrun does.

    No job file gives values there: anything in braces is text but for one of `NAMES`. torchrun
    also takes `$local_rank`, and `$$` for the text `$` (string.Template, by
    torch.distributed.elastic.utils.macros).
    """

    def taken(match: re.Match[str]) -> str:
        if match["rank"]:
            return "${local_rank}"
        text = match["dollar"] or match[0]
        name = text.strip("${}")
        is_filled = (name == "local_rank") if text[0] == "$" else (name in NAMES)
        if is_filled == (text[0] == "$"):  # text here, and more to `fill`
            return text.replace("{", "{{", 1).replace("}", "}}", 1)
        return text

    return tuple(_GIVEN.sub(taken, text) for text in args)


def explain(name: str) -> str:
    """Return what to tell whoever wrote the unknown placeholder `name`."""
    known = " ".join(f"{{{each}}}" for each in NAMES)
    return (
        f"{{{name}}} is unknown; {known} are filled in for each epoch; for the text itself "
        f"write {{{{{name}}}}}"
    )


def values_of(rung: Rung, run_dir: str) -> dict[str, int | str]:
    """Return name -> value in an epoch that runs `rung`.

    `run_dir` is the folder of the job's record, on storage that all nodes share.
    """
    degrees = {axis: getattr(rung.layout, axis) for axis in ("dp", "tp", "pp", "cp")}
    sizes = {"nodes": rung.num_nodes, "world_size": rung.layout.world_size}
    return {**degrees, **sizes, "run_dir": run_dir}


def fill(
    args: Sequence[str], values: Mapping[str, int | str], *, local_rank: int | None = None
) -> tuple[str, ...]:
    """Return `args` with their placeholders filled in.

    Args:
        args: as the user wrote them, without unknown names.
        values: name -> value, see `values_of`.
        local_rank: of the worker they are for.
    """

    def value_of(match: re.Match[str]) -> str:
        if match["literal"]:
            return f"{{{match['literal']}}}"
        if match["name"]:
            return str(values[match["name"]])
        if match["no_rank"]:
            return "${local_rank}"
        if match["rank"] and local_rank is not None:
            return str(local_rank)
        return match[0]

    return tuple(_FIELD.sub(value_of, text) for text in args)
