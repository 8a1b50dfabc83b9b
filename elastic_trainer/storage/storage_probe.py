"""Checks whether a directory's file system can hold a run, for the launcher and every agent."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elastic_trainer.storage.files import beside, write_new


class StorageError(Exception):
    """The file system lacks what a run relies on (HF617)."""

    code: Final = "HF617"


def probe_storage(
    directory: Path,
    *,
    is_data: bool = False,
    link: Callable[[Path, Path], None] = os.link,
    mounts: Path = Path("/proc/self/mountinfo"),
) -> None:
    """Check that files keep owner and mode, hard links are exclusive, and NFS is without nocto.

    The board's versions and the secret are published by `link`, with which one of many succeeds;
    the secret is read only if nobody but this user may read it. Where both are in Kubernetes
    (`is_data`), only nocto is refused (`look_afresh`). A directory that cannot be written passes:
    the next write says why.

    Raises:
        StorageError: HF617, what is missing, and what to use instead.
    """
    with beside(directory / "probe") as file, beside(directory / "probe") as second:
        try:
            write_new(file, b"")
            file.chmod(0o600)
            found = file.stat()
            nocto = _is_without_cto(found.st_dev, mounts)
        except OSError:
            return
        if nocto:
            raise _lacks(
                directory,
                "it is NFS mounted with nocto: for a minute it may show an older board",
                "mount it without",
            )
        if is_data:
            return
        if found.st_uid != os.geteuid():
            raise _lacks(
                directory,
                f"a file of user {os.geteuid()} belongs to user {found.st_uid} there: the server "
                "squashes users (NFS: all_squash, or root_squash for root), or the mount names one",
                "run the job as a user whom the server keeps",
            )
        if found.st_mode & 0o077:
            mode = stat.S_IMODE(found.st_mode)
            raise _lacks(
                directory,
                f"a file of mode 0600 has mode {mode:04o} there: the mount sets modes itself",
                "mount it so that files keep their modes",
            )
        try:
            link(file, second)
        except OSError as error:
            raise _lacks(
                directory,
                f"it has no hard links ({error.strerror or error}), as most mounts of object "
                "stores (gcsfuse, blobfuse, s3fs) and some of SMB",
                "keep data there, and the run elsewhere",
            ) from error
        try:
            link(file, second)
        except FileExistsError:
            return
        raise _lacks(directory, "a hard link replaces a file that is there", "run elsewhere")


def _is_without_cto(device: int, mounts: Path) -> bool:
    """Return whether a file system is NFS with `nocto`, by proc_pid_mountinfo(5)."""
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        place, _, kind = line.partition(" - ")
        if place.split()[2] == number and kind.startswith("nfs"):
            return "nocto" in kind.split()[2].split(",")
    return False


def _lacks(directory: Path, what: str, fix: str) -> StorageError:
    return StorageError(
        f"{StorageError.code} {directory} cannot hold a run: {what}; {fix}: use a directory on "
        "NFS, Lustre, GPFS, CephFS or a disk (--run-dir; on Kubernetes kubernetes.claim)"
    )
