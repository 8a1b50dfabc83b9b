"""Reads files that somebody else made: plain ones only, and no more of them than is sane.

A pipe would block, a device never ends, and a link may lead to either.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Final

MAX_JSON_BYTES: Final = 256 << 20
"""No JSON file of a run or a model is longer: job.json has 200 KB, a manifest 150 bytes a file."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a plain file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a plain file.

    Raises:
        OSError: as `open_regular`; or it is longer than `max_bytes`.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", str(path))
        return file.read()
