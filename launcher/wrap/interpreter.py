"""Which Python a torchrun or an activated environment means, and whether agents can run in it.

`python -m launcher.wrap.interpreter FOLDER` prints the one of an environment, for batch scripts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART
from elastic_trainer.storage.typed import parse_json
from launcher.platforms.installed import DISTRIBUTION, install_line, installed_version
from launcher.spec.errors import UserError

_ASK: Final = f"""
import json, sys
sys.path[:] = [path for path in sys.path if path]
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
def version_of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
print(json.dumps({{
    "prefix": sys.prefix, "version": version_of("{DISTRIBUTION}"),
    "missing": [name for name in ("elastic_trainer", "launcher", "torch") if not find_spec(name)],
}}))
"""
_ASK_S: Final = 60.0
_PYTHON: Final = re.compile(r"python[0-9.]*")
_SHEBANG: Final = re.compile(r"#!\s*(?:\S*/env\s+)?(\S+)|'''exec' \"?([^\"\s]+)")
"""The second form follows #!/bin/sh where the path is too long for the kernel (pip's distlib)."""


def python_here() -> str:
    """Return this process's interpreter and its torch, for a log."""
    return f"{sys.executable} (torch {installed_version('torch') or 'of a checkout'})"


def agents_python(word: str) -> str:
    """Return the interpreter that agents run in: that of `word`, or this one.

    `word` is a torchrun, the Python that runs its module, or the folder of an environment.

    Raises:
        UserError: HF678, agents cannot run in it.
    """
    python = python_of(word)
    if python is None:
        return sys.executable
    prefix, theirs, missing = _ask(python)
    if prefix == sys.prefix:
        return sys.executable
    mine = f"holdfast runs in {sys.prefix}"
    if missing:
        message = f"{word} means {python}, which has no {', '.join(missing)}, and {mine}"
        fix = f"run {install_line()} there, or name the torchrun of {sys.prefix}"
        raise UserError("HF678", f"{message}: {fix}")
    if theirs != (own := installed_version()):
        message = f"{word} means {python}, which has holdfast {theirs}, and {mine}, {own}"
        raise UserError("HF678", f"{message}: install the same version in both")
    return python


def python_of(word: str) -> str | None:
    """Return the interpreter that `word` runs, see `agents_python`; None: there is no such file."""
    if (folder := Path(word)).is_dir():
        word = str(folder / "bin" / "python")
    if (found := shutil.which(word)) is None:
        return None
    path = Path(found).absolute()
    if _PYTHON.fullmatch(path.name):
        return str(path)
    with path.open("rb") as file:
        head = file.read(2048).decode(errors="replace").split("\n")[:2]
    for line in reversed(head):
        if match := _SHEBANG.match(line):
            interpreter = match[1] or match[2] or ""
            if _PYTHON.fullmatch(Path(interpreter).name):
                return shutil.which(interpreter)
    beside = path.with_name("python")
    return str(beside) if beside.exists() else None


def _ask(python: str) -> tuple[str, str, list[str]]:
    """Return an interpreter's prefix, its holdfast's version, and packages that agents lack."""
    try:
        done = subprocess.run(
            [python, "-c", _ASK],
            capture_output=True,
            text=True,
            check=False,
            timeout=_ASK_S,
            stdin=subprocess.DEVNULL,
        )
        said = parse_json(done.stdout)
        return str(said["prefix"]), str(said["version"]), [*map(str, said["missing"])]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError) as error:
        message = f"{python} cannot be asked what it has: {error}"
        raise UserError("HF678", f"{message}; is it the right Python?") from error


def main(environment: str) -> int:
    """Print the interpreter of an environment; return 0, or 93 where agents cannot run in it."""
    try:
        sys.stdout.write(f"{agents_python(environment)}\n")
    except UserError as error:
        sys.stderr.write(f"holdfast: error: {error}\n")
        return EXIT_DO_NOT_RESTART
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
