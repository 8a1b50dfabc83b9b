"""What the launcher and a pod agree on when files of a run go over the wire. Pure.

`launcher/node/files.py` is the pod's side, `launcher/platforms/kubernetes/files.py` the launcher's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

FETCHED: Final = ("attempts", "board", "events", "ledger", "logs", "nodes")
"""Folders of a run that its nodes write and people read."""
GROWING: Final = ("events", "ledger", "logs", "nodes")
"""Folders whose files only grow, so that their ends are enough."""
STARTS: Final = "pods"
"""Folder of a run in which its pods count their starts; runs of other platforms have none."""
END: Final = ".holdfast-end"
"""Name of the last member of a tar: it is whole."""
OFFSET: Final = "HOLDFAST.offset"
"""Pax header: byte of the file where the member begins."""
INODE: Final = "HOLDFAST.inode"
"""Pax header: a new file of the same name has another."""
MTIME: Final = "HOLDFAST.mtime"
"""Pax header: nanoseconds since 1970."""
IN_USE: Final = 3
"""Exit code of `put`: the folder has a run already."""


def safe_parts(name: str, folders: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the parts of a relative path that stays where it begins, in one of `folders` if any.

    Raises:
        ValueError: it leads elsewhere.
    """
    parts = PurePosixPath(name).parts
    bad = not parts or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name
    if bad or (folders and (parts[0] not in folders or len(parts) < 2)):
        raise ValueError(f"a path that leads elsewhere: {name!r}")
    return parts


ATTEMPT: Final = re.compile(r"[0-9]+(\.[0-9]+)?|[a-z][-a-z0-9]*-[0-9]+\.[0-9]+")
"""Folders of logs: 3 of a local run, 17.3 for the third requeue of a Slurm job, tiny-0.2 for the
second generation of the pods that a submission to Kubernetes had."""


def attempt_order(name: str) -> list[int]:
    """Return what sorts the names of a run's attempts, oldest first."""
    return [int(number) for number in re.findall(r"[0-9]+", name)[-2:]]
