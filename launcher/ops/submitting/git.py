"""What git says of a working directory: revision, files, patch. Reads only; never needed.

Without git, outside a repository, or where git refuses (another owner's repository), the
answer is None and the caller goes on without.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

GIT_TIMEOUT_S: Final = 60.0
MAX_PATCH_BYTES: Final = 16 << 20
"""A longer patch is left out: what it says is in the copy."""
_CONFIG: Final = (
    # Nothing that the repository's configuration names is run, and nothing is written.
    *("-c", "core.fsmonitor=false"),
    *("-c", "core.hooksPath=/dev/null"),
    *("-c", "core.untrackedCache=false"),
)
_GITLINK: Final = "160000"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkTree:
    """A working directory as git sees it. Paths are relative to the directory."""

    revision: str | None
    """Commit that is checked out; None: there is none yet."""
    branch: str | None
    """None: detached."""
    changed: bool
    """Tracked files differ from the revision."""
    tracked: tuple[str, ...] = ()
    """Those that are there; files of submodules included."""
    untracked: tuple[str, ...] = ()
    """Those that no .gitignore leaves out."""
    submodules: tuple[str, ...] = field(default=())

    @property
    def dirty(self) -> bool:
        """Whether the files are not those of the revision."""
        return self.changed or bool(self.untracked)


def work_tree(folder: Path) -> WorkTree | None:
    """Return what git knows of `folder`; None without git, or outside a repository.

    A folder that its repository ignores counts as outside.
    """
    if not _is_inside(folder):
        return None
    revision = _line(folder, "rev-parse", "--verify", "--quiet", "HEAD")
    branch = _line(folder, "symbolic-ref", "--quiet", "--short", "HEAD")
    tracked, submodules = _tracked(folder)
    untracked = list(_names(folder, "ls-files", "-z", "--others", "--exclude-standard"))
    status = _git(folder, "status", "--porcelain", "-z", "--untracked-files=no", "--", ".")
    for name in submodules:
        inner = work_tree(folder / name)
        if inner is not None:
            tracked += [f"{name}/{path}" for path in inner.tracked]
            untracked += [f"{name}/{path}" for path in inner.untracked]
    return WorkTree(
        revision=revision,
        branch=branch,
        changed=bool(status),
        # What was deleted is still in the index; a folder in `untracked` is a repository
        # of its own that nobody made a submodule.
        tracked=tuple(name for name in tracked if os.path.lexists(folder / name)),
        untracked=tuple(name for name in untracked if not name.endswith("/")),
        submodules=tuple(submodules),
    )


def patch_of(folder: Path, tree: WorkTree) -> bytes | None:
    """Return a patch that makes `folder` out of its revision, untracked files included.

    `git apply` reads it in `folder`. None: there is no revision, or the patch would be
    longer than MAX_PATCH_BYTES. Files of submodules are not in it.
    """
    where = ("rev-parse", "--path-format=absolute", "--git-path")
    index, objects = _line(folder, *where, "index"), _line(folder, *where, "objects")
    if tree.revision is None or index is None or objects is None:
        return None
    own = [
        name
        for name in tree.untracked
        if not any(name.startswith(f"{s}/") for s in tree.submodules)
    ]
    with tempfile.TemporaryDirectory(prefix="holdfast-index-") as scratch:
        copy = Path(scratch) / "index"
        if Path(index).is_file():
            shutil.copy2(index, copy)  # git tells by its time which files to read again
        # An index and a place for objects of our own: nothing is written to the repository.
        (Path(scratch) / "objects").mkdir()
        env = {
            "GIT_INDEX_FILE": str(copy),
            "GIT_OBJECT_DIRECTORY": f"{scratch}/objects",
            "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
        }
        if own:
            listed = b"\0".join(os.fsencode(name) for name in own)
            flags = ("--pathspec-from-file=-", "--pathspec-file-nul")
            added = _git(folder, "--literal-pathspecs", "add", "-N", *flags, env=env, stdin=listed)
            if added is None:
                return None
        how = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--relative")
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=all")
        patch = _git(folder, "diff", *how, *prefixes, tree.revision, "--", ".", env=env)
    return None if patch is None or len(patch) > MAX_PATCH_BYTES else patch


def _is_inside(folder: Path) -> bool:
    if _line(folder, "rev-parse", "--is-inside-work-tree") != "true":
        return False
    # Exit code 0: ignored. It complains about "." at the top, which cannot be ignored.
    top = _line(folder, "rev-parse", "--show-prefix")
    return not top or _git(folder, "check-ignore", "-q", ".") is None


def _tracked(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of files and of submodules in the index."""
    files: list[str] = []
    submodules: list[str] = []
    for entry in _names(folder, "ls-files", "-z", "--stage"):
        meta, _, name = entry.partition("\t")
        (submodules if meta.startswith(_GITLINK) else files).append(name)
    return list(dict.fromkeys(files)), submodules


def _names(folder: Path, *args: str) -> list[str]:
    out = _git(folder, *args) or b""
    return [os.fsdecode(name) for name in out.split(b"\0") if name]


def _line(folder: Path, *args: str) -> str | None:
    out = _git(folder, *args)
    return None if out is None else out.decode(errors="replace").strip() or None


def _git(
    folder: Path,
    *args: str,
    env: dict[str, str] | None = None,
    stdin: bytes = b"",
) -> bytes | None:
    """Return what git prints; None where it cannot be run, refuses, or takes too long."""
    command: Sequence[str] = ("git", *_CONFIG, "-C", str(folder), *args)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", **(env or {})},
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
