"""Files from a local run directory to the pods' storage, and back. No network.

RUN/.fetched.json has what was brought already: each file's inode there and the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import tarfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, NamedTuple

from elastic_trainer.storage.files import beside, read_json, skipped, write_json
from launcher.platforms.kubernetes.documents import moved
from launcher.platforms.retries import polled
from launcher.record.run_files import END, FETCHED, GROWING, INODE, MTIME, OFFSET, safe_parts
from launcher.spec.errors import PermanentError

STATE: Final = ".fetched.json"
STOP_JSON: Final = "stop.json"
MOST_LOG_BYTES: Final = 8 << 20
"""Size of a log's end, which is all that is brought at first: logs can have gigabytes."""
_THEIRS: Final = ("attempts", "board", "ledger", "logs")
"""Folders that nodes alone write; events are the launcher's too."""


_MOST: Final = 1 << 63
_BY_NAME: Final = (
    *(errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
    *(errno.ELOOP, errno.ENXIO),  # a link, a pipe
)
"""Errors of a file whose name no other file's can stand beside; other files have none."""


class _Part(NamedTuple):
    """What a member of the answer is: the end of a file."""

    parts: Sequence[str]
    inode: int
    offset: int
    mtime_ns: int

    @classmethod
    def of_member(cls, member: tarfile.TarInfo) -> _Part:
        """Read it.

        Raises:
            ValueError, KeyError: it is no plain file of the pods' folders, or none can have such a
                name or such numbers.
        """
        if not member.isreg():
            raise ValueError("not a plain file")
        member.name.encode()
        inode, offset, mtime_ns = (int(member.pax_headers[key]) for key in (INODE, OFFSET, MTIME))
        if not (0 <= inode < 1 << 64 and 0 <= offset < _MOST and -_MOST < mtime_ns < _MOST):
            raise ValueError(f"inode, offset and time are {inode}, {offset} and {mtime_ns}")
        return cls(safe_parts(member.name, FETCHED), inode, offset, mtime_ns)


@dataclass(slots=True)
class Fetched:
    """The fetched part of a run: RUN/.fetched.json."""

    run_dir: Path
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Path -> inode, offset (there), mtime_ns (there), size (here)."""
    pods: dict[str, str] = field(default_factory=dict)
    """Uid of a pod -> time of the last fetched line of its log, or `done`."""
    complete: str = ""
    """The submission of which everything was brought."""

    @classmethod
    def load(cls, run_dir: Path) -> Fetched:
        """Read it; a damaged one is empty: everything is brought again."""
        raw, keys = read_json(run_dir / STATE), ("inode", "offset", "mtime_ns", "size")
        try:
            files = {
                path: {key: int(known[key]) for key in keys} for path, known in raw["files"].items()
            }
            pods = {uid: str(since) for uid, since in raw["pods"].items()}
            return cls(run_dir, files, pods, str(raw["complete"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            return cls(run_dir)

    def save(self) -> None:
        """Write it, whole or not at all; OSError: the run directory cannot be written."""
        raw = {"v": 1, "files": self.files, "pods": self.pods, "complete": self.complete}
        write_json(self.run_dir / STATE, raw)

    def request(self) -> bytes:
        """Return the request for `launcher.node.files get`."""
        known = {
            path: [one["inode"], one["offset"], one["mtime_ns"]] for path, one in self.files.items()
        }
        request = {"known": known, "most_log_bytes": MOST_LOG_BYTES}
        return json.dumps(request).encode() + b"\n"

    def apply(self, answer: IO[bytes]) -> int:
        """Write the answer of `get` into the run directory; return how many files changed.

        Only plain files below the pods' folders are written; members that say something else are
        skipped. Bytes written before an interruption are written again, not twice: files are cut to
        the noted size.

        Raises:
            PermanentError: the answer is no tar, or is cut off.
            OSError: the run directory cannot be written.
        """
        count = 0
        try:
            with tarfile.open(fileobj=answer, mode="r|") as tar:
                for member in tar:
                    if member.name == END:
                        return count
                    count += self._took(tar, member)
        except (tarfile.TarError, ValueError) as error:
            raise PermanentError(f"what the pod sent cannot be used: {error}") from error
        finally:
            self.save()
        raise PermanentError("what the pod sent is cut off")

    def _took(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
        """Write a member's part of a file; return whether it is one."""
        try:
            self._write(tar, member, _Part.of_member(member))
        except (ValueError, KeyError) as error:
            why = str(error)
        except OSError as error:
            if error.errno not in _BY_NAME:
                raise
            why = str(error.strerror)
        else:
            return True
        skipped(f"{self.run_dir}: of what the pod sent, {member.name!r}", why)
        return False

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, part: _Part) -> None:
        source = tar.extractfile(member)
        assert source is not None, "only plain files are taken"
        name, path = "/".join(part.parts), self.run_dir.joinpath(*part.parts)
        inode, start, mtime_ns = part.inode, part.offset, part.mtime_ns
        path.parent.mkdir(parents=True, exist_ok=True)
        before, grows = self.files.get(name), part.parts[0] in GROWING
        continues = before is not None and (before["inode"], before["offset"]) == (inode, start)
        if before is not None and grows and continues and path.is_file():
            with path.open("r+b") as out:
                out.truncate(min(before["size"], path.stat().st_size))
                out.seek(0, os.SEEK_END)
                shutil.copyfileobj(source, out)
        else:
            with beside(path) as fresh:
                with fresh.open("xb") as out:
                    if grows and start:
                        out.write(f"({start:,} bytes before this were left out)\n".encode())
                    shutil.copyfileobj(source, out)
                fresh.replace(path)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        self.files[name] = {
            "inode": inode,
            "offset": start + member.size,
            "mtime_ns": mtime_ns,
            "size": path.stat().st_size,
        }

    def add_log(self, name: str, text: str, *, t_unix: float | None) -> None:
        """Add a pod's output to RUN/logs/pods/<name>.log.

        The file shows `t_unix`, the time of the last line: logs are shown in that order.
        """
        safe_parts(name)
        path = self.run_dir / "logs" / "pods" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "a", encoding="utf-8", opener=_no_other) as out:
                out.write(text)
        except OSError as error:
            if error.errno not in _BY_NAME:
                raise
            skipped(path, str(error.strerror))
            return
        if t_unix is not None:
            os.utime(path, (t_unix, t_unix))


def _no_other(path: str, flags: int) -> int:
    """Open a plain file: no link is followed, no reader of a pipe waited for."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


@contextlib.contextmanager
def one_at_a_time(run_dir: Path, *, wait_s: float = 0.0) -> Iterator[bool]:
    """Yield whether no other process brings the same run, after at most `wait_s` seconds."""
    with (run_dir / f"{STATE}.lock").open("ab") as file:

        def locked() -> bool:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

        yield polled(locked, bool, for_s=wait_s, every_s=0.1)


def upload(
    run_dir: Path,
    there: str,
    out: IO[bytes],
    *,
    fresh: bool = False,
    known: Collection[str] = (),
    only: str = "*",
) -> None:
    """Write to `out` the request to `launcher.node.files put` for a local run directory.

    Paths in its JSON files are changed to `there`, where the pods see it. Files that came from
    there (`known`) are left out, and names that begin with a dot: they are ours, or being written.
    `only` is a pattern in the run directory itself. With `fresh` the run must not exist yet.

    Raises:
        OSError: a file cannot be read.
    """

    def chosen(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        top, *inner = member.name.split("/")
        hidden = top != "code" and (inner or [top])[-1].startswith(".")
        if hidden or (inner and top in _THEIRS) or member.name in known:
            return None
        if not (member.isreg() or member.isdir() or member.issym()):
            skipped(run_dir / member.name, "neither file, folder nor link")
            return None
        member.uid = member.gid = 0  # names of users here are nobody there
        member.uname = member.gname = ""
        return member

    remove = [] if (run_dir / STOP_JSON).exists() else [STOP_JSON]
    out.write(json.dumps({"fresh": fresh, "remove": remove}).encode() + b"\n")
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(run_dir.glob(only)):
            if path.suffix != ".json" or path.is_symlink() or not path.is_file():
                tar.add(path, path.name, filter=chosen)
            elif member := chosen(tar.gettarinfo(path, path.name)):
                data = _moved(path.read_bytes(), str(run_dir), there)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        tar.addfile(tarfile.TarInfo(END))
    out.seek(0)


def _moved(data: bytes, old: str, new: str) -> bytes:
    """Return the text of a JSON file with the run's paths moved."""
    try:
        value = json.loads(data)
    except ValueError:
        return data
    return (json.dumps(moved(value, old, new), indent=1) + "\n").encode()
