"""Which files of a working directory are the code of a job. Reads names and sizes only."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from elastic_trainer.quantities import counted
from launcher.errors import UserError, Where
from launcher.ops.submitting.git import WorkTree, work_tree

ALWAYS_OUT: Final = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", ".DS_Store", "node_modules"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".tox", ".nox"),
)
"""Left out whatever the job says: nothing that runs needs them."""
MAX_FILES: Final = 50_000
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFiles:
    """What would be frozen of a working directory."""

    source: Path
    """The directory, absolute and resolved."""
    names: tuple[str, ...]
    """Relative paths of files and symbolic links, sorted."""
    size_bytes: int
    exclude: tuple[str, ...]
    include: tuple[str, ...]
    max_mib: int
    tree: WorkTree | None
    """None: git had nothing to say, and the directory was walked."""
    skipped: tuple[str, ...] = ()
    """Sockets, pipes, devices."""


def list_code(
    source: Path,
    *,
    exclude: Sequence[str] = (),
    include: Sequence[str] = (),
    skip: Iterable[Path] = (),
    max_mib: int = 256,
) -> CodeFiles:
    """Return the files of `source` that are its code.

    In a git repository: tracked files and untracked ones that are not ignored, as they are
    now; else everything. Never: caches, repositories' own folders, virtual environments,
    run directories.

    Args:
        source: the working directory.
        exclude: names or patterns that are left out: of any part of a path (`data`,
            `*.ckpt`), or with a slash of whole relative paths (`assets/video`).
        include: patterns of files that are copied although git ignores them.
        skip: folders that are left out: the run directory, checkpoints.
        max_mib: most that may be frozen, in MiB.

    Raises:
        UserError: HF201 there is no such folder; HF202 it cannot be read; HF640 too large.
    """
    folder = source.resolve()
    if not folder.is_dir():
        raise UserError(
            "HF201", f"{source} is not a folder; mend the path", where=Where(key="code.dir")
        )
    out = _Rules(exclude, tuple(_relative(folder, path) for path in skip))
    try:
        tree = work_tree(folder)
        found = [*tree.tracked, *tree.untracked] if tree is not None else _walk(folder, out)
        if tree is not None and include:
            found = [*found, *(name for name in _walk(folder, out) if _matches(name, include))]
        sizes, skipped = _measure(folder, found, out)
    except OSError as error:
        raise UserError(
            "HF202",
            f"{error.filename or folder} cannot be read: {error.strerror or error}; grant the "
            "permission, or leave it out with code.exclude",
            where=Where(key="code.dir"),
        ) from error
    _check_size(folder, sizes, max_mib * _MIB)
    return CodeFiles(
        source=folder,
        names=tuple(sorted(sizes)),
        size_bytes=sum(sizes.values()),
        exclude=tuple(exclude),
        include=tuple(include),
        max_mib=max_mib,
        tree=tree,
        skipped=tuple(skipped),
    )


class _Rules:
    """Says what is left out."""

    def __init__(self, exclude: Sequence[str], skip: Sequence[str | None]) -> None:
        patterns = [pattern.removeprefix("./").rstrip("/") for pattern in (*ALWAYS_OUT, *exclude)]
        self._parts = [pattern for pattern in patterns if "/" not in pattern]
        self._paths = [pattern for pattern in patterns if "/" in pattern]
        self._skip = frozenset(path for path in skip if path is not None)
        self._seen: dict[str, bool] = {}

    def name(self, path: str) -> bool:
        """Whether the last part of `path`, or `path` itself, is left out."""
        last = path.rpartition("/")[2]
        return (
            path in self._skip
            or any(fnmatch.fnmatchcase(last, pattern) for pattern in self._parts)
            or any(fnmatch.fnmatchcase(path, pattern) for pattern in self._paths)
        )

    def folder(self, root: Path, path: str) -> bool:
        """Whether folder `path` is left out, or one above it is."""
        if path not in self._seen:
            above = path.rpartition("/")[0]
            self._seen[path] = (
                bool(above and self.folder(root, above)) or self.name(path) or _alien(root / path)
            )
        return self._seen[path]

    def file(self, root: Path, path: str) -> bool:
        """Whether file `path` is left out, or a folder above it is."""
        above = path.rpartition("/")[0]
        return self.name(path) or bool(above and self.folder(root, above))


def _alien(folder: Path) -> bool:
    """Return whether `folder` is a virtual environment, a sweep or a run directory."""
    if (folder / "pyvenv.cfg").is_file() or (folder / "sweep.json").is_file():
        return True
    return (folder / "job.json").is_file() and (folder / "events").is_dir()


def _matches(name: str, patterns: Sequence[str]) -> bool:
    last = name.rpartition("/")[2]
    return any(
        fnmatch.fnmatchcase(name if "/" in pattern else last, pattern) for pattern in patterns
    )


def _relative(folder: Path, path: Path) -> str | None:
    """Return `path` relative to `folder`; None: it lies elsewhere."""
    try:
        relative = str(PurePosixPath(path.resolve().relative_to(folder)))
    except ValueError:
        return None
    return None if relative == "." else relative


def _walk(root: Path, out: _Rules) -> list[str]:
    return list(_walked(root, "", out))


def _walked(root: Path, inside: str, out: _Rules) -> Iterator[str]:
    with os.scandir(root / inside) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        path = f"{inside}/{entry.name}" if inside else entry.name
        if entry.is_dir(follow_symlinks=False):
            if not out.folder(root, path):
                yield from _walked(root, path, out)
        elif not out.name(path):
            yield path


def _measure(root: Path, names: Iterable[str], out: _Rules) -> tuple[dict[str, int], list[str]]:
    """Return the sizes of what is taken, and what is neither file nor link."""
    sizes: dict[str, int] = {}
    skipped = []
    for name in names:
        if name in sizes or out.file(root, name):
            continue
        info = (root / name).lstat()
        if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
            sizes[name] = info.st_size
        elif not stat.S_ISDIR(info.st_mode):
            skipped.append(name)
    return sizes, skipped


def _check_size(folder: Path, sizes: dict[str, int], max_bytes: int) -> None:
    """Raise HF640 where there is too much, naming what is largest."""
    total = sum(sizes.values())
    if total <= max_bytes and len(sizes) <= MAX_FILES:
        return
    tops: Counter[str] = Counter()
    for name, size in sizes.items():
        tops[name.partition("/")[0]] += size if total > max_bytes else 1
    if total > max_bytes:
        what = f"{total / _MIB:.0f} MiB, more than code.max_mib: {max_bytes / _MIB:.0f}"
        largest = ", ".join(f"{top} ({size / _MIB:.0f} MiB)" for top, size in tops.most_common(3))
    else:
        what = f"{len(sizes):,} files, more than {MAX_FILES:,}"
        largest = ", ".join(
            f"{top} ({counted(count, 'file')})" for top, count in tops.most_common(3)
        )
    raise UserError(
        "HF640",
        f"{folder} holds {what}; the most is in {largest}: leave out what is no code with "
        "code.exclude, or name a smaller folder",
        where=Where(key="code.dir"),
    )
