"""`python -m launcher.node.files put|get|drop RUN`: the run directory, for a launcher elsewhere.

Called in a pod, by exec, where the launcher does not see the storage. Standard library only.

put   reads what the run begins with, and writes it into RUN: all of it or nothing
get   writes what is new in RUN since the launcher was told last
drop  removes RUN, after a submission that failed

All speak in frames, for a pod's stdin cannot be closed: 8 bytes of length, then so many bytes.
The first frame is JSON; of `put` the second is a tar. `get` answers with a tar, whose members
say in pax headers from which byte of their file on they are.
"""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from launcher.run_files import END, FETCHED, GROWING, IN_USE, INODE, MTIME, OFFSET, safe_parts

_COPY_BYTES: Final = 1 << 20
_MOST_REQUEST: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Known:
    """What the launcher has of a file."""

    inode: int
    offset: int
    """Bytes of it."""
    mtime_ns: int

    @classmethod
    def of_json(cls, raw: Any) -> Known:
        """Read [inode, offset, mtime_ns].

        Raises:
            ValueError, TypeError: it is something else.
        """
        inode, offset, mtime_ns = (int(each) for each in raw)
        return cls(inode, offset, mtime_ns)


def read_frame(stream: IO[bytes], most: int = _MOST_REQUEST) -> bytes:
    """Return one frame.

    Raises:
        ValueError: it is cut off, or longer than `most` bytes.
    """
    size = _length(stream)
    if size > most:
        raise ValueError(f"a request of {size} bytes")
    return _exactly(stream, size)


def put(run_dir: Path, stream: IO[bytes]) -> int:
    """Write what comes into `run_dir`; return an exit code.

    The first frame is `{"fresh": bool, "remove": [names]}`: whether there must be no run yet, and
    files that are to go. Code that is there already (its folder is called by its digest) stays.

    Raises:
        ValueError, tarfile.TarError: what comes is no such thing, or is cut off.
        OSError: the folder cannot be written.
    """
    asked = json.loads(read_frame(stream))
    fresh = bool(asked.get("fresh"))
    if fresh and run_dir.is_dir() and any(run_dir.iterdir()):
        sys.stderr.write(f"{run_dir} is there already and is not empty\n")
        return IN_USE
    made = not run_dir.exists()
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        _unpack(run_dir, stream, _length(stream))
        for name in asked.get("remove", ()):
            run_dir.joinpath(*safe_parts(str(name))).unlink(missing_ok=True)
    except BaseException:
        if fresh:
            _remove(run_dir, keep=not made)
        raise
    return 0


def get(run_dir: Path, stream: IO[bytes], out: IO[bytes]) -> int:
    """Write what is new in `run_dir` to `out`, as a tar; return an exit code.

    The request is `{"known": {path: [inode, offset, mtime_ns]}, "most_log_bytes": n}`. Of a log
    that is new or was begun anew only the last n bytes come.

    Raises:
        ValueError: the request cannot be read.
        OSError: the folder cannot be read.
    """
    asked = json.loads(read_frame(stream))
    known = {str(path): Known.of_json(raw) for path, raw in asked.get("known", {}).items()}
    most = int(asked.get("most_log_bytes") or 0)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in _files(run_dir):
            name = path.relative_to(run_dir).as_posix()
            try:
                _add_new(tar, path, name, known.get(name), most)
            except OSError as error:
                # Boards and rotated logs go meanwhile; links are not followed.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
        tar.addfile(tarfile.TarInfo(END))
    out.flush()
    return 0


def new_part(info: os.stat_result, known: Known | None, *, grows: bool, most: int) -> int | None:
    """Return the byte from which on a file is new; None: nothing of it is. Pure.

    Args:
        info: the file now.
        known: what the launcher has; None: nothing.
        grows: the file is only ever added to.
        most: of a file that is new so many bytes at most; 0: all.
    """
    same = known is not None and known.inode == info.st_ino
    if known is not None and same and grows and known.offset <= info.st_size:
        return known.offset if known.offset < info.st_size else None
    if known is not None and same and not grows:
        unchanged = (known.offset, known.mtime_ns) == (info.st_size, info.st_mtime_ns)
        if unchanged:
            return None
    return max(0, info.st_size - most) if most else 0


def _files(run_dir: Path) -> Iterator[Path]:
    for folder in FETCHED:
        for inside, _, names in os.walk(run_dir / folder):
            for name in sorted(names):
                if not name.startswith("."):  # being written
                    yield Path(inside, name)


def _add_new(tar: tarfile.TarFile, path: Path, name: str, known: Known | None, most: int) -> None:
    # What is no plain file could block, or lead out of the run.
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(number, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            return
        folder = name.partition("/")[0]
        start = new_part(info, known, grows=folder in GROWING, most=most if folder == "logs" else 0)
        if start is None:
            return
        file.seek(start)
        member = tarfile.TarInfo(name)
        member.size = info.st_size - start
        member.mtime = info.st_mtime_ns // 10**9
        member.pax_headers = {
            OFFSET: str(start),
            INODE: str(info.st_ino),
            MTIME: str(info.st_mtime_ns),
        }
        tar.addfile(member, _Padded(file, member.size))


class _Padded(io.RawIOBase):
    """Exactly so many bytes of a file: what was cut off meanwhile reads as line breaks."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        super().__init__()
        self._file, self._left = file, size

    def read(self, size: int = -1) -> bytes:
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        data += b"\n" * (wanted - len(data))
        self._left -= wanted
        return data


def _unpack(run_dir: Path, stream: IO[bytes], size: int) -> None:
    """Write a tar of `size` bytes into `run_dir`; modes of folders last, for some are read-only."""
    root = run_dir.resolve()
    folders: list[tuple[Path, int]] = []
    there: dict[str, bool] = {}
    limited = _Limited(stream, size)
    with tarfile.open(fileobj=limited, mode="r|") as tar:
        for member in tar:
            parts = safe_parts(member.name)
            path = run_dir.joinpath(*parts)
            frozen = "/".join(parts[:2]) if parts[0] == "code" and len(parts) > 1 else ""
            if frozen and there.setdefault(frozen, (run_dir / frozen).exists()):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.parent.resolve().is_relative_to(root):
                raise ValueError(f"a path that leads elsewhere: {member.name!r}")
            if member.isdir():
                path.mkdir(exist_ok=True)
                folders.append((path, member.mode))
            elif member.issym():
                path.unlink(missing_ok=True)
                path.symlink_to(member.linkname)
            elif member.isreg():
                source = tar.extractfile(member)
                assert source is not None, "a plain file has contents"
                _write(path, source, member)
            else:
                raise ValueError(f"{member.name!r} is no file, folder or link")
    limited.check_whole()
    for path, mode in reversed(folders):
        # Never less than what the nodes need to go on with; code alone is read-only.
        path.chmod(mode if path.relative_to(run_dir).parts[0] == "code" else mode | 0o700)


def _write(path: Path, source: IO[bytes], member: tarfile.TarInfo) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("wb") as out:
        shutil.copyfileobj(source, out, _COPY_BYTES)
        if out.tell() != member.size:
            raise ValueError(f"{member.name!r} is cut off")
    fresh.chmod(member.mode & 0o777)
    os.utime(fresh, (member.mtime, member.mtime))
    fresh.replace(path)


class _Limited(io.RawIOBase):
    """So many bytes of a stream that goes on after them."""

    def __init__(self, stream: IO[bytes], size: int) -> None:
        super().__init__()
        self._stream, self._left = stream, size

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data

    def check_whole(self) -> None:
        """Read the rest, which is padding.

        Raises:
            ValueError: there is less than was said.
        """
        while self._left:
            if not self.read(_COPY_BYTES):
                raise ValueError("the request is cut off")


def _remove(run_dir: Path, *, keep: bool) -> None:
    """Remove what is in `run_dir`, frozen code too; the folder itself unless `keep`."""
    for inside, _, _ in os.walk(run_dir):
        os.chmod(inside, 0o700)  # noqa: PTH101  os.walk gives texts
    if not keep:
        shutil.rmtree(run_dir, ignore_errors=True)
        return
    for path in run_dir.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _length(stream: IO[bytes]) -> int:
    return int.from_bytes(_exactly(stream, 8), "big")


def _exactly(stream: IO[bytes], size: int) -> bytes:
    parts = []
    while size > 0:
        data = stream.read(min(size, _COPY_BYTES))
        if not data:
            raise ValueError("the request is cut off")
        parts.append(data)
        size -= len(data)
    return b"".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    verb, run = (sys.argv[1:] if argv is None else list(argv))[:2]
    run_dir = Path(run)
    try:
        if verb == "put":
            return put(run_dir, sys.stdin.buffer)
        if verb == "get":
            return get(run_dir, sys.stdin.buffer, sys.stdout.buffer)
        if verb == "drop" and (run_dir / "job.json").is_file():
            _remove(run_dir, keep=False)
    except (OSError, ValueError, KeyError, TypeError, tarfile.TarError) as error:
        sys.stderr.write(f"{verb} {run_dir}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
