"""The code of a job: which files it is, and the read-only copy of them that every start runs.

RUN/code/<digest>/       the copy
RUN/code/<digest>.patch  what differs from the git revision, for people (`git apply`)
RUN/code.json            what was frozen, and what was before an upgrade

submitit's RsyncSnapshot does not fit: it clones the repository, so that excluded files and
`.git` are in the copy, leaves untracked files out, and fails at file names that git quotes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elastic_trainer.plan.command import split_command
from elastic_trainer.plan.config import CodeSection, TrainConfig
from elastic_trainer.plan.quantities import counted, sized
from elastic_trainer.storage.files import open_regular, read_regular, write_atomic, write_json
from elastic_trainer.storage.typed import parse_json
from launcher.record.files import note_event
from launcher.render.local import checkpoint_dir, resolve
from launcher.runs import run_dir as run_dirs
from launcher.spec.errors import Problem, UserError, Where, writing
from launcher.spec.sections import Code
from launcher.spec.spec import JobSpec

ALWAYS_EXCLUDED: Final = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", ".DS_Store", "node_modules"),
    *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints", ".tox", ".nox"),
)
SECRET_FILES: Final = (
    *(".env", ".env.*", "*.env", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "*.pem", "*.key"),
    *("*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "kubeconfig", "*.kubeconfig"),
    *(".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc", ".pgpass", ".my.cnf"),
    *(".htpasswd", ".dockercfg", ".dockerconfigjson", ".vault-token", "credentials.json"),
    *(".aws", ".ssh", ".gnupg", ".kube", ".azure", ".gcloud"),
)
"""Names of files and folders that hold keys and passwords; code.include may name one.

From dotenv, ssh-keygen(1), openssl(1), curl's and ftp's .netrc, git-credential-store(1), npm, pip
and twine, psql, mysql, htpasswd(1), Docker, Vault, Google Cloud, kubectl, AWS CLI, GnuPG, Azure.
"""
_EXAMPLES: Final = (".env.example", ".env.sample", ".env.template", ".env.dist")
MAX_FILES: Final = 50_000
MAX_PATCH_BYTES: Final = 16 << 20
"""A longer patch is left out: what it says is in the copy."""
_COPIERS: Final = 8
"""Threads that copy: on shared storage the time is round trips."""
_READ_ONLY: Final = 0o555
_GIT_TIMEOUT_S: Final = 60.0
_GIT: Final = (
    # Nothing that the repository's configuration names is run, and nothing is written.
    *("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null"),
    *("-c", "core.untrackedCache=false", "--no-optional-locks"),
)
_UNTRACKED: Final = ("ls-files", "-z", "--others", "--exclude-standard")


@dataclass(frozen=True, kw_only=True)
class CodeSource:
    """A working directory that is to be frozen, or was."""

    source: str
    """The directory, absolute and resolved."""
    revision: str | None = None
    """Git's commit; None: no repository, or no commit yet."""
    branch: str | None = None
    """None: no repository, or detached."""
    dirty: bool | None = None
    """The files are not those of the revision; None: git does not say."""
    num_files: int
    size_bytes: int
    num_untracked: int = 0
    """Files that git neither tracks nor ignores, without submodules'."""
    exclude: tuple[str, ...]
    include: tuple[str, ...]
    max_mib: int
    skipped: tuple[str, ...]
    """Sockets, pipes and devices that are left out."""
    secrets: tuple[str, ...] = ()
    """Left out because SECRET_FILES names them; folders end in a slash."""


@dataclass(frozen=True, kw_only=True)
class CodeFiles:
    """The files to freeze."""

    about: CodeSource
    names: tuple[str, ...]
    """Relative paths of files and symbolic links, sorted."""


@dataclass(frozen=True, kw_only=True)
class Frozen(CodeSource):
    """A frozen working directory, as code.json has it."""

    digest: str
    """SHA-256 over names, executable bits and contents; the folder has its first 16 digits."""
    dir: str
    """The copy, absolute."""
    patch: str | None
    """File name in RUN/code of what differs from the revision; None: nothing, or too long."""
    frozen_unix: float


def survey(spec: JobSpec, *, base_dir: str | Path, run_dir: Path) -> CodeFiles | None:
    """Return what `submit` is to freeze; None: the job runs the installed package alone.

    Raises:
        UserError: HF201, HF202, HF640: see `list_code`.
    """
    if not spec.runs_own_code and "code" not in spec.model_fields_set:
        return None
    checkpoints = checkpoint_dir(spec, run_dir=run_dir, base_dir=base_dir)
    source = Path(resolve(spec.code.dir, base_dir))
    return list_code(source, spec.code, skip=(run_dir, Path(checkpoints)))


def left_out(about: CodeSource) -> list[Problem]:
    """Return a warning that names the files left out because they are named like secrets."""
    if not about.secrets:
        return []
    listed = ", ".join(about.secrets[:5]) + (", ..." if len(about.secrets) > 5 else "")
    message = (
        f"left out of the frozen code, since files of such names hold keys or passwords: {listed}; "
        "hand secrets over by env.secrets, or name a file that the program needs in code.include"
    )
    return [Problem("HF179", Where(key="code"), message)]


def freeze_code(home: Path, files: CodeFiles, *, wall: Callable[[], float] = time.time) -> Frozen:
    """Copy `files` to HOME/code/<digest>, whole or not at all; tasks of an array share a HOME.

    Raises:
        UserError: HF641 a file cannot be copied; HF612 `home` cannot be written.
    """
    folder = home.absolute() / "code"
    fresh = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
    try:
        with writing(folder, "use another --run-dir"):
            for parent in {(fresh / name).parent for name in ("_", *files.names)}:
                parent.mkdir(parents=True, exist_ok=True)
            with ThreadPoolExecutor(_COPIERS) as pool:
                copy = functools.partial(_copy, Path(files.about.source), fresh)
                lines = "".join(sorted(pool.map(copy, files.names)))
            digest = hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()
            for inside, _, _ in os.walk(fresh, topdown=False):
                os.chmod(inside, os.stat(inside).st_mode & _READ_ONLY)  # noqa: PTH101, PTH116
            target = folder / digest[:16]
            if not target.is_dir():  # else the same code was frozen before
                fresh.rename(target)
            patch = target.with_suffix(".patch")
            patch.unlink(missing_ok=True)
            if differs := _patch_of(files):
                # For the owner alone: it may hold what a file of narrower rights holds.
                with os.fdopen(os.open(patch, os.O_WRONLY | os.O_CREAT, 0o400), "wb") as out:
                    out.write(differs)
    finally:
        remove_frozen(fresh)
    return Frozen(
        **vars(files.about),
        digest=digest,
        dir=str(target),
        patch=patch.name if differs else None,
        frozen_unix=wall(),
    )


def use_code(run_dir: Path, frozen: Frozen, *, history: Sequence[Frozen] = ()) -> None:
    """Make a run use frozen code; `history` is what it has used before, oldest first.

    Raises:
        UserError: HF612 the run directory cannot be written.
    """
    raw = {**dataclasses.asdict(frozen), "history": [dataclasses.asdict(one) for one in history]}
    with writing(run_dir):
        write_json(run_dir / "code.json", raw, indent=1)
        for path in (run_dir / run_dirs.RENDERED, run_dir / run_dirs.JOB_JSON):
            if path.exists():
                write_atomic(path, pointed_to(run_dirs.read_job(path), frozen).to_json())
    note_event(
        run_dir,
        "code.upgraded" if history else "code.frozen",
        **({"was": history[-1].digest} if history else {}),
        digest=frozen.digest,
        revision=frozen.revision,
        dirty=frozen.dirty,
        files=frozen.num_files,
        bytes=frozen.size_bytes,
        source=frozen.source,
    )


def upgrade(run_dir: Path) -> tuple[Frozen, Frozen]:
    """Freeze the working directory again, for later starts; return what was and what is now.

    No job of the run may be live: nodes that start at different times would run different code.

    Raises:
        UserError: HF642 the run has no frozen code; else as at the first time.
    """
    before, history = load_frozen(run_dir)
    if before is None:
        raise UserError(
            "HF642",
            f"{run_dir} has no frozen code: its job has no `command:`, `code:` or `model.plugin` "
            "and runs the installed package; leave --upgrade out",
        )
    code = Code(exclude=before.exclude, include=before.include, max_mib=before.max_mib)
    skip = (run_dir, Path(run_dirs.load(run_dir).checkpoint.dir))
    after = freeze_code(run_dir, list_code(Path(before.source), code, skip=skip))
    if after.digest == before.digest:
        return before, before
    use_code(run_dir, after, history=(*history, before))
    return before, after


def load_frozen(run_dir: Path) -> tuple[Frozen | None, tuple[Frozen, ...]]:
    """Return the frozen code of a run, and what was before it, oldest first.

    Raises:
        UserError: HF613 code.json cannot be read.
    """
    path = run_dir / "code.json"
    try:
        raw = parse_json(read_regular(path))
        *history, frozen = map(_from_raw, (*raw.pop("history"), raw))
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error
    return frozen, tuple(history)


def _from_raw(raw: dict[str, Any]) -> Frozen:
    lists = {key: tuple(raw[key]) for key in ("exclude", "include", "skipped")}
    return Frozen(**{**raw, **lists, "secrets": tuple(raw.get("secrets", ()))})  # once it had none


def pointed_to(job: TrainConfig, frozen: Frozen) -> TrainConfig:
    """Return `job` with its command run in the frozen copy."""
    code = CodeSection(dir=frozen.dir, source=frozen.source, digest=frozen.digest)
    if job.command is None:
        own = None if job.command_dir is None else frozen.dir  # a plug-in's
        return dataclasses.replace(job, code=code, command_dir=own)
    # Arguments stay as they are: an absolute path there may well be data.
    inside = target = split_command(job.command).target
    for root in (frozen.source, job.command_dir):  # resolved, and as the job file has it
        if root is not None and Path(target).is_relative_to(root):
            inside = str(Path(target).relative_to(root))
    at = job.command.index(target)
    command = (*job.command[:at], inside, *job.command[at + 1 :])
    return dataclasses.replace(job, code=code, command=command, command_dir=frozen.dir)


def remove_frozen(folder: Path) -> None:
    """Remove a frozen copy, or a part of one, although it is read-only."""
    for inside, _, _ in os.walk(folder):
        os.chmod(inside, 0o700)  # noqa: PTH101  os.walk gives texts
    shutil.rmtree(folder, ignore_errors=True)


# -- which files ----------------------------------------------------------------------------


def list_code(source: Path, code: Code, *, skip: Sequence[Path] = ()) -> CodeFiles:
    """Return the files of `source` that are its code. Reads names and sizes only.

    In a git repository: what git tracks or does not ignore, submodules included; else everything.
    Never: caches, repositories' own folders, virtual environments, run directories.

    Args:
        source: the working directory.
        code: patterns match names (`data`, `*.ckpt`) or, with a slash, whole relative paths
            (`assets/video`).
        skip: folders to leave out: the run directory, checkpoints.

    Raises:
        UserError: HF201 the folder does not exist; HF202 it cannot be read; HF640 too large.
    """
    folder, where = source.resolve(), Where(key="code.dir")
    if not folder.is_dir():
        raise UserError("HF201", f"{source} is not a folder; fix the path", where=where)
    git = _git_status(folder)
    sizes: dict[str, int] = {}
    skipped: list[str] = []
    secrets: list[str] = []
    try:
        for name, info in _walk(folder, code, skip, secrets, by_git=bool(git)):
            if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
                sizes[name] = info.st_size
            else:
                skipped.append(name)
    except OSError as error:
        raise UserError(
            "HF202",
            f"{error.filename or folder} cannot be read: {error.strerror or error}; grant the "
            "permission, or leave it out with code.exclude",
            where=where,
        ) from error
    _check_size(folder, sizes, code.max_mib)
    about = CodeSource(
        source=str(folder),
        **git,
        num_files=len(sizes),
        size_bytes=sum(sizes.values()),
        **code.model_dump(exclude={"dir"}),
        skipped=tuple(sorted(skipped)),
        secrets=tuple(sorted(secrets)),
    )
    return CodeFiles(about=about, names=tuple(sorted(sizes)))


def _walk(
    root: Path, code: Code, skip: Sequence[Path], secrets: list[str], *, by_git: bool
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files of `root`, `by_git` those that git lists; fill `secrets`."""
    exclude = [each.removeprefix("./").rstrip("/") for each in (*ALWAYS_EXCLUDED, *code.exclude)]
    never = {path.resolve() for path in skip} - {root}
    pending = [("", _listed(root) if by_git else None)]
    while pending:
        inside, listed = pending.pop()
        with os.scandir(root / inside) as entries:
            for entry in entries:
                path, here = inside + entry.name, Path(entry)
                wanted = listed is None or path in listed
                if _matches(path, exclude):
                    continue
                if _is_secret(path, code.include):
                    if wanted and not (entry.is_dir() and _is_never_code(here)):
                        secrets.append(f"{path}/" if entry.is_dir() else path)
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    if wanted or _matches(path, code.include):
                        yield path, entry.stat(follow_symlinks=False)
                elif (wanted or code.include) and not (here in never or _is_never_code(here)):
                    # A repository that git lists is a submodule.
                    module = by_git and wanted and (here / ".git").exists()
                    pending.append((f"{path}/", _listed(root, f"{path}/") if module else listed))


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether the last part of `path` matches a pattern, or all of it one with a slash."""
    last = path.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(path if "/" in each else last, each) for each in patterns)


def _is_secret(path: str, include: Sequence[str]) -> bool:
    """Return whether SECRET_FILES names a path, and `include` does not ask for it.

    To ask is to name it, or to repeat a pattern of the table; assets/* does not.
    """
    if _matches(path, _EXAMPLES):
        return False
    if not any(_matches(part, SECRET_FILES) for part in path.split("/")):
        return False
    asked = [each for each in include if each in SECRET_FILES or not set(each) & set("*?[")]
    return not any(
        _matches(path, [each]) or f"{path}/".startswith(f"{each}/") or each.startswith(f"{path}/")
        for each in asked
    )


def _is_never_code(folder: Path) -> bool:
    # A virtual environment, a sweep, a run directory.
    if (folder / "pyvenv.cfg").is_file() or (folder / "sweep.json").is_file():
        return True
    return (folder / "job.json").is_file() and (folder / "events").is_dir()


def _check_size(folder: Path, sizes: Mapping[str, int], max_mib: int) -> None:
    """Raise HF640, naming what is largest, where there is too much."""
    too_large = sum(sizes.values()) > max_mib << 20
    if not too_large and len(sizes) <= MAX_FILES:
        return
    tops: Counter[str] = Counter()
    for name, size in sizes.items():
        tops[name.partition("/")[0]] += size if too_large else 1
    show = sized if too_large else functools.partial(counted, noun="file")
    limit = f"code.max_mib: {max_mib}" if too_large else f"{MAX_FILES:,}"
    largest = ", ".join(f"{top} ({show(weight)})" for top, weight in tops.most_common(3))
    raise UserError(
        "HF640",
        f"{folder} holds {show(tops.total())}, more than {limit}; the most is in {largest}: leave "
        "out what is not code with code.exclude, or name a smaller folder",
        where=Where(key="code.dir"),
    )


# -- git ------------------------------------------------------------------------------------


def _git_status(folder: Path) -> dict[str, Any]:
    """Return git's part of CodeSource.

    It is empty without git, outside a repository, in a folder that its repository ignores, and in
    another owner's repository, which git refuses.
    """
    how = ("--porcelain=v2", "-z", "--branch", "--no-ahead-behind", "--no-renames", "-uall")
    status = _git(folder, "status", *how, "--", ".")
    if status is None or _git(folder, "check-ignore", "-q", ".") is not None:
        return {}
    lines = status.decode(errors="replace").split("\0")
    head = dict(line.split(" ", 2)[1:] for line in lines if line.startswith("# "))
    revision, branch = head["branch.oid"], head["branch.head"]
    untracked = sum(line.startswith("? ") and not line.endswith("/") for line in lines)
    changed = any(line.startswith(("1 ", "u ")) for line in lines)
    return {
        "revision": None if revision == "(initial)" else revision,
        "branch": None if branch == "(detached)" else branch,
        "dirty": changed or untracked > 0,
        "num_untracked": untracked,
    }


def _listed(root: Path, inside: str = "") -> set[str] | None:
    """Return files and folders that git lists in the working tree root/inside."""
    names = _git(root / inside, *_UNTRACKED, "--cached")
    if names is None:
        return None
    listed = set()
    for name in os.fsdecode(names).split("\0"):
        path = "" if name.endswith("/") else inside + name  # another repository is no code
        while path and path not in listed:
            listed.add(path)
            path = path.rpartition("/")[0]
    return listed


def _patch_of(files: CodeFiles) -> bytes | None:
    """Return a patch that makes the files out of their revision, untracked ones included.

    `git apply` reads it in their folder. None: nothing differs, there is no revision, or the
    patch would be too long. Files of submodules are not in it.
    """
    folder, revision = Path(files.about.source), files.about.revision
    if revision is None or not files.about.dirty:
        return None
    index = _git(folder, "rev-parse", "--path-format=absolute", "--git-path", "index")
    prefix = _git(folder, "rev-parse", "--show-prefix")
    untracked = _git(folder, *_UNTRACKED)
    if index is None or prefix is None or untracked is None:
        return None
    # Any object will do: git reads the file of an entry without a time.
    start = b"100644 %s 0\t%s" % (revision.encode(), prefix.removesuffix(b"\n"))
    names = set(map(os.fsencode, files.names)).intersection(untracked.split(b"\0"))
    entries = b"".join(start + name + b"\0" for name in names)
    with tempfile.TemporaryDirectory(prefix="holdfast-") as scratch:
        env = {"GIT_INDEX_FILE": f"{scratch}/index"}
        with contextlib.suppress(FileNotFoundError):
            # With its time, by which git tells which files to read again.
            shutil.copy2(os.fsdecode(index).removesuffix("\n"), env["GIT_INDEX_FILE"])
        if _git(folder, "update-index", "-z", "--index-info", env=env, stdin=entries) is None:
            return None
        how = ("--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--relative")
        prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--ignore-submodules=all")
        without = (f":(exclude,literal){name}" for name in files.about.secrets)
        patch = _git(folder, "diff", *how, *prefixes, revision, "--", ".", *without, env=env)
    return None if patch is None or len(patch) > MAX_PATCH_BYTES else patch


def _git(
    folder: Path, *args: str, env: Mapping[str, str] | None = None, stdin: bytes = b""
) -> bytes | None:
    """Return what git prints; None: it cannot be run, refuses, or takes too long."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            (*_GIT, "-C", str(folder), *args),
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**inherited, "LC_ALL": "C", **(env or {})},
            timeout=_GIT_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


# -- copying --------------------------------------------------------------------------------


def _copy(source: Path, target: Path, name: str) -> str:
    """Copy a file or link; return its line for the digest. Links within the code get relative."""
    path, copy = source / name, target / name
    try:
        if path.is_symlink():
            points_to = os.path.normpath(path.parent / os.readlink(path))  # noqa: PTH115  as text
            if Path(points_to).is_relative_to(source):
                points_to = os.path.relpath(points_to, path.parent)
            copy.symlink_to(points_to)
            return f"link {points_to} {name}\0"
        content = open_regular(path)
    except OSError as error:
        raise UserError(
            "HF641",
            f"{path} cannot be copied: {error.strerror or error}; grant the permission, or leave "
            "it out with code.exclude",
        ) from error
    with content, copy.open("w+b") as out:
        info = os.fstat(content.fileno())
        # Rights here and the umask limit those of the copy, before it has any content.
        made = os.fstat(out.fileno()).st_mode
        os.fchmod(out.fileno(), info.st_mode & _READ_ONLY & (made | made >> 2 & 0o111))
        shutil.copyfileobj(content, out)
        out.seek(0)  # the digest is that of the copy: the file may be changing
        digest = hashlib.file_digest(out, "sha256").hexdigest()
    os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
    return f"{'exec' if info.st_mode & 0o100 else 'file'} {digest} {name}\0"
