"""Files that others may read at any time: complete or not at all. Needs no package.

Temporary names cannot be foreseen, are made anew and are no links: who else may write into the
directory can neither take them first nor lead a write elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from elastic_trainer.storage.fresh_look import look_afresh

CLAIM_S: Final = 5.0
"""Without hard links: whoever has the right to write a file has died if it takes so long."""
_POLL_S: Final = 0.02
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
"""What file systems without hard links say, by their kind."""


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


def publish(
    path: Path,
    content: bytes,
    *,
    link: Callable[[Path, Path], None] = os.link,
    claim_s: float = CLAIM_S,
) -> bool:
    """Write a file, complete, on the disk, or not at all; return False if there was one already.

    After a lost reply of NFS False may be said of this call's own: read it.

    A file system without hard links holds a run only where board and secret are in Kubernetes
    (`storage_probe`). There the right to write goes to whoever makes an empty file (`_claimed`).

    Args:
        path: of the file.
        content: of the file.
        link: the publishing call; an argument for tests.
        claim_s: see CLAIM_S.

    Raises:
        OSError: the folder cannot be written.
    """
    if path.exists():
        return False
    with beside(path) as temp:
        write_new(temp, content, durable=True)
        try:
            link(temp, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _claimed(path, temp, claim_s)
    return True


def _claimed(path: Path, temp: Path, claim_s: float) -> bool:
    """Rename `temp` to `path` if this call makes an empty file first; return whether it did.

    An empty file is complete at once, and O_EXCL gives it to one of many. The others wait for
    `path`; if it does not come, its writer has died, and the next claim is free. Only one that is
    halted for `claim_s` right before its rename can still replace what came after it.
    """
    for turn in itertools.count():
        claim = path.with_name(f".{path.name}.claim-{turn}")
        try:
            write_new(claim, b"")
        except FileExistsError:
            if _comes(path, claim_s):
                return False
            continue
        try:
            if there := not path.exists():
                temp.replace(path)
        finally:
            claim.unlink(missing_ok=True)
        return there
    raise AssertionError("claims are counted without end")


def _comes(path: Path, for_s: float) -> bool:
    """Wait for a file that another process is about to write; return whether it came."""
    deadline = time.monotonic() + for_s
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
        look_afresh(path.parent)
    return True
