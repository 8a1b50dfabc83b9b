"""Files that others may read at any time: complete or not at all. Needs no package.

Temporary names cannot be foreseen, are made anew and are no links: who else may write into the
directory can neither take them first nor lead a write elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path


def write_new(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file that is not there yet; `durable`: it is on the disk on return.

    Raises:
        FileExistsError: something, be it a link, has that name.
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)  # the umask decides
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Name a temporary file in the directory of `path`; at the end it is removed."""
    temp = path.with_name(f".{path.name}-{secrets.token_hex(16)}")
    try:
        yield temp
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file, complete or not at all; one that is there is replaced.

    Raises:
        OSError: the folder cannot be written; nothing is left of the attempt.
    """
    with beside(path) as temp:
        write_new(temp, content.encode() if isinstance(content, str) else content)
        temp.replace(path)


def publish(path: Path, content: bytes, *, link: Callable[[Path, Path], None] = os.link) -> bool:
    """Write a file, complete, on the disk, or not at all; return False if there was one already.

    After a lost reply of NFS False may be said of this call's own: read it.

    Raises:
        OSError: the folder cannot be written, or its file system has no hard links.
    """
    if path.exists():
        return False
    with beside(path) as temp:
        write_new(temp, content, durable=True)
        try:
            link(temp, path)
        except FileExistsError:
            return False
    return True
