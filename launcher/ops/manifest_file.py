"""`holdfast check` on a file of Kubernetes manifests."""

from __future__ import annotations

import re
from pathlib import Path

from launcher.errors import Problem, UserError, Where

_LOOKS = re.compile(r"""^["']?apiVersion["']?\s*:|^\s*[{].{0,200}"apiVersion"\s*:""", re.MULTILINE)
_EDGE_CHARS = 1 << 20


def is_manifest_file(path: str) -> bool:
    """Return whether a file looks like manifests, not like a job file; False: it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return bool(_LOOKS.search(file.read(_EDGE_CHARS)))
    except (OSError, ValueError):
        return False


def check_manifests(path: str) -> tuple[list[Problem], list[str]]:
    """Lint a file of manifests.

    Returns:
        The warnings, and kind/name of every document.

    Raises:
        UserError: HF001 to HF003 it cannot be read; or every mistake found in it.
    """
    from launcher.render.kubernetes_lint import lint
    from launcher.render.kubernetes_yaml import read_manifests

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError("HF001", f"cannot be read: {reason}", where=Where(path)) from error
    documents, lines = read_manifests(text, path)
    found = lint(documents, path, lines)
    mistakes = [problem for problem in found if not problem.is_warning]
    if mistakes:
        raise UserError.many(found)
    names = [f"{each['kind']}/{each['metadata']['name']}" for each in documents]
    return found, names
