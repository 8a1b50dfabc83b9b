"""Packs a virtual environment into one archive in the run, for the nodes (staging.py).

Plain tar, or zstd where both the launcher and the environment have the package zstandard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from launcher.errors import UserError
from launcher.whole_file import write_json

ARCHIVE_JSON: Final = "env/archive.json"


class StagingError(Exception):
    """An environment cannot be staged on this node; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """A packed environment in a run, as RUN/env/archive.json has it."""

    prefix: str
    """The environment that was packed, absolute."""
    stage: str
    """Folder on each node's own disk."""
    file: str
    """Name in RUN/env."""
    sha256: str
    size_bytes: int
    unpacked_bytes: int
    tree: str
    """SHA-256 over names, sizes and times of the files: whether it must be packed again."""


def pack(venv: Path, run_dir: Path, *, stage: str) -> Archive:
    """Pack `venv` into RUN/env, or link the archive of a run beside it that packed the same.

    Args:
        venv: the virtual environment.
        run_dir: the run.
        stage: folder on each node's own disk.

    Raises:
        UserError: HF202 the environment cannot be read; HF612 the run cannot be written.
    """
    try:
        names, tree, unpacked = _listed(venv)
    except OSError as error:
        raise UserError(
            "HF202", f"env.venv: {error.filename} cannot be read: {error.strerror or error}"
        ) from error
    folder = (run_dir / ARCHIVE_JSON).parent
    try:
        folder.mkdir(exist_ok=True)
        archive = _linked(run_dir, tree) or _packed(venv, folder, names, tree, unpacked)
        archive = _with(archive, stage=stage)
        write_json(run_dir / ARCHIVE_JSON, _raw(archive), indent=1)
    except OSError as error:
        raise UserError(
            "HF612", f"{folder} cannot be written: {error.strerror or error}; make room"
        ) from error
    return archive


def share(run_dir: Path, other: Path) -> None:
    """Let run `other` use the archive of `run_dir`: a link, and its record.

    Raises:
        UserError: HF612 it cannot be written.
    """
    try:
        archive = load_archive(run_dir)
        assert archive is not None, f"{run_dir} has packed nothing"
        (other / "env").mkdir(exist_ok=True)
        os.link(run_dir / "env" / archive.file, other / "env" / archive.file)
        shutil.copy(run_dir / ARCHIVE_JSON, other / ARCHIVE_JSON)
    except (OSError, StagingError) as error:
        raise UserError("HF612", f"{other} cannot be written: {error}") from error


def load_archive(run_dir: Path) -> Archive | None:
    """Return the packed environment of a run; None: the run does not stage.

    Raises:
        StagingError: its record cannot be read.
    """
    path = run_dir / ARCHIVE_JSON
    try:
        return Archive(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise StagingError(f"{path} cannot be read: {error}") from error


def _raw(archive: Archive) -> dict[str, Any]:
    return {name: getattr(archive, name) for name in Archive.__dataclass_fields__}


def _with(archive: Archive, **changed: Any) -> Archive:
    return Archive(**{**_raw(archive), **changed})


def _listed(venv: Path) -> tuple[list[str], str, int]:
    """Return the names in `venv`, folders too, what tells them apart from others, and bytes."""
    names, total = [], 0
    digest = hashlib.sha256(str(venv).encode(errors="surrogateescape"))
    for folder, folders, files in os.walk(venv, onerror=_raise):
        folders.sort()
        inside = os.path.relpath(folder, venv)
        for name in sorted([*folders, *files]):
            path = os.path.normpath(os.path.join(inside, name))  # noqa: PTH118  texts of os.walk
            info = os.lstat(venv / path)
            names.append(path)
            total += info.st_size if stat.S_ISREG(info.st_mode) else 0
            said = f"{path}\0{info.st_mode}\0{info.st_size}\0"
            if not stat.S_ISDIR(info.st_mode):
                said += str(info.st_mtime_ns)
            digest.update(said.encode(errors="surrogateescape"))
    return names, digest.hexdigest(), total


def _raise(error: OSError) -> None:
    raise error


def _linked(run_dir: Path, tree: str) -> Archive | None:
    """Link the archive of this run, or of one beside it, that holds the same files."""
    others = sorted(run_dir.parent.glob(f"*/{ARCHIVE_JSON}"))
    for record in [run_dir / ARCHIVE_JSON, *others]:
        with contextlib.suppress(StagingError, OSError):
            archive = load_archive(record.parent.parent)
            if archive is None or archive.tree != tree:
                continue
            there = record.parent / archive.file
            if there.stat().st_size != archive.size_bytes:
                continue
            with contextlib.suppress(FileExistsError):
                os.link(there, run_dir / "env" / archive.file)
            return archive
    return None


def _packed(venv: Path, folder: Path, names: list[str], tree: str, unpacked: int) -> Archive:
    compress = _zstd_there(names)
    fresh = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with fresh.open("wb") as file:
            counted = Hashing(file)
            with _compressing(counted, on=compress) as out, _tar_writer(out) as tar:
                for name in names:
                    tar.add(venv / name, arcname=name, recursive=False, filter=_anonymous)
        digest = counted.digest.hexdigest()
        name = f"{digest[:16]}.tar{'.zst' if compress else ''}"
        fresh.replace(folder / name)
    finally:
        fresh.unlink(missing_ok=True)
    return Archive(
        prefix=str(venv),
        stage="",
        file=name,
        sha256=digest,
        size_bytes=counted.count,
        unpacked_bytes=unpacked,
        tree=tree,
    )


def _zstd_there(names: list[str]) -> bool:
    """Return whether both this Python and the packed one can (un)compress.

    The node's side runs in the shared copy of the very environment.
    """
    if not any(name.endswith("/site-packages/zstandard") for name in names):
        return False
    try:
        import zstandard  # noqa: F401  asked for only
    except ImportError:
        return False
    return True


def _tar_writer(out: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Leave out who owns a file, and what is neither file, link nor folder."""
    if not (member.isfile() or member.islnk() or member.issym() or member.isdir()):
        return None
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


@contextlib.contextmanager
def _compressing(out: Any, *, on: bool) -> Iterator[IO[bytes]]:
    if not on:
        yield out
        return
    import zstandard

    with zstandard.ZstdCompressor(level=3, threads=-1).stream_writer(out, closefd=False) as stream:
        yield stream


class Hashing:
    """A file that digests what goes through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest, self.count = file, hashlib.sha256(), 0

    def write(self, chunk: Any) -> int:
        """Write a chunk."""
        self.digest.update(chunk)
        self.count += len(chunk)
        return self._file.write(chunk)

    def read(self, size: int = -1) -> bytes:
        """Read a chunk."""
        chunk = self._file.read(size)
        self.digest.update(chunk)
        self.count += len(chunk)
        return chunk

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()
