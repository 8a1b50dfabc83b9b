"""Values into texts that programs read: quoted for bash, for #SBATCH lines, by default. Pure.

Templates print values through `finalize`, so every value is quoted; what is text of a script
already says so by its type, `Quoted`.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from launcher.spec.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template

TEMPLATES: Final = Path(__file__).with_name("templates")
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+=:,./^-]+")
_PLAIN_WORD: Final = re.compile(r"[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*")


class Quoted(str):
    """Text that is quoted already for the place it is printed to."""

    __slots__ = ()


def quoted(value: object) -> Quoted:
    """Return one word of bash that means `value`; what is Quoted stays as it is."""
    if isinstance(value, Quoted):
        return value
    text = str(value)
    if _PLAIN_WORD.fullmatch(text):
        return Quoted(text)
    return Quoted("'" + text.replace("'", "'\\''") + "'")


def home_path(path: str) -> Quoted:
    """Return one word of bash for a path; ~/ is the home of the user the job runs as."""
    if path.startswith("~/"):
        return Quoted('"$HOME"/' + quoted(path[2:]))
    return quoted(path)


def words(*values: object) -> Quoted:
    """Return several words of bash."""
    return Quoted(" ".join(quoted(value) for value in values))


def comment(text: str) -> Quoted:
    """Return text of ours as it follows a # of bash: one line."""
    return Quoted(" ".join(str(text).split()))


def sbatch_option(name: str, value: object = None) -> Quoted:
    r"""Return `--name=value` as it follows #SBATCH.

    No shell reads these lines: sbatch splits them itself at white space, takes what is in
    quotes together, drops the text after an open #, and takes the character after a
    backslash as it is, within quotes of either kind too (get_argument in src/sbatch/opt.c).
    `value` is one line; None: the option has none.
    """
    if value is None:
        return Quoted(f"--{name}")
    text = str(value)
    assert not re.search(r"[\0\n\r]", text), "line breaks are refused before"
    if _PLAIN.fullmatch(text):
        return Quoted(f"--{name}={text}")
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return Quoted(f'--{name}="{escaped}"')


def file_pattern(path: str | Path) -> str:
    """Return `path` as --output takes it, where % begins a replacement."""
    return str(path).replace("%", "%%")


def check_path(path: str | Path, what: str) -> str:
    r"""Return a path that scripts can carry.

    Slurm replaces nothing in a file name that has a backslash, so those are refused too.

    Raises:
        UserError: HF166, control characters, half a character, or a backslash.
    """
    text = str(path)
    if bad := re.search(r"[\x00-\x1f\x7f\\\ud800-\udfff]", text):
        raise UserError(
            "HF166",
            f"{what} {text!r} has {bad[0]!r} in it, which a Slurm script cannot carry; use "
            "another place",
        )
    return text


@cache
def template(name: str) -> Template:
    """Return a template of this package; what is undefined in it is an error."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES, followlinks=True),
        undefined=jinja2.StrictUndefined,
        finalize=quoted,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701  not HTML: `finalize` quotes for the shell
    )
    environment.filters["comment"] = comment
    return environment.get_template(name)
