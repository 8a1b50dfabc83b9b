"""The code that was submitted: a read-only copy in the run directory, which all restarts run.

RUN/code/<digest>/       the copy
RUN/code/<digest>.patch  what differs from the git revision, for people (`git apply`)
RUN/code.json            what was frozen, and what was before an upgrade

`submit` calls `survey` before it makes the run directory (it refuses what cannot be frozen)
and `freeze_run` after; `submit --resume RUN --upgrade` calls `upgrade`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elastic_trainer.command import split_command
from elastic_trainer.config import CodeSection, TrainConfig
from launcher.errors import UserError
from launcher.jobspec.spec import JobSpec
from launcher.ops.record.record import LauncherLog
from launcher.ops.run_dir import JOB_JSON, RENDERED
from launcher.ops.submitting.code_files import CodeFiles, list_code
from launcher.ops.submitting.git import patch_of
from launcher.render.local import checkpoint_dir, resolve
from launcher.whole_file import write_whole

CODE_JSON: Final = "code.json"
CODE_DIR: Final = "code"
_DIGEST_CHARS: Final = 16
"""Of the digest in the folder's name."""
_COPIERS: Final = 8
"""Threads that copy: on shared storage the time is round trips."""
_CHUNK_BYTES: Final = 1 << 20
_READ_ONLY: Final = 0o555


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """One frozen working directory, as code.json has it."""

    digest: str
    """SHA-256 over names, executable bits and contents; the folder has its first 16 digits."""
    dir: str
    """The copy, absolute."""
    source: str
    """Where it was copied from, absolute."""
    revision: str | None
    """Git's commit; None: no repository, or no commit yet."""
    branch: str | None
    dirty: bool | None
    """The files are not those of the revision; None: git had nothing to say."""
    num_files: int
    size_bytes: int
    num_untracked: int
    patch: str | None
    """File name in RUN/code of what differs from the revision; None: nothing, or too long."""
    exclude: tuple[str, ...]
    include: tuple[str, ...]
    max_mib: int
    skipped: tuple[str, ...]
    """Sockets, pipes and devices that were left out."""
    frozen_unix: float
    """When, in seconds since 1970."""

    def fields(self) -> dict[str, Any]:
        """Return what an event says of it."""
        return {
            "digest": self.digest,
            "revision": self.revision,
            "dirty": self.dirty,
            "files": self.num_files,
            "bytes": self.size_bytes,
            "source": self.source,
        }


def survey(spec: JobSpec, *, base_dir: str | Path, run_dir: Path) -> CodeFiles | None:
    """Return what `submit` is to freeze; None: the job runs no code of the user's.

    That is a job without `command:` and without a section `code:`; it runs the installed
    package. Reads only.

    Args:
        spec: the checked job.
        base_dir: folder that its relative paths are relative to.
        run_dir: where the run will be; left out of the copy should it lie within.

    Raises:
        UserError: HF201, HF202, HF640: see `list_code`.
    """
    if spec.command is None and "code" not in spec.model_fields_set:
        return None
    checkpoints = checkpoint_dir(spec, run_dir=run_dir, base_dir=base_dir)
    return list_code(
        Path(resolve(spec.code.dir, base_dir)),
        exclude=spec.code.exclude,
        include=spec.code.include,
        skip=(run_dir, Path(checkpoints)),
        max_mib=spec.code.max_mib,
    )


def freeze_run(
    run_dir: Path,
    files: CodeFiles,
    *,
    home: Path | None = None,
    wall: Callable[[], float] = time.time,
) -> Frozen:
    """Copy `files` into a new run and make its job.json point there.

    Args:
        run_dir: the run directory, with job.json in it.
        files: what `survey` returned.
        home: folder that gets the copy; None: the run. The tasks of an array share one.
        wall: the clock.

    Raises:
        UserError: HF641 a file cannot be copied; HF612 the run directory cannot be written.
    """
    frozen = _freeze(home or run_dir, files, wall)
    adopt(run_dir, frozen, wall=wall)
    return frozen


def adopt(run_dir: Path, frozen: Frozen, *, wall: Callable[[], float] = time.time) -> None:
    """Make a new run use code that was frozen already, as for the task before it.

    Raises:
        UserError: HF612 the run directory cannot be written.
    """
    _record(run_dir, frozen, ())
    _point_job_to(run_dir, frozen)
    _log(run_dir, wall).emit("code.frozen", **frozen.fields())


def upgrade(run_dir: Path, *, wall: Callable[[], float] = time.time) -> tuple[Frozen, Frozen]:
    """Freeze the working directory anew; every later start of the run uses the new copy.

    The caller has made sure that no job of the run is live: nodes that start at different
    times would run different code.

    Returns:
        What was before and what is now; they are equal where nothing had changed.

    Raises:
        UserError: HF642 the run has no frozen code; HF201, HF202, HF640, HF641, HF612 as
            at the first time.
    """
    before, history = load_frozen(run_dir)
    if before is None:
        raise UserError(
            "HF642",
            f"{run_dir} has no frozen code: its job has neither `command:` nor `code:` and runs "
            "the installed package; leave --upgrade out",
        )
    skip = [run_dir, *(Path(job.checkpoint.dir) for job in [_job(run_dir / JOB_JSON)] if job)]
    files = list_code(
        Path(before.source),
        exclude=before.exclude,
        include=before.include,
        skip=skip,
        max_mib=before.max_mib,
    )
    after = _freeze(run_dir, files, wall)
    if after.digest == before.digest:
        return before, before
    _record(run_dir, after, (*history, before))
    _point_job_to(run_dir, after)
    _log(run_dir, wall).emit("code.upgraded", was=before.digest, **after.fields())
    return before, after


def load_frozen(run_dir: Path) -> tuple[Frozen | None, tuple[Frozen, ...]]:
    """Return the frozen code of a run, and what was before it, oldest first.

    Raises:
        UserError: HF613 code.json cannot be read.
    """
    path = run_dir / CODE_JSON
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        history = tuple(_from_raw(item) for item in raw.pop("history"))
        return _from_raw(raw), history
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


# -- copying --------------------------------------------------------------------------------


def _freeze(run_dir: Path, files: CodeFiles, wall: Callable[[], float]) -> Frozen:
    """Copy `files` to RUN/code/<digest>, whole or not at all."""
    folder = run_dir.absolute() / CODE_DIR
    fresh = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
    try:
        fresh.mkdir(parents=True)
        lines = _copy_all(files, fresh)
        digest = hashlib.sha256("".join(sorted(lines)).encode(errors="surrogateescape")).hexdigest()
        name = digest[:_DIGEST_CHARS]
        _seal(fresh)
        if (folder / name).is_dir():
            remove_frozen(fresh)  # the same code was frozen before
        else:
            fresh.rename(folder / name)
        patch = _write_patch(files, folder, name)
    except OSError as error:
        remove_frozen(fresh)
        raise UserError(
            "HF612",
            f"{folder} cannot be written: {error.strerror or error}; use another --run-dir",
        ) from error
    except BaseException:
        remove_frozen(fresh)
        raise
    tree = files.tree
    return Frozen(
        digest=digest,
        dir=str(folder / name),
        source=str(files.source),
        revision=tree.revision if tree else None,
        branch=tree.branch if tree else None,
        dirty=tree.dirty if tree else None,
        num_files=len(files.names),
        size_bytes=files.size_bytes,
        num_untracked=len(tree.untracked) if tree else 0,
        patch=patch,
        exclude=files.exclude,
        include=files.include,
        max_mib=files.max_mib,
        skipped=files.skipped,
        frozen_unix=wall(),
    )


def _copy_all(files: CodeFiles, target: Path) -> list[str]:
    """Copy everything; return a line per file that says what it is."""
    for folder in {(target / name).parent for name in files.names}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_COPIERS) as pool:
        return list(pool.map(lambda name: _copy(files.source, target, name), files.names))


def _copy(source: Path, target: Path, name: str) -> str:
    """Copy one file or link and return its line of the digest.

    Raises:
        UserError: HF641 it cannot be read.
    """
    path, copy = source / name, target / name
    try:
        if path.is_symlink():
            points_to = _link_text(source, name)
            kind, digest = "link", points_to
        else:
            info = path.stat()
            content = path.open("rb")
            kind = "exec" if info.st_mode & 0o100 else "file"
    except OSError as error:
        raise UserError(
            "HF641",
            f"{path} cannot be copied: {error.strerror or error}; grant the permission, or leave "
            "it out with code.exclude",
        ) from error
    if kind == "link":
        copy.symlink_to(points_to)
    else:
        with content, copy.open("wb") as out:
            digest = _copy_bytes(content, out)
            # What others may not read here they may not read there; nor what the umask says.
            made = os.fstat(out.fileno()).st_mode
            os.fchmod(out.fileno(), info.st_mode & _READ_ONLY & (made | made >> 2 & 0o111))
        os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    return f"{kind} {digest} {name}\0"


def _copy_bytes(content: Any, out: Any) -> str:
    """Copy and return the SHA-256 of what was copied: the file may be changing."""
    digest = hashlib.sha256()
    while chunk := content.read(_CHUNK_BYTES):
        digest.update(chunk)
        out.write(chunk)
    return digest.hexdigest()


def _link_text(source: Path, name: str) -> str:
    """Return what the copy of a link says: within the code relative, else absolute."""
    link = source / name
    points_to = Path(os.path.normpath(link.parent / os.readlink(link)))  # noqa: PTH115  as text
    if points_to.is_relative_to(source):
        return os.path.relpath(points_to, link.parent)
    return str(points_to)


def _seal(folder: Path) -> None:
    """Take the right to write from `folder` and all folders in it; files have none already."""
    for inside, _, _ in os.walk(folder, topdown=False):
        os.chmod(inside, os.stat(inside).st_mode & _READ_ONLY)  # noqa: PTH101, PTH116  os.walk


def remove_frozen(folder: Path) -> None:
    """Remove a frozen copy, or what there is of it, although it is read-only."""
    for inside, _, _ in os.walk(folder):
        os.chmod(inside, 0o700)  # noqa: PTH101  os.walk gives texts
    shutil.rmtree(folder, ignore_errors=True)


def _write_patch(files: CodeFiles, folder: Path, name: str) -> str | None:
    """Write what differs from the revision; return the file's name, None for nothing."""
    if files.tree is None or not files.tree.dirty:
        return None
    patch = patch_of(files.source, files.tree)
    if not patch:
        return None
    path = folder / f"{name}.patch"
    path.unlink(missing_ok=True)
    # For the owner alone: it may hold what a file of narrower rights holds.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "wb") as out:
        out.write(patch)
    return path.name


# -- the record -----------------------------------------------------------------------------


def _record(run_dir: Path, frozen: Frozen, history: Sequence[Frozen]) -> None:
    raw = {**dataclasses.asdict(frozen), "history": [dataclasses.asdict(one) for one in history]}
    _replace(run_dir / CODE_JSON, json.dumps(raw, indent=1) + "\n")


def _from_raw(raw: dict[str, Any]) -> Frozen:
    texts = ("exclude", "include", "skipped")
    return Frozen(**{**raw, **{key: tuple(raw[key]) for key in texts}})


def _point_job_to(run_dir: Path, frozen: Frozen) -> None:
    """Make job.json, and what it was narrowed from, run the copy."""
    for name in (RENDERED, JOB_JSON):
        job = _job(run_dir / name)
        if job is not None:
            _replace(run_dir / name, pointed_to(job, frozen).to_json())


def pointed_to(job: TrainConfig, frozen: Frozen) -> TrainConfig:
    """Return `job` with its command run in the frozen copy."""
    code = CodeSection(dir=frozen.dir, source=frozen.source, digest=frozen.digest)
    if job.command is None:
        return dataclasses.replace(job, code=code)
    # Of the arguments nothing is changed: an absolute path there may well be data.
    target = split_command(job.command).target
    inside = target
    if Path(target).is_absolute():
        for root in (frozen.source, *([job.code.dir] if job.code else [])):
            if Path(target).is_relative_to(root):
                inside = str(Path(target).relative_to(root))
    at = job.command.index(target)
    command = (*job.command[:at], inside, *job.command[at + 1 :])
    return dataclasses.replace(job, code=code, command=command, command_dir=frozen.dir)


def _job(path: Path) -> TrainConfig | None:
    """Read a job.json; None: there is none."""
    try:
        return TrainConfig.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


def _replace(path: Path, text: str) -> None:
    """Write a file, whole or not at all: agents may read it at any time."""
    try:
        write_whole(path, text)
    except OSError as error:
        raise UserError(
            "HF612",
            f"{path} cannot be written: {error.strerror or error}; make room, or grant the "
            "permission",
        ) from error


def _log(run_dir: Path, wall: Callable[[], float]) -> LauncherLog:
    """Return an event file of this process's own."""
    return LauncherLog(run_dir, f"code-{int(wall())}-{os.getpid()}", wall=wall)
