"""The checkpoint directory on shared storage: make, digest, verify, retire. Knows no torch."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from elastic_trainer.board.state import Commit
from elastic_trainer.state.errors import CheckpointError, DamagedError
from elastic_trainer.state.manifest import (
    MANIFEST_NAME,
    METADATA_NAME,
    FileEntry,
    Manifest,
    directory_name,
    superseded,
)
from elastic_trainer.storage.files import (
    fsync,
    look_afresh,
    of_each,
    open_regular,
    outage_of,
    read_regular,
    write_new,
)

_READ_BYTES = 1 << 20
"""Read at a time for a digest."""


class CheckpointStorage:
    """All file operations below `root` except DCP's."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def check_writable(self, *, probe: bool) -> None:
        """Make `root` if it is missing and see that it takes files.

        `probe`: write one, which one rank does for all; otherwise only check the permission.

        Raises:
            CheckpointError: HF204, naming the directory and how to fix it.
        """
        reason = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if probe:
                path = self.root / f".probe-{uuid.uuid4().hex}"
                path.touch()
                path.unlink()
            elif not os.access(self.root, os.W_OK | os.X_OK):
                reason = "no permission, or mounted read-only"
        except OSError as error:
            if outage_of(error) is None:  # else a save will say so, and try again
                reason = error.strerror
        if reason is not None:
            raise CheckpointError(
                "HF204",
                f"checkpoint.dir: {self.root} cannot be written ({reason}): grant the "
                "permission, mount it writable, or set checkpoint.dir to another directory on "
                "shared storage",
            )

    def make(self, step: int, epoch: int) -> str:
        """Make a new directory and return its name.

        An old one is never written into: its `.metadata` would survive over truncated data.
        """
        for attempt in range(1, 1000):
            name = directory_name(step, epoch, attempt)
            try:
                (self.root / name).mkdir()
            except FileExistsError:
                continue
            return name
        raise OSError(errno.EEXIST, "999 attempts to save this step are there", str(self.root))

    def digest(
        self, name: str, rank: int, on_read: Callable[[int], None] = lambda _: None
    ) -> dict[str, FileEntry]:
        """Return the entries of `rank`'s files in directory `name`; rank 0 adds the index.

        DCP names data files after the rank and has fsynced them. `on_read` hears of the bytes just
        read.
        """
        paths = list((self.root / name).glob(f"__{rank}_*"))
        if rank == 0:
            paths.append(self.root / name / METADATA_NAME)
        return {path.name: _entry(path, on_read) for path in sorted(paths)}

    def write_manifest(self, name: str, manifest: Manifest) -> str:
        """Write the manifest durably, directory entries included; return its sha256."""
        raw = manifest.encode()
        path = self.root / name / MANIFEST_NAME
        write_new(path, raw, durable=True)
        for directory in (path.parent, self.root):
            fsync(directory)
        return hashlib.sha256(raw).hexdigest()

    def read_manifest(self, commit: Commit) -> Manifest:
        """Return the manifest of a commit.

        Raises:
            DamagedError: it is missing, or not the one that was committed.
        """
        if "/" in commit.dir or commit.dir in ("", ".", ".."):
            raise DamagedError(f"the board names {commit.dir!r}, which is not a plain name")
        path = self.root / commit.dir / MANIFEST_NAME
        self._look_afresh(commit.dir)
        try:
            raw = read_regular(path)
        except OSError as error:
            raise DamagedError(f"{MANIFEST_NAME}: {error.strerror}") from error
        if hashlib.sha256(raw).hexdigest() != commit.manifest_sha256:
            raise DamagedError(f"{MANIFEST_NAME} has another sha256 than the board says")
        try:
            return Manifest.decode(raw)
        except ValueError as error:
            raise DamagedError(str(error)) from error

    def verify(
        self,
        name: str,
        manifest: Manifest,
        files: Iterable[str],
        on_read: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Check size and sha256 of `files`, which are in `manifest`, in directory `name`.

        `on_read` hears of the bytes just read, a MiB at a time.

        Raises:
            DamagedError: naming the first file that differs, and how.
        """
        self._look_afresh(name)
        for file in files:
            expected = manifest.files[file]
            path = self.root / name / file
            try:
                size_bytes = path.stat().st_size
                if size_bytes != expected.size_bytes:
                    raise DamagedError(
                        f"{file} has {size_bytes} bytes, {expected.size_bytes} were saved"
                    )
                actual = _entry(path, on_read)
            except OSError as error:
                raise DamagedError(f"{file}: {error.strerror}") from error
            if actual != expected:
                raise DamagedError(f"{file} has another sha256 than was saved")

    def _look_afresh(self, name: str) -> None:
        """Drop cached lookups, in which a commit's file may be missing."""
        look_afresh(self.root)
        look_afresh(self.root / name)

    def remove(self, name: str) -> str:
        """Remove one directory, if it exists; return its name.

        Raises:
            OSError: it cannot be removed; or is none, of which rmtree would open even a pipe.
        """
        path = self.root / name
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(path.lstat().st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
            shutil.rmtree(path)
        return name

    def retire(
        self, commits: Iterable[Commit], *, epoch: int, keep_every_steps: int | None
    ) -> list[str]:
        """Remove directories that no commit names; return the names of those that went.

        Only after the swap of the board that put `commits` there. Complete milestones (multiples of
        `keep_every_steps`) stay.
        """
        remove, milestones = superseded(
            [path.name for path in self.root.iterdir()],
            commits,
            epoch=epoch,
            keep_every_steps=keep_every_steps,
        )
        remove += [m for m in milestones if not (self.root / m / MANIFEST_NAME).exists()]
        return list(of_each(remove, self.remove))


def _entry(path: Path, on_read: Callable[[int], None] = lambda _: None) -> FileEntry:
    digest, size_bytes = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_READ_BYTES))
    with open_regular(path) as file:
        while num_read := file.readinto(buffer):
            digest.update(buffer[:num_read])
            size_bytes += num_read
            on_read(num_read)
    return FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())
