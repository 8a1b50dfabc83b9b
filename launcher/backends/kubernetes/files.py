"""What goes from a local run directory to the pods' storage, and what comes back. No network.

RUN/.fetched.json has what was brought already: of each file its inode there and the bytes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from launcher.backends.kubernetes.documents import moved
from launcher.errors import PermanentError
from launcher.run_files import END, FETCHED, GROWING, INODE, MTIME, OFFSET, frame, safe_parts
from launcher.whole_file import write_json

STATE: Final = ".fetched.json"
STOP_JSON: Final = "stop.json"
MOST_LOG_BYTES: Final = 8 << 20
"""Of a log that was never brought the last bytes: runs of months have logs of gigabytes."""
_COPY_BYTES: Final = 1 << 20
_LOOK_S: Final = 0.1
_CODE: Final = "code"
_THEIRS: Final = ("attempts", "board", "ledger", "logs")
"""Folders that nodes alone write; events are the launcher's too."""


@dataclass(slots=True)
class Fetched:
    """What was brought of a run: RUN/.fetched.json."""

    run_dir: Path
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    """Path -> inode, offset (there), mtime_ns (there), size (here)."""
    pods: dict[str, str] = field(default_factory=dict)
    """Uid of a pod -> time of the last line that was brought of its log; done: all was."""
    complete: str = ""
    """The submission of which all was brought that there will ever be."""

    @classmethod
    def load(cls, run_dir: Path) -> Fetched:
        """Read it; one that is damaged is none: everything is brought anew."""
        try:
            raw = json.loads((run_dir / STATE).read_text(encoding="utf-8"))
            files = {str(path): _numbers(known) for path, known in raw["files"].items()}
            pods = {str(uid): str(since) for uid, since in raw["pods"].items()}
            return cls(run_dir, files, pods, str(raw["complete"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return cls(run_dir)

    def save(self) -> None:
        """Write it, whole or not at all.

        Raises:
            OSError: the run directory cannot be written.
        """
        raw = {"v": 1, "files": self.files, "pods": self.pods, "complete": self.complete}
        write_json(self.run_dir / STATE, raw)

    def request(self) -> bytes:
        """Return what `launcher.node.files get` is asked."""
        known = {
            path: [one["inode"], one["offset"], one["mtime_ns"]] for path, one in self.files.items()
        }
        return frame(json.dumps({"known": known, "most_log_bytes": MOST_LOG_BYTES}).encode())

    def apply(self, answer: IO[bytes]) -> int:
        """Write what `get` has answered into the run directory; return how many files changed.

        What was written before an interruption is written again, not twice: files are cut to the
        size that was noted.

        Raises:
            PermanentError: the answer leads elsewhere, or is cut off.
            OSError: the run directory cannot be written.
        """
        count, whole = 0, False
        try:
            with tarfile.open(fileobj=answer, mode="r|") as tar:
                for member in tar:
                    if member.name == END:
                        whole = True
                        break
                    self._write(tar, member)
                    count += 1
        except (tarfile.TarError, ValueError, KeyError) as error:
            raise PermanentError(f"what the pod sent cannot be used: {error}") from error
        finally:
            self.save()
        if not whole:
            raise PermanentError("what the pod sent is cut off")
        return count

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = safe_parts(member.name, FETCHED)
        if not member.isreg():
            raise ValueError(f"{member.name!r} is no plain file")
        name = "/".join(parts)
        start = int(member.pax_headers[OFFSET])
        inode = int(member.pax_headers[INODE])
        mtime_ns = int(member.pax_headers[MTIME])
        path = self.run_dir.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        source = tar.extractfile(member)
        assert source is not None, "a plain file has contents"
        before = self.files.get(name)
        goes_on = before is not None and before["inode"] == inode and before["offset"] == start
        grows = parts[0] in GROWING
        if grows and goes_on and path.is_file():
            assert before is not None, "it goes on"
            with path.open("r+b") as out:
                out.truncate(min(before["size"], path.stat().st_size))
                out.seek(0, os.SEEK_END)
                _copy(source, out)
        else:
            fresh = path.with_name(f".{path.name}.{os.getpid()}")
            with fresh.open("wb") as out:
                if grows and start:
                    out.write(f"({start:,} bytes before this were left out)\n".encode())
                _copy(source, out)
            fresh.replace(path)
        os.utime(path, ns=(mtime_ns, mtime_ns))
        self.files[name] = {
            "inode": inode,
            "offset": start + member.size,
            "mtime_ns": mtime_ns,
            "size": path.stat().st_size,
        }

    def add_log(self, name: str, text: str, *, t_unix: float | None) -> None:
        """Add what a pod has written to RUN/logs/pods/<name>.log.

        Args:
            name: of the pod.
            text: whole lines.
            t_unix: when the last of them was written, which the file shows too: logs are shown
                in the order in which they were written; None: not known.
        """
        safe_parts(name)
        path = self.run_dir / "logs" / "pods" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as out:
            out.write(text)
        if t_unix is not None:
            os.utime(path, (t_unix, t_unix))


@contextlib.contextmanager
def one_at_a_time(
    run_dir: Path, *, wait_s: float = 0.0, mono: Callable[[], float] = time.monotonic
) -> Iterator[bool]:
    """Yield whether no other process brings the same run now; where it cannot be told, True.

    Args:
        run_dir: the local run directory.
        wait_s: how long to wait for another to be done.
        mono: monotonic seconds.
    """
    import fcntl

    end = mono() + wait_s
    with (run_dir / f"{STATE}.lock").open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if mono() >= end:
                    yield False
                    return
                time.sleep(_LOOK_S)
            else:
                yield True
                return


def upload(
    run_dir: Path, there: str, out: IO[bytes], *, fresh: bool, known: Mapping[str, Any]
) -> None:
    """Write to `out` what `launcher.node.files put` is to have of a local run directory.

    Paths in its JSON files are changed to what the pods see. What came from there stays here.

    Args:
        run_dir: the local run directory.
        there: where the pods see it.
        out: a file.
        fresh: there must be no run yet.
        known: paths that were brought from there.

    Raises:
        OSError: a file cannot be read.
    """
    remove = [] if (run_dir / STOP_JSON).exists() else [STOP_JSON]
    out.write(frame(json.dumps({"fresh": fresh, "remove": remove}).encode()))
    begin = out.tell()
    out.write(bytes(8))
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in _own(run_dir, known):
            name = path.relative_to(run_dir).as_posix()
            if path.parent == run_dir and path.suffix == ".json" and path.is_file():
                data = _moved(path, str(run_dir), there)
                member = tar.gettarinfo(path, name)
                member.size = len(data)
                tar.addfile(_plain(member), io.BytesIO(data))
            else:
                tar.add(path, name, recursive=False, filter=_plain)
    end = out.tell()
    out.seek(begin)
    out.write((end - begin - 8).to_bytes(8, "big"))
    out.seek(0)


def _own(run_dir: Path, known: Mapping[str, Any]) -> Iterator[Path]:
    """Yield what is the launcher's own in a run directory, folders before what is in them."""
    for inside, folders, names in os.walk(run_dir):
        here = Path(inside)
        if here != run_dir and here.relative_to(run_dir).parts[0] in _THEIRS:
            continue
        folders.sort()
        in_code = here != run_dir and here.relative_to(run_dir).parts[0] == _CODE
        folders[:] = [name for name in folders if in_code or not name.startswith(".")]
        for name in folders:
            yield here / name
        for name in sorted(names):
            path = here / name
            if path.relative_to(run_dir).as_posix() in known:
                continue
            if in_code or not name.startswith("."):  # ours, and what is being written
                yield path


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Return a member without names of users here, which are nobody there."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _moved(path: Path, old: str, new: str) -> bytes:
    """Return a JSON file with the paths of the run as they are there."""
    data = path.read_bytes()
    try:
        value = json.loads(data)
    except ValueError:
        return data
    return (json.dumps(moved(value, old, new), indent=1) + "\n").encode()


def _copy(source: IO[bytes], out: IO[bytes]) -> None:
    while chunk := source.read(_COPY_BYTES):
        out.write(chunk)


def _numbers(known: Mapping[str, Any]) -> dict[str, int]:
    return {key: int(known[key]) for key in ("inode", "offset", "mtime_ns", "size")}


def upload_stop(run_dir: Path) -> bytes:
    """Return what `launcher.node.files put` is to have so that the run's agents know of a cancel.

    Raises:
        OSError: RUN/stop.json cannot be read.
    """
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(run_dir / STOP_JSON, STOP_JSON, filter=_plain)
    return frame(json.dumps({"fresh": False}).encode()) + frame(out.getvalue())
