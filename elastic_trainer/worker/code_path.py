"""Where a worker imports a job's own modules from: the frozen copy, never the folder it came from.

Pure. The agent tells its workers by two environment variables; see
launcher/runs/submitting/freeze.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Final

CODE: Final = "HOLDFAST_CODE"
"""The frozen copy, absolute; unset where nothing was frozen."""
SOURCE: Final = "HOLDFAST_CODE_SOURCE"
"""The folder it was copied from, absolute."""


def frozen_entry(entry: str, env: Mapping[str, str]) -> str:
    """Return an entry of `sys.path`; one within the source is that of the copy."""
    code, source = env.get(CODE), env.get(SOURCE)
    if not code or not source:
        return entry
    path = PurePath(entry)
    # The copy may lie within the source, as ./runs does by default.
    if path.is_relative_to(code) or not path.is_relative_to(source):
        return entry
    return str(PurePath(code) / path.relative_to(source))


def frozen_path(entries: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return `sys.path` with the frozen copy in place of its source, and at the end.

    At the end, so that no module of the job shadows a library, yet before what an editable
    install (`pip install -e`) would find in the source: its finder is asked last.
    """
    code = env.get(CODE)
    if not code:
        return list(entries)
    path = [frozen_entry(entry, env) for entry in entries]
    return path + [entry for entry in (code, str(PurePath(code) / "src")) if entry not in path]


def frozen_python_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH of a worker that is started by exec; empty: as it is.

    Python has no way to add to the end of its path from outside, so the copy is not added
    where the job did not have its source there.
    """
    given = env.get("PYTHONPATH")
    if not given or not env.get(CODE):
        return {}
    entries = given.split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(frozen_entry(entry, env) for entry in entries)}
