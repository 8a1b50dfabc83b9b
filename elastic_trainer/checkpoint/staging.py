"""A directory that appears whole or not at all; and counting bytes while it is made."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_trainer.checkpoint.errors import CheckpointError, InputError

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_STORAGE_ERRORS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there or raise the quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "mount it writable",
    errno.EACCES: "grant the permission",
    errno.EPERM: "grant the permission",
}


class ByteCount:
    """Adds up bytes and reports them, never more than all: files have headers besides."""

    def __init__(self, report: Progress, total_bytes: int) -> None:
        self._report, self._total_bytes, self._done_bytes = report, total_bytes, 0

    def add(self, size_bytes: int) -> None:
        """Count `size_bytes` more."""
        self._done_bytes = min(self._total_bytes, self._done_bytes + size_bytes)
        self._report(self._done_bytes, self._total_bytes)


@contextmanager
def appearing(target: Path, *, what: str, may_be_empty: bool) -> Iterator[Path]:
    """Yield a directory to fill beside `target`; at the end it becomes `target`.

    Everything in it is on the disk before it gets the name. When the body
    raises, it is removed; when the process is killed, a directory stays whose
    name begins with a dot and ends in `.partial-...`, which nothing reads.

    Args:
        target: must not exist; parents are made.
        what: for messages, as `--out`.
        may_be_empty: an empty directory may be there already.

    Raises:
        InputError: HF321, `target` is there already.
        CheckpointError: HF322, it cannot be written.
    """
    target = target.absolute()
    _refuse_existing(target, what, may_be_empty=may_be_empty)
    temp = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir()
        yield temp
        _fsync_tree(temp)
        _refuse_existing(target, what, may_be_empty=may_be_empty)  # made meanwhile
        temp.rename(target)
        fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(temp, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
            raise not_writable(target, error.strerror or str(error), error.errno) from error
        raise


def not_writable(target: Path, reason: str, number: int | None = None) -> CheckpointError:
    """Return the error that `target` cannot be written because of `reason`."""
    advice = _STORAGE_ERRORS.get(number or 0, "free space there, see that it is writable")
    return CheckpointError(
        "HF322", f"{target} cannot be written ({reason}): {advice}, or choose another place"
    )


def fsync(path: Path) -> None:
    """Bring a file's or directory's content to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_tree(top: Path) -> None:
    """Bring a tree to the disk; no link in it is followed."""
    for directory, _, files in os.walk(top):
        for file in files:
            fsync(Path(directory, file))
        fsync(Path(directory))


def _refuse_existing(target: Path, what: str, *, may_be_empty: bool) -> None:
    if not os.path.lexists(target):
        return
    if may_be_empty and target.is_dir() and not any(target.iterdir()):
        return
    state = "is not an empty directory" if may_be_empty else "is there already"
    raise InputError("HF321", f"{what}: {target} {state}: name a new one; nothing was changed")
