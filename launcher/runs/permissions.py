"""Who may read a run: umask and group of everything in its directory.

`slurm.umask` and `slurm.group` of the job file. The launcher sets the umask while it writes,
and so for sbatch, which hands it on to the job; the script sets it again. The group is that
of the run directory, which hands it on to all that is made in it (the set-group-ID bit).
Nothing needs root, and nothing run as root reads a run: storage may squash root.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launcher.spec.errors import UserError, Where


def check_group(name: str) -> int:
    """Return the id of group `name`, to which this user can give files.

    Raises:
        UserError: HF643 there is none, or the user is not in it.
    """
    try:
        gid = grp.getgrnam(name).gr_gid
    except KeyError:
        raise _wrong(f"group {name} does not exist on this machine; fix the name") from None
    mine = {os.getegid(), *os.getgroups()}
    if gid not in mine and os.geteuid() != 0:
        names = ", ".join(sorted(_group_name(each) for each in mine))
        raise _wrong(f"{_user_name()} is not in group {name}; use one of {names}")
    return gid


@contextmanager
def umask(text: str | None) -> Iterator[None]:
    """Write files under umask `text`, octal digits, for a while; None: as it is.

    For a program's main thread: the umask is that of the whole process.
    """
    if text is None:
        yield
        return
    before = os.umask(int(text, 8))
    try:
        yield
    finally:
        os.umask(before)


def umask_of(run_dir: Path) -> str:
    """Return the umask that a run directory was made under, to continue with it in the same way."""
    return f"{0o777 & ~stat.S_IMODE(run_dir.stat().st_mode):04o}"


def check_run_dir(run_dir: Path) -> None:
    """See that only this user, and the groups it is shared with, can change a run directory.

    Who can write into it, or can put another in its place, runs code as this user. A folder above
    it in which others may write must have the sticky bit, as /tmp has.

    Raises:
        UserError: HF616 others can; nothing was changed.
    """
    fix = "use a --run-dir of your own"
    if run_dir.exists():
        found = run_dir.stat()
        if found.st_uid != os.geteuid():
            raise UserError(
                "HF616",
                f"run directory {run_dir} belongs to user {found.st_uid}, this is user "
                f"{os.geteuid()}, and its owner can change code and checkpoints; {fix}",
            )
        if found.st_mode & stat.S_IWOTH:
            raise UserError(
                "HF616",
                f"run directory {run_dir} has mode {stat.S_IMODE(found.st_mode):04o}: every user "
                f"can change code and checkpoints; chmod o-w {run_dir}, and use an umask (or "
                f"slurm.umask) as 0022",
            )
    for folder in dict.fromkeys((*run_dir.absolute().parents, *run_dir.resolve().parents)):
        mode = folder.stat().st_mode if folder.exists() else 0
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UserError(
                "HF616",
                f"run directory {run_dir}: every user can put another in its place, since {folder} "
                f"has mode {stat.S_IMODE(mode):04o}; chmod o-w {folder} (or +t), or {fix}",
            )


def make_run_dir(run_dir: Path, *, group: str | None) -> None:
    """Make a run directory that hands on `group` to all that will be made in it.

    Raises:
        UserError: HF643 the group cannot be used; HF612 the folder cannot be made.
    """
    gid = None if group is None else check_group(group)
    try:
        if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            return  # somebody's already: whoever writes into it will refuse
        run_dir.mkdir(parents=True, exist_ok=True)
        if gid is not None:
            os.chown(run_dir, -1, gid)
            run_dir.chmod(stat.S_IMODE(run_dir.stat().st_mode) | stat.S_ISGID)
    except OSError as error:
        raise UserError(
            "HF612",
            f"run directory {run_dir} cannot be made: {error.strerror or error}; "
            "use another --run-dir",
        ) from error


def _wrong(message: str) -> UserError:
    return UserError("HF643", message, where=Where(key="slurm.group"))


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
