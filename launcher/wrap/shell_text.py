"""What the text of a shell command says before a shell has filled it in. Pure.

For manifests; batch scripts are not read: their launches are seen when they are run.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from launcher.spec.errors import UserError
from launcher.spec.secret_forms import leaks
from launcher.wrap.launches import (
    TORCHRUN,
    UNKNOWN,
    find_torchrun,
    shutdown_timeout_of,
    torchrun_arguments,
    unused,
)
from launcher.wrap.sruns import cannot_wrap, srun_of

OUTPUT: Final = re.compile(
    r"(?:(?:\s+\d+|\s*&|\s*)(?:>>|>\||[<>]&|>|<(?!<))\s*[^\s<>|]+)*\s*(?:\|.*|#[^\n]*)?", re.DOTALL
)
"""What may follow a command: where its input and output are, and a pipe, or a comment."""
_OPENING: Final = {
    '"': '"',
    "`": "`",
    "$(": ")",
    "<(": ")",
    ">(": ")",
    "(": ")",
    "${": "}",
    "$'": "'",
}
"""What begins a quote or an expansion -> what ends it."""
_ESCAPED: Final = re.compile(r"\\.|\\\Z", re.DOTALL)
_UNREAD: Final = re.compile(r"'[^']*'|(?<!\S)#[^\n]*")
_MOST_DEPTH: Final = 20
_EXPANSION: Final = re.compile(
    r"\$\(\([^()]*\)\)|\$\([^()]*\)|\$\{[^{}]*\}|`[^`]*`|\$\w+|\$[@*#?!-]"
)


def hidden(command: str) -> str:
    """Return a command of the same length with x for what a shell does not read as its words.

    That is what is in quotes, in $(…), in >(…) or in a comment, whose # stays. The end of a line
    that continues becomes blanks.
    """
    shown, at = "", 0
    while at < len(command):
        end = _end_of(command, at) or at + 1
        part, at = command[at:end], end
        if part == "\\\n":
            shown += "  "
        elif len(part) == 1:
            shown += part
        else:
            shown += "#".ljust(len(part), "x") if part[0] == "#" else "x" * len(part)
    return shown


def _end_of(text: str, at: int, around: str = "", depth: int = 0) -> int | None:
    """Return where the quote, expansion, comment or character at `at` ends; None: nowhere.

    `around` is what begins the part that `at` is in, `depth` the number of such parts around it.
    """
    if escaped := _ESCAPED.match(text, at):
        return escaped.end()
    if around != '"' and (ended := _UNREAD.match(text, at)):
        return ended.end()
    opening = next((each for each in _openings(around) if text.startswith(each, at)), None)
    if opening is None:
        return at + 1
    at += len(opening)
    while depth < _MOST_DEPTH and at < len(text):
        if text[at] == _OPENING[opening]:
            return at + 1
        end = _end_of(text, at, opening, depth + 1)
        if end is None:
            break
        at = end
    return None


def _openings(around: str) -> Iterator[str]:
    """Yield what may begin within `around`."""
    for each in _OPENING if around != "$'" else ():
        of_words = around != '"' and (each != "(" or around.endswith("("))
        if of_words or each in ("$(", "${", "`"):
            yield each


def output_at(bare: str) -> int:
    """Return where in a `hidden` command its redirections, its pipe or its comment begin."""
    found = re.search(r"\s+\d+[<>]|\s*&>|\s*[<>|]|\s#", bare)
    return found.start() if found else len(bare)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandText:
    """What a command's text says before a shell has filled it in."""

    torchrun: str | None = None
    """Its word, or that of the Python that runs it; None: it is not known."""
    shutdown_timeout_s: float | None = None
    notes: tuple[str, ...] = ()
    """What is not used, a line each."""


def try_out(command: str) -> CommandText:
    """Refuse what `launch_of` would, as far as the text of a command says, before a job waits.

    Raises:
        UserError: HF169; HF163 a secret in it, which would be kept in job.json.
    """
    flat, before = command.replace("\\\n", " "), ""
    while flat != before:
        before, flat = flat, _EXPANSION.sub(UNKNOWN, flat)
    try:
        argv = shlex.split(flat)
    except ValueError:
        return CommandText()  # bash has more quotes
    for leak in leaks(argv):
        message = f"the command holds what looks like {leak.what}, and is kept in job.json"
        raise UserError("HF163", f"{message}: let the program read a variable or a file")
    if (found := find_torchrun(argv)) is None:
        if any(TORCHRUN.search(word) for word in argv):
            cannot_wrap("torchrun is within quotes; srun must start it itself")
        return CommandText()
    options, _ = srun_of([word for word in argv[1 : found[0]] if UNKNOWN not in word])
    options.check()
    given = torchrun_arguments(argv, found[1])
    return CommandText(
        torchrun=None if UNKNOWN in argv[found[0]] or options.in_container else argv[found[0]],
        shutdown_timeout_s=shutdown_timeout_of(given.shutdown_timeout),
        notes=unused(options, {}, given),
    )
