"""FileBoard: the board as numbered files in one directory of a shared file system.

Version n+1 is a complete, fsynced file published by link(2) under the next number, which succeeds
for exactly one writer on every POSIX file system, NFS and Lustre included. Locks and rename are not
used: Lustre without flock answers ENOSYS, localflock is per node, and rename replaces.

**Damage.** The storage lost or changed bytes of a version that does not match its digest: a lying
disk, a power loss. Its writer and earlier readers know its content and may swap upon it: a live
coordinator's beat puts a whole version above within seconds. So a reader first waits. If nobody
comes, that swap is lost and reported: the newest whole version below counts, its epoch raised
(`after_damage`), under the damaged one's number, so that the next swap comes on top. The damaged
file is kept as `damaged-<number>`. The board raises only if no version is whole.

**Removal.** A removed folder is an empty board, and the next swap makes it again; but not where its
file system is gone, for files in its place would be another board.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import re
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elastic_trainer.board.state import Token, after_damage
from elastic_trainer.storage.files import fsync, read_regular, skipped, write_new

KEEP_VERSIONS = 64
"""Newest versions kept, for readers with an old listing."""

HEAL_S: Final = 8.0
"""How long a reader of a damaged version waits for a newer one: longer than `lease_renew_s`."""

_HEAL_POLL_S = 0.1
_STALE_TEMP_S = 86400.0
"""More than clocks differ: Lustre's servers keep their clients' times."""
_READ_ATTEMPTS = 16
_MAGIC = b"holdfast-board-1"
_PREFIX = "v"
_TEMP_PREFIX = ".tmp-"
_DAMAGED_PREFIX = "damaged-"
_NO_FILE: Final = {errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENXIO, errno.EFBIG}
"""Of what stands in a version's place and is no file that anybody has written."""


class _Absent(enum.Enum):
    """Why a version has no content."""

    GONE = "gone"
    DAMAGED = "damaged"


_GONE, _DAMAGED = _Absent.GONE, _Absent.DAMAGED


class BoardCorruptError(OSError):
    """The storage lost or changed every version."""


class FileBoard:
    """A compare-and-swap register: its newest versions are files in `directory`.

    Args:
        directory: of this board alone; made if it is missing.
        link: the publishing call; an argument so that tests can lose its reply.
        heal_s: see HEAL_S.
        on_damage: called with a sentence when damage cost a swap.
        repair: returns what counts then; see `after_damage`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        link: Callable[[str, str], None] = os.link,
        heal_s: float = HEAL_S,
        on_damage: Callable[[str], None] = lambda _: None,
        repair: Callable[[bytes | None, int], bytes] = after_damage,
    ) -> None:
        self._dir = Path(directory)
        self._link, self._heal_s, self._on_damage, self._repair = link, heal_s, on_damage, repair
        self._dir.mkdir(parents=True, exist_ok=True)
        self._device = self._dir.stat().st_dev

    @property
    def name(self) -> str:
        """Name of the backend."""
        return "holdfast-file"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the newest content and its version; None: nothing was ever written.

        Takes up to `heal_s` if the newest version is damaged.

        Raises:
            OSError: the directory cannot be read.
            BoardCorruptError: no version matches its digest line.
        """
        deadline = time.monotonic() + self._heal_s
        while True:
            version = self._newest()
            if version == 0:
                return None
            content = self._read(version)
            if isinstance(content, bytes):
                return content, version
            if content is _GONE:
                continue  # trimmed since it was found: look again
            if time.monotonic() >= deadline:
                return self._before(version), version
            time.sleep(_HEAL_POLL_S)

    def _newest(self) -> int:
        """Return the number of the newest version, whole or damaged; 0: none."""
        for _ in range(_READ_ATTEMPTS):
            version = max(self._listed(), default=0)
            if version > 0 and self._read(version) is _GONE:
                continue  # trimmed since it was listed: list again
            # A listing may be old (NFS caches it): look further. Absent names are cached too, but
            # not past the opening of the directory for the listing above.
            while self._read(version + 1) is not _GONE:
                version += 1
            return version
        raise OSError(
            errno.ESTALE,
            f"the listing stayed behind {_READ_ATTEMPTS} times; the file system's cache is stale",
            str(self._dir),
        )

    def _before(self, damaged: int) -> bytes:
        """Return what counts in place of version `damaged`, upon which nobody swapped."""
        whole, content = damaged - 1, self._read(damaged - 1)
        while content is _DAMAGED:
            whole -= 1
            content = self._read(whole)
        if content is _GONE and whole > 0:
            raise BoardCorruptError(
                errno.EIO,
                f"versions {whole + 1} to {damaged} of the board are damaged and no older one is "
                "left: the storage changed data that was fsynced. Check the file system; put the "
                "board's files back from a copy, or start another run from a checkpoint",
                str(self._dir),
            )
        fallen_back = self._repair(content if isinstance(content, bytes) else None, damaged - whole)
        kept = self._dir / f"{_DAMAGED_PREFIX}{damaged:012d}"
        with contextlib.suppress(OSError):
            os.link(self._path(damaged), kept)
        self._on_damage(
            f"version {damaged} of the board {self._dir} is damaged, the storage changed data that "
            f"was fsynced: version {whole} counts, what came after it is lost ({kept.name} is kept)"
        )
        return fallen_back

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Publish `state` if the newest version is still `token`; see `Board`.

        Raises:
            OSError: the storage failed; only the next `get_state` tells whether the swap happened.
            BoardCorruptError: no version matches its digest line.
        """
        base = token or 0  # another backend's token is a text, and equals no number
        # Not its content: a writer that knows a damaged version's may put a whole one above it.
        if isinstance(base, int) and self._newest() == base and self._publish(base + 1, state):
            return state, base + 1, True
        newest = self.get_state()
        return None if newest is None else (*newest, False)

    def _publish(self, version: int, state: bytes) -> bool:
        """Link a complete file as `version`; return whether this call won the number."""
        temp = self._dir / f"{_TEMP_PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
        except PermissionError as error:
            raise FileNotFoundError(
                errno.ENOENT, f"removed, and cannot be made again ({error})", str(self._dir)
            ) from error
        digest = hashlib.sha256(state).hexdigest().encode()
        try:
            write_new(temp, b" ".join((_MAGIC, digest)) + b"\n" + state, durable=True)
            if not self._link_once(temp, version):
                return False
            fsync(self._dir)
            if self._was_trimmed(version):
                with contextlib.suppress(FileNotFoundError):
                    self._path(version).unlink()
                # Won long ago, and others built on it; or won now, too late: nobody can tell.
                said = f"the swap upon version {version - 1} may have happened or not: it took so"
                raise OSError(errno.EIO, f"{said} long that others put {KEEP_VERSIONS} above")
            self._trim(version, temp)
            return True
        finally:
            with contextlib.suppress(OSError):  # an orphan is removed by a later trim
                temp.unlink()

    def _link_once(self, temp: Path, version: int) -> bool:
        """Link `temp` as `version`; return whether it now has a second name.

        NFS may lose the reply of a success and answer EEXIST to the retransmitted link, so the
        link count decides after every error.
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
            if error.errno == errno.EEXIST and self._read(version) is not _GONE:
                return False
            raise
        return True

    def _was_trimmed(self, version: int) -> bool:
        """Return whether `version` may have been used and trimmed before.

        A writer that slept between reading and linking can win such a number, and one that slept
        after it won finds the same. It was trimmed only after KEEP_VERSIONS newer ones came, and
        after its base.
        """
        base_gone = version > 1 and self._read(version - 1) is _GONE  # opens: never from a cache
        return base_gone or max(self._listed(), default=0) >= version + KEEP_VERSIONS

    def _trim(self, newest: int, temp: Path) -> None:
        """Remove old versions, oldest first (`_was_trimmed` relies on it), and orphaned temps."""
        with contextlib.suppress(OSError):  # housekeeping; the next swap tries again
            now = temp.stat().st_mtime
            old = [each for each in self._listed() if each <= newest - KEEP_VERSIONS]
            for path in (*map(self._path, old), *self._dir.glob(f"{_TEMP_PREFIX}*")):
                with contextlib.suppress(OSError):
                    if path.name.startswith(_PREFIX) or now - path.stat().st_mtime > _STALE_TEMP_S:
                        path.unlink()

    def _listed(self) -> list[int]:
        """Return the numbers of the versions that are listed, oldest first.

        Nobody has swapped upon nothing: a damaged one without the one before it is somebody else's.
        """
        found = sorted(self._versions())
        while len(found) > 1 and found[-1] - found[-2] > 1:
            if self._read(found[-1]) is not _DAMAGED or self._read(found[-1] - 1) is not _GONE:
                break
            skipped(self._path(found.pop()), "no version of the board")
        return found

    def _versions(self) -> list[int]:
        try:
            names = [path.name for path in self._dir.iterdir()]
        except FileNotFoundError:
            left = next(path for path in self._dir.parents if path.exists())
            if left.stat().st_dev != self._device:
                raise  # it is not mounted
            return []
        found = [int(name[1:]) for name in names if re.fullmatch(f"{_PREFIX}[0-9]+", name)]
        return [each for each in found if self._path(each).name in names]

    def _path(self, version: int) -> Path:
        return self._dir / f"{_PREFIX}{version:012d}"

    def _read(self, version: int) -> bytes | _Absent:
        """Return the content of `version`, or why there is none."""
        try:
            raw = read_regular(self._path(version), flags=os.O_NOFOLLOW)
        except FileNotFoundError:
            return _GONE
        except OSError as error:
            if error.errno == errno.ESTALE:  # trimmed while it was read, as NFS says it
                return _GONE
            if error.errno in _NO_FILE:
                return _DAMAGED
            raise
        header, _, state = raw.partition(b"\n")
        expected = b" ".join((_MAGIC, hashlib.sha256(state).hexdigest().encode()))
        return state if header == expected else _DAMAGED
