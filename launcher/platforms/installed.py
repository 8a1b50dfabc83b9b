"""This distribution as it is installed, and packages that single commands need."""

from __future__ import annotations

import importlib.util
import shlex
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from launcher.spec.errors import UserError

DISTRIBUTION: Final = "holdfast-ml"
"""Its name for pip. On PyPI `holdfast` is another project."""


def installed_version(distribution: str = "") -> str:
    """Return the installed version, by default of this distribution; empty: it is a checkout."""
    try:
        return version(distribution or DISTRIBUTION)
    except PackageNotFoundError:
        return ""


def install_line(extra: str = "") -> str:
    """Return the command that installs this distribution with an extra.

    Once installed, from a wheel or a checkout, its name is enough: pip then looks for no other.
    """
    what = DISTRIBUTION if installed_version() else Path(__file__).parents[2]
    return f"pip install {shlex.quote(f'{what}[{extra}]' if extra else str(what))}"


def need(what: str, *packages: str, extra: str = "") -> None:
    """Check that the packages that `what` needs can be imported (HF632).

    `extra` is this distribution's extra with them; empty: it always needs them.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise UserError(
                "HF632", f"{what} needs {package}, which is not here: {install_line(extra)}"
            )
