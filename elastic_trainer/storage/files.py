"""Writes files on shared storage, complete or not at all, and reads those of others.

Temporary names cannot be guessed, and are never links: others who may write into the directory can
neither take them first nor lead a write elsewhere. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import json
import logging
import os
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from elastic_trainer.storage.typed import parse_json

_Item = TypeVar("_Item")
_Read = TypeVar("_Read")

CLAIM_S: Final = 5.0
"""Without hard links: the process with the right to write a file has died if it takes so long."""
_POLL_S: Final = 0.02
_NO_LINKS: Final = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
"""What file systems without hard links say, by their kind."""
OUTAGES: Final = {
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ETIMEDOUT),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EAGAIN),
}
"""What a storage says that is away, of all that it has: time may help, or another node."""


def outage_of(error: BaseException | None) -> OSError | None:
    """Return the error of a storage that is away which `error` is, or was raised from."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in OUTAGES:
            return error
        error = error.__cause__
    return None


def write_new(
    path: Path, content: bytes, *, durable: bool = False, mode: int | None = None
) -> None:
    """Write a new file; `durable`: it is on the disk on return; without a `mode` the umask decides.

    Raises:
        FileExistsError: the name is taken, perhaps by a link.
        OSError: the file cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o666)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Name a temporary file in the directory of `path`; remove it at the end."""
    temp = path.with_name(f".{path.name}-{secrets.token_hex(16)}")
    try:
        yield temp
    finally:
        with contextlib.suppress(OSError):
            temp.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write or replace a file, complete or not at all.

    Raises:
        OSError: the folder cannot be written; nothing is left of the attempt.
    """
    with beside(path) as temp:
        write_new(temp, content.encode() if isinstance(content, str) else content)
        temp.replace(path)


def publish(
    path: Path,
    content: bytes,
    *,
    mode: int | None = None,
    link: Callable[[Path, Path], None] = os.link,
    claim_s: float = CLAIM_S,
) -> bool:
    """Write a file to the disk, complete or not at all; return False if it was there already.

    Without a `mode` the umask decides.

    After a lost reply of NFS the file that was there may be this call's: read it.

    A file system without hard links holds a run only where board and secret are in Kubernetes
    (`storage_probe`). There the right to write goes to whoever makes an empty file (`_claimed`).

    Raises:
        OSError: the folder cannot be written.
    """
    if path.exists():
        return False
    with beside(path) as temp:
        write_new(temp, content, durable=True, mode=mode)
        made = True
        try:
            link(temp, path)
        except FileExistsError:
            made = False
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _claimed(path, temp, claim_s)
        fsync(path.parent)  # the name is on the disk as well, whoever made it
    return made


def _claimed(path: Path, temp: Path, claim_s: float) -> bool:
    """Rename `temp` to `path` if this call makes an empty file first; return whether it did.

    An empty file is complete at once, and O_EXCL gives it to one of many. The others wait for
    `path`; if it does not come, its writer has died, and the next claim is free. Only a writer
    halted for `claim_s` right before its rename can replace a later file.
    """
    for turn in itertools.count():
        claim = path.with_name(f".{path.name}.claim-{turn}")
        try:
            write_new(claim, b"")
        except FileExistsError:
            if _comes(path, claim_s):
                return False
            continue
        try:
            if there := not path.exists():
                temp.replace(path)
        finally:
            claim.unlink(missing_ok=True)
        return there
    raise AssertionError("claims are counted without end")


def _comes(path: Path, for_s: float) -> bool:
    """Wait for a file of another process; return whether it came."""
    deadline = time.monotonic() + for_s
    while not path.exists():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
        look_afresh(path.parent)
    return True


def look_afresh(directory: Path) -> None:
    """Have the next look-ups in `directory` find what the server has by now.

    Clients of NFS remember for 30 to 60 s (`acdirmin`, `acdirmax`) that a name was absent. Opening
    the directory asks the server for its attributes (close-to-open consistency, so not with
    `nocto`); once these have changed, no remembered absence counts.

    A directory that cannot be opened passes: the look-up says why.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


# --- files that somebody else made: a pipe would block, a device never ends -------------------

MAX_JSON_BYTES: Final = 256 << 20
"""No JSON file of a run or a model is longer: job.json has 200 KB, a manifest 150 bytes a file."""


def open_regular(path: Path, *, flags: int = 0) -> io.BufferedReader:
    """Open a plain file, or a link to one; with `flags` of os.open.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device, a socket or a folder.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | flags)
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(fd, "rb")
    os.close(fd)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, max_bytes: int = MAX_JSON_BYTES, *, flags: int = 0) -> bytes:
    """Return the content of a plain file, opened with `flags` of os.open.

    Raises:
        OSError: as `open_regular`; or it is longer than `max_bytes`.
    """
    with open_regular(path, flags=flags) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"longer than {max_bytes:,} bytes", str(path))
        return file.read()


def read_end(path: Path, num_bytes: int) -> str:
    """Return the last `num_bytes` of a plain file as text; its first line may be cut.

    Raises:
        OSError: as `open_regular`.
    """
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - num_bytes))
        return file.read().decode(errors="replace")


def of_each(
    items: Iterable[_Item], read: Callable[[_Item], _Read], name: Callable[[_Item], object] = str
) -> Iterator[_Read]:
    """Yield what `read` makes of each item of a set; say of which it can make nothing, and go on.

    An item that has gone since the set was listed is none. What `read` may raise is not known
    here: items were made by others, by other versions, or by a disk that fails.
    """
    for item in items:
        try:
            found = read(item)
        except FileNotFoundError:
            continue
        except Exception as error:  # noqa: BLE001  see above
            skipped(name(item), why_unread(error))
            continue
        yield found


def why_unread(error: BaseException) -> str:
    """Return why an item is not read; where a right is missing, the command that gives it."""
    why = getattr(error, "strerror", None) or str(error)
    if not isinstance(error, PermissionError) or error.filename is None:
        return why
    path = Path(str(error.filename))
    closed = next((each for each in reversed(path.parents) if not os.access(each, os.X_OK)), path)
    return f"{why}; its owner runs: chmod a+rX {shlex.quote(str(closed))}"


@functools.lru_cache(maxsize=4096)  # once a process
def skipped(what: object, why: str) -> None:
    """Say which item of a set is passed over, and why."""
    said = f"{what} is skipped: {why}".encode(errors="backslashreplace").decode()
    logging.getLogger("holdfast").warning("%s", said)


def is_torn(path: Path) -> bool:
    """Return whether a file that only grows has a last line that is not whole, as far as known.

    A crash or a full disk leaves it so; what is appended then begins with a newline.
    """
    with contextlib.suppress(OSError), open_regular(path) as file:
        if size := os.fstat(file.fileno()).st_size:
            file.seek(size - 1)
        return file.read(1) not in (b"", b"\n")
    return False


def check_output(path: Path) -> None:
    """Refuse to write a user's file over a link, or over anything but a plain file.

    Raises:
        OSError: `path` is a link, a folder or something else.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and links are not followed", str(path))
    if path.exists() and not path.is_file():
        raise OSError(errno.EEXIST, "it is not a regular file", str(path))


def write_json(path: Path, value: Mapping[str, Any], *, indent: int | None = None) -> None:
    """Write an object by `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=indent) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty where it cannot be read."""
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


MEGATRON_PAIR: Final = (".bin", ".idx")


def megatron_prefixes(path: Path) -> list[Path]:
    """Return the prefixes of the Megatron datasets at `path`: a prefix, one of its files, a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    prefix = path.with_suffix("") if path.suffix in MEGATRON_PAIR else path
    # Appended: with_suffix would replace what follows the prefix's last dot.
    if any(Path(f"{prefix}{suffix}").is_file() for suffix in MEGATRON_PAIR) or not path.is_dir():
        return [prefix]
    return sorted({file.with_suffix("") for file in path.iterdir() if file.suffix in MEGATRON_PAIR})
