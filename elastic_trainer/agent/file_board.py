"""FileBoard: the board as numbered files in one directory of a shared file system.

Version n+1 is a complete, fsynced file published by link(2) under the next
number, which succeeds for exactly one writer on every POSIX file system,
NFS and Lustre included. Nothing here relies on locks or on rename: Lustre
without flock answers ENOSYS, localflock is per node, and rename replaces.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from elastic_trainer.agent.board import Token

KEEP_VERSIONS = 64
"""Newest versions that stay, so that a reader with an old listing still finds its way."""

_STALE_TEMP_S = 3600.0
_READ_ATTEMPTS = 16
_MAGIC = b"holdfast-board-1"
_PREFIX = "v"
_TEMP_PREFIX = ".tmp-"


class BoardCorruptError(Exception):
    """A version's bytes are not what was written: the storage lost or changed data."""


class FileBoard:
    """A compare-and-swap register: `directory` holds its newest versions, one file each.

    The directory is made when it is missing. `link` is the publishing call and
    is an argument so that tests can lose its reply.
    """

    def __init__(self, directory: Path, *, link: Callable[[str, str], None] = os.link) -> None:
        self._dir = Path(directory)
        self._link = link
        self._dir.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "holdfast-file"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the newest content and its version; None when nothing was ever written.

        Raises:
            OSError: the directory cannot be read.
            BoardCorruptError: a version does not match its digest line.
        """
        for _ in range(_READ_ATTEMPTS):
            version = max(self._versions(), default=0)
            newest = None if version == 0 else self._read(version)
            if version > 0 and newest is None:
                continue  # trimmed since it was listed: list again
            # A listing may be old (NFS caches it), an open is not: look further.
            while (following := self._read(version + 1)) is not None:
                version, newest = version + 1, following
            return None if newest is None else (newest, version)
        raise OSError(
            errno.ESTALE,
            f"the listing stayed behind {_READ_ATTEMPTS} times; the file system's cache is stale",
            str(self._dir),
        )

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Publish `state` if the newest version is still `token` (None: there is none).

        Returns:
            The newest content, its version and whether this call put it there.

        Raises:
            OSError: the storage failed. Whether the swap happened is then unknown
                and the next `get_state` tells.
            BoardCorruptError: a version does not match its digest line.
        """
        base = token or 0
        newest = self.get_state()
        if (newest[1] if newest else 0) == base and self._publish(base + 1, state):
            return state, base + 1, True
        newest = self.get_state()
        return None if newest is None else (*newest, False)

    def _publish(self, version: int, state: bytes) -> bool:
        """Link a complete file as `version`; return whether this call won that number."""
        temp = self._dir / f"{_TEMP_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
        digest = hashlib.sha256(state).hexdigest().encode()
        try:
            _write_durably(temp, b" ".join((_MAGIC, digest)) + b"\n" + state)
            if not self._link_once(temp, version):
                return False
            _fsync_dir(self._dir)
            if self._was_trimmed(version):
                with contextlib.suppress(FileNotFoundError):
                    self._path(version).unlink()
                return False
            self._trim(version, temp)
            return True
        finally:
            with contextlib.suppress(OSError):  # an orphan is removed by a later trim
                temp.unlink()

    def _link_once(self, temp: Path, version: int) -> bool:
        """Return whether `temp` now has a second name; NFS may lose the reply of a success.

        A retransmitted link answers EEXIST for our own file, so the link count
        decides in every case of an error.
        """
        try:
            self._link(str(temp), str(self._path(version)))
        except OSError as error:
            fd = os.open(temp, os.O_RDONLY | os.O_CLOEXEC)  # an open revalidates attributes
            try:
                if os.fstat(fd).st_nlink > 1:
                    return True
            finally:
                os.close(fd)
            if error.errno == errno.EEXIST:
                return False
            raise
        return True

    def _was_trimmed(self, version: int) -> bool:
        """Return whether `version` may be a number that was used and trimmed before.

        A writer that slept between reading and linking can win such a number. It
        was trimmed only after KEEP_VERSIONS newer ones came, and after its base.
        """
        base_gone = version > 1 and self._read(version - 1) is None  # opens: never from a cache
        return base_gone or max(self._versions(), default=0) >= version + KEEP_VERSIONS

    def _trim(self, newest: int, temp: Path) -> None:
        """Remove old versions, oldest first (`_was_trimmed` relies on it), and orphaned temps."""
        with contextlib.suppress(OSError):  # housekeeping; the next swap tries again
            for version in sorted(self._versions()):
                if version > newest - KEEP_VERSIONS:
                    break
                self._path(version).unlink(missing_ok=True)
            now = temp.stat().st_mtime  # the file server's clock, as the orphans' times are
            for orphan in self._dir.glob(f"{_TEMP_PREFIX}*"):
                if now - orphan.stat().st_mtime > _STALE_TEMP_S:
                    orphan.unlink(missing_ok=True)

    def _versions(self) -> list[int]:
        names = (path.name for path in self._dir.iterdir())
        return [int(n[1:]) for n in names if n.startswith(_PREFIX) and n[1:].isdigit()]

    def _path(self, version: int) -> Path:
        return self._dir / f"{_PREFIX}{version:012d}"

    def _read(self, version: int) -> bytes | None:
        """Return the content of `version`; None when there is no such file."""
        path = self._path(version)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # trimmed while it was read, as NFS says it
                return None
            raise
        header, _, state = raw.partition(b"\n")
        expected = b" ".join((_MAGIC, hashlib.sha256(state).hexdigest().encode()))
        if header != expected:
            raise BoardCorruptError(
                f"{path} is damaged ({len(raw)} bytes, digest line {header[:90]!r}): the storage "
                "changed data that was fsynced. Check the file system; removing this one file "
                "makes the board fall back to the version before it"
            )
        return state


def _write_durably(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
