"""`python -m launcher.node.files put|get|drop RUN`: the run directory, for a launcher elsewhere.

Called in a pod, by exec, where the launcher does not see the storage. Standard library only.

put   reads the run's first files, and writes them into RUN get   writes the news in RUN since the
launcher's last request drop  removes RUN, after a submission that failed

A request is a line of JSON on stdin; a tar follows that of `put`. `get` answers with a tar, whose
members say in pax headers from which byte of their file on they are. A pod's stdin cannot be closed
and connections break off, so the last member of a tar says that it is whole (END).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from launcher.record.run_files import (
    END,
    FETCHED,
    GROWING,
    IN_USE,
    INODE,
    MTIME,
    OFFSET,
    safe_parts,
)

_MOST_REQUEST: Final = 64 << 20
"""Bytes of a request's line."""


def put(run_dir: Path, stream: IO[bytes]) -> int:
    """Write the incoming files into `run_dir`; return an exit code.

    The request is `{"fresh": bool, "remove": [names]}`: with `fresh` the run must not exist yet,
    and nothing is left of a broken-off transfer; `remove` names files to delete. Existing code (its
    folder is named by its digest) stays.

    Raises:
        ValueError, tarfile.TarError: the input is malformed or cut off.
        OSError: the folder cannot be written.
    """
    asked = _request(stream)
    fresh, made = bool(asked.get("fresh")), not run_dir.exists()
    if fresh and not made and any(run_dir.iterdir()):
        sys.stderr.write(f"{run_dir} is there already and is not empty\n")
        return IN_USE
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            # `_checked` is the filter: Python 3.11.0 to 3.11.3 have none, and code may link out.
            tar.extraction_filter = lambda member, _: member
            tar.extractall(run_dir, _checked(tar, run_dir.resolve()))  # noqa: S202
        for name in asked.get("remove", ()):
            run_dir.joinpath(*safe_parts(str(name))).unlink(missing_ok=True)
    except BaseException:
        if fresh:
            _remove(run_dir, keep=not made)
        raise
    return 0


def get(run_dir: Path, stream: IO[bytes], out: IO[bytes]) -> int:
    """Write the news in `run_dir` to `out`, as a tar; return an exit code.

    The request is `{"known": {path: [inode, offset, mtime_ns]}, "most_log_bytes": n}`. Only the
    last n bytes of a log come that is new or was begun again.

    Raises:
        ValueError: the request cannot be read.
        OSError: the folder cannot be read, or a file is cut meanwhile.
    """
    asked = _request(stream)
    known, most = asked.get("known", {}), int(asked.get("most_log_bytes") or 0)
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in _files(run_dir):
            name = path.relative_to(run_dir).as_posix()
            try:
                # What is no plain file could block, or lead out of the run.
                number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError as error:
                # Boards and rotated logs go meanwhile; links are not followed.
                if error.errno not in (errno.ENOENT, errno.ELOOP):
                    sys.stderr.write(f"{path} is skipped: {error.strerror}\n")
                continue
            with os.fdopen(number, "rb") as file:
                _add_new(tar, file, name, known.get(name), most)
        tar.addfile(tarfile.TarInfo(END))
    out.flush()
    return 0


def new_part(info: os.stat_result, known: Sequence[int] | None, *, grows: bool) -> int | None:
    """Return the byte from which on a file is new; None: nothing of it is. Pure.

    `known` is the launcher's inode, bytes and mtime_ns of it; `grows`: the file is only ever
    appended to.
    """
    inode, offset, mtime_ns = known or (-1, 0, 0)
    if inode != info.st_ino:
        return 0
    if grows and offset <= info.st_size:
        return offset if offset < info.st_size else None
    return None if (offset, mtime_ns) == (info.st_size, info.st_mtime_ns) else 0


def _request(stream: IO[bytes]) -> dict[str, Any]:
    line = stream.readline(_MOST_REQUEST)
    if not line.endswith(b"\n"):
        raise ValueError("the request is cut off")
    asked: dict[str, Any] = json.loads(line)
    return asked


def _files(run_dir: Path) -> Iterator[Path]:
    for folder in FETCHED:
        for inside, _, names in os.walk(run_dir / folder):
            for name in sorted(names):
                if not name.startswith("."):  # being written
                    yield Path(inside, name)


def _add_new(
    tar: tarfile.TarFile, file: IO[bytes], name: str, known: Sequence[int] | None, most: int
) -> None:
    info, folder = os.fstat(file.fileno()), name.partition("/")[0]
    start = new_part(info, known, grows=folder in GROWING)
    if start is None or not stat.S_ISREG(info.st_mode):
        return
    if start == 0 and most and folder == "logs":
        start = max(0, info.st_size - most)
    file.seek(start)
    member = tarfile.TarInfo(name)
    member.size, member.mtime = info.st_size - start, info.st_mtime_ns // 10**9
    member.pax_headers = {
        OFFSET: str(start),
        INODE: str(info.st_ino),
        MTIME: str(info.st_mtime_ns),
    }
    tar.addfile(member, file)


def _checked(tar: tarfile.TarFile, root: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members to write below `root`."""
    there: dict[str, bool] = {}
    for member in tar:
        if member.name == END:
            return
        parts = safe_parts(member.name)
        path = root.joinpath(*parts)
        if not path.parent.resolve().is_relative_to(root):
            raise ValueError(f"a path that leads elsewhere: {member.name!r}")
        if not (member.isdir() or member.issym() or member.isreg()):
            raise ValueError(f"{member.name!r} is not a file, folder or link")
        in_code = parts[0] == "code"
        frozen = "/".join(parts[:2]) if in_code and len(parts) > 1 else ""
        if frozen and there.setdefault(frozen, (root / frozen).exists()):
            continue
        if not member.isdir():
            path.unlink(missing_ok=True)
        # Nodes continue writing in folders; code alone is read-only.
        member.mode = member.mode & 0o777 | (0o700 if member.isdir() and not in_code else 0)
        member.uid = member.gid = -1  # whose it is by itself
        yield member
    raise ValueError("the request is cut off")


def _remove(run_dir: Path, *, keep: bool) -> None:
    """Remove the content of `run_dir`, frozen code too; the folder itself unless `keep`."""
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, tarfile.TarError) as error:
        sys.stderr.write(f"{verb} {run_dir}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
