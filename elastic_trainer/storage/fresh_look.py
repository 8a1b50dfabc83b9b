"""Looking things up on a file system that remembers what was not there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def look_afresh(directory: Path) -> None:
    """Have the next look-ups in `directory` find what the server has by now.

    Clients of NFS remember for 30 to 60 s (`acdirmin`, `acdirmax`) that a name was not there. To
    open the directory is to ask the server for its attributes (close-to-open consistency, so not
    with `nocto`), and once these have changed no absence that is remembered counts.

    A directory that cannot be opened passes: the look-up says why.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
