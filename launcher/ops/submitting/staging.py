"""Copies a run's virtual environment to each node's own disk, once per node.

Thousands of nodes that import torch from one file server put it out of service: tens of
thousands of small reads each. Instead `submit` packs the environment into one archive in the
run, and each node unpacks it (one long read) to a folder named by its digest, from which
all later starts import. Copies that nobody has used for a while are removed.

A lock on the node's disk (never on shared storage) makes one start unpack and the others
wait; a rename publishes a copy, whole or not at all. Locks go with their process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Self

from launcher.ops.record.record import LauncherLog
from launcher.ops.submitting.env_archive import Archive, Hashing, StagingError, load_archive

UNUSED_S: Final = 7 * 86400.0
"""A copy that no start has used for this long is removed by the next job that stages."""
WAIT_S: Final = 1800.0
"""How long a start waits for another one of its node to unpack."""
_PREFIX_VARIABLES: Final = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LIBRARY_PATH"),
    *("CPATH", "PKG_CONFIG_PATH"),
)
"""Variables in which paths of the environment are replaced by those of the copy."""
_CHUNK_BYTES: Final = 1 << 20
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a node starts its agent."""

    python: str
    """Interpreter."""
    env: Mapping[str, str]
    held: tuple[int, ...] = ()
    """Descriptors that keep the copy from being removed: keep them open as long as it is used."""


def agent_start(
    run_dir: Path,
    *,
    node: str,
    env: Mapping[str, str],
    wall: Callable[[], float] = time.time,
    mono: Callable[[], float] = time.monotonic,
) -> Start:
    """Return how a node starts its agent: from its own copy where the run stages.

    When the copy cannot be made the shared environment is used: slower, yet it runs. An
    event `environment.staged` says which, and why.
    """
    begin = mono()
    problem, how, path = "", "shared", ""
    start = Start(python=sys.executable, env=dict(env))
    try:
        archive = load_archive(run_dir)
        if archive is None:
            return start
        copy = staged(run_dir, archive, now=wall())
        how, path = copy.how, str(copy.path)
        start = Start(
            python=str(copy.path / "bin" / "python"),
            env=moved(env, archive.prefix, path),
            held=(copy.detach(),),
        )
    except StagingError as error:
        problem = str(error)
        sys.stderr.write(f"holdfast: the environment is not staged on {node}: {problem}\n")
    log = LauncherLog(run_dir, f"staging-{node}-{os.getpid()}", wall=wall)
    seconds = round(mono() - begin, 3)
    log.emit("environment.staged", node=node, how=how, path=path, seconds=seconds, problem=problem)
    return start


def moved(env: Mapping[str, str], prefix: str, copy: str) -> dict[str, str]:
    """Return `env` with paths of the environment `prefix` replaced by those of its copy."""
    result = dict(env)
    for name in _PREFIX_VARIABLES:
        if name not in result:
            continue
        entries = result[name].split(os.pathsep)
        result[name] = os.pathsep.join(
            copy + entry[len(prefix) :]
            if entry == prefix or entry.startswith(f"{prefix}/")
            else entry
            for entry in entries
        )
    return result


class Copy:
    """A node's copy of an environment; it is not removed while this is open."""

    def __init__(self, path: Path, how: str, lock: int) -> None:
        self.path, self.how, self._lock = path, how, lock

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of it."""
        os.close(self.detach())

    def detach(self) -> int:
        """Return the descriptor that holds it; the caller closes it."""
        lock, self._lock = self._lock, -1
        return lock


def staged(
    run_dir: Path,
    archive: Archive,
    *,
    now: float,
    wait_s: float = WAIT_S,
    unused_s: float = UNUSED_S,
) -> Copy:
    """Return this node's copy of `archive`; unpack it where there is none.

    Args:
        run_dir: the run that has the archive.
        archive: what it is.
        now: seconds since 1970, to tell old copies.
        wait_s: longest wait for another start that unpacks the same.
        unused_s: see UNUSED_S.

    Raises:
        StagingError: no room, a damaged archive, a folder that is not ours.
    """
    folder = Path(archive.stage)
    name = f"holdfast-env-{os.geteuid()}-{archive.sha256[:16]}"
    target = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(folder / f"{name}.lock")
        try:
            how = _ensure(run_dir, archive, target, lock, wait_s)
            os.utime(folder / f"{name}.lock", (now, now))
            _sweep(folder, keep=name, older_than=now - unused_s)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise StagingError(f"{where}{error.strerror or error}") from error
    return Copy(target, how, lock)


def _ensure(run_dir: Path, archive: Archive, target: Path, lock: int, wait_s: float) -> str:
    """Make the copy unless it is there; on return `lock` is held shared."""
    deadline = time.monotonic() + wait_s
    how = "found"
    while True:
        _take(lock, fcntl.LOCK_SH, deadline)
        if _is_ours(target):
            return how
        # Letting go between the two is fine: who comes in between makes it or removes it.
        _take(lock, fcntl.LOCK_EX, deadline)
        if not _is_ours(target):
            _unpack(run_dir / "env" / archive.file, archive, target)
            how = "unpacked"


def _take(lock: int, kind: int, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(lock, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EINTR):
                raise
        else:
            return
        if time.monotonic() > deadline:
            raise StagingError("another start of this node is still unpacking the environment")
        time.sleep(_POLL_S)


def _open_lock(path: Path) -> int:
    """Open the lock of a copy; it must be ours, for the folder may be open to all."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path, flags, 0o600)
    if os.fstat(lock).st_uid != os.geteuid():
        os.close(lock)
        raise StagingError(f"{path} belongs to somebody else; name another folder in env.stage")
    return lock


def _is_ours(target: Path) -> bool:
    """Return whether the copy is there.

    Raises:
        StagingError: somebody else made it: code of theirs is not run.
    """
    try:
        info = target.lstat()
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise StagingError(f"{target} was not made by us; remove it, or name another env.stage")
    return True


def _unpack(source: Path, archive: Archive, target: Path) -> None:
    """Unpack beside `target` and rename: whole or not at all."""
    for left in target.parent.glob(f".{target.name}.*"):  # by a start that was killed
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(target.parent).free
    if free < archive.unpacked_bytes * 1.05:
        raise StagingError(
            f"{target.parent} has {free / 2**30:.1f} GiB free, the environment takes "
            f"{archive.unpacked_bytes / 2**30:.1f}"
        )
    fresh = target.parent / f".{target.name}.{os.getpid()}"
    fresh.mkdir(mode=0o700)
    try:
        with source.open("rb", buffering=0) as file:
            counted = Hashing(file)
            with _reading(counted, compressed=archive.file.endswith(".zst")) as stream:
                _extract(stream, fresh)
            while counted.read(_CHUNK_BYTES):
                pass  # what tar leaves unread belongs to the digest
        if counted.digest.hexdigest() != archive.sha256:
            raise StagingError(f"{source} is damaged: its SHA-256 is not the one recorded")
        fresh.rename(target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _extract(stream: IO[bytes], fresh: Path) -> None:
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_CHUNK_BYTES) as tar:
            # "tar" and not "data": an environment has absolute links to its interpreter.
            tar.extractall(fresh, filter="tar")
    except (tarfile.TarError, EOFError) as error:
        raise StagingError(f"the archive is damaged: {error}") from error


@contextlib.contextmanager
def _reading(file: Any, *, compressed: bool) -> Iterator[IO[bytes]]:
    if not compressed:
        yield file
        return
    try:
        import zstandard
    except ImportError as error:
        raise StagingError("the package zstandard is missing in the environment") from error
    try:
        with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as stream:
            yield stream
    except zstandard.ZstdError as error:
        raise StagingError(f"the archive is damaged: {error}") from error


def _sweep(folder: Path, *, keep: str, older_than: float) -> None:
    """Remove our copies that no start has used since `older_than` and nobody holds."""
    for path in folder.glob(f"holdfast-env-{os.geteuid()}-*.lock"):
        name = path.name.removesuffix(".lock")
        if name == keep or path.lstat().st_mtime > older_than:
            continue
        lock = _open_lock(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass  # in use
        else:
            shutil.rmtree(folder / name, ignore_errors=True)
        finally:
            os.close(lock)
