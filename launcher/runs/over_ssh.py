"""Runs commands on a site over SSH: `holdfast forwarded` there does what is asked.

A command line crosses and, for a job, an archive on its standard input. ssh does the rest by
~/.ssh/config: keys, jump hosts, shared connections.

Words cross percent-encoded, in characters that mean nothing to any login shell. Without a terminal
the end of standard input ends the command there, so that Ctrl-C, a killed process or a lost
connection leave nothing behind.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote, unquote_to_bytes

from launcher.platforms.installed import installed_version
from launcher.platforms.sites import Site
from launcher.render.local import resolve
from launcher.runs.submitting.freeze import left_out, list_code
from launcher.spec.errors import Problem, UserError, writing
from launcher.spec.spec import JobSpec

SENT: Final = "sent"
"""Folder for what was sent, in the site's."""
_OPTIONS: Final = (
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15"),  # three without an answer end it
)
_END_S: Final = 10.0


# -- words ----------------------------------------------------------------------------------


def encoded(word: str) -> str:
    """Return a word that every shell leaves as it is. Pure."""
    return quote(os.fsencode(word), safe="/:,@+").replace("~", "%7E") or "%"


def decoded(word: str) -> str:
    """Return what `encoded` was given. Pure."""
    return "" if word == "%" else os.fsdecode(unquote_to_bytes(word))


def takes_stdin(words: Sequence[str]) -> bool:
    """Return whether a command reads what the user types."""
    return words[0] == "shell"


# -- files ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The files of a job, as they cross."""

    archive: IO[bytes]
    """A tar of `size` bytes, read from its beginning."""
    name: str
    """The folder there: the job's name, and the beginning of `digest`."""
    size: int
    digest: str
    """SHA-256 of the archive."""
    job: str
    """Path of the job file there, relative to the site's folder."""
    sets: tuple[str, ...]
    """Overrides for the other place."""
    warnings: tuple[Problem, ...]


def pack(spec: JobSpec) -> Sent:
    """Return the job file and the files of `code.dir`, without what `submit` would not freeze.

    Raises:
        UserError: HF205 the job file has no folder; HF201, HF202, HF640 see `list_code`; HF641 a
            file cannot be read.
    """
    job = Path(spec.source.file)
    job = job.parent.resolve() / job.name  # no link leads to it in the archive
    if job.parts[1] in ("dev", "proc"):
        raise UserError("HF205", f"{job}: its folder is sent to the site; name a job file in one")
    folder = Path(resolve(spec.code.dir, job.parent)).resolve()
    files = list_code(folder, spec.code)
    root = os.path.commonpath([job.parent, folder])
    archive = tempfile.TemporaryFile()  # noqa: SIM115  it is returned
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in files.names:
            if folder / name != job:
                _add(tar, folder / name, str((folder / name).relative_to(root)))
        text = spec.text.encode()
        entry = tarfile.TarInfo(str(job.relative_to(root)))
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    size = archive.tell()
    archive.seek(0)
    digest = hashlib.file_digest(archive, "sha256").hexdigest()
    archive.seek(0)
    name = f"{spec.name}-{digest[:12]}"
    code_dir = os.path.relpath(folder, job.parent)
    moved = code_dir != os.path.normpath(spec.code.dir)
    return Sent(
        archive=archive,
        name=name,
        size=size,
        digest=digest,
        job=f"{SENT}/{name}/{job.relative_to(root)}",
        sets=(f"code.dir={json.dumps(code_dir)}",) if moved else (),
        warnings=tuple(left_out(files.about)),
    )


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file or link without its owner, so that equal files make equal archives."""

    def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        return entry

    try:
        tar.add(path, name, recursive=False, filter=without_owner)
    except OSError as error:
        raise UserError(
            "HF641",
            f"{path} cannot be sent: {error.strerror or error}; grant the permission, or leave it "
            "out with code.exclude",
        ) from error


def unpack(content: IO[bytes], size: int, digest: str, folder: Path) -> None:
    """Make `folder` of the archive in the next `size` bytes, whole or not at all.

    Raises:
        UserError: HF210 fewer or other bytes came; HF612 it cannot be written.
    """
    with writing(folder), tempfile.TemporaryFile() as archive:
        left = size
        while left and (block := content.read(min(left, 1 << 20))):
            archive.write(block)
            left -= len(block)
        archive.seek(0)
        if left or hashlib.file_digest(archive, "sha256").hexdigest() != digest:
            raise UserError("HF210", "the job's files came incomplete; submit again")
        if folder.is_dir():  # the same files were sent before
            return
        archive.seek(0)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as scratch:
            fresh = Path(scratch, "files")
            fresh.mkdir()
            with tarfile.open(fileobj=archive) as tar:
                # Links out of the folder are the user's own, as in the code that is frozen.
                tar.extraction_filter = staticmethod(lambda entry, _: entry)
                tar.extractall(fresh)  # noqa: S202  its digest is right
            try:
                fresh.rename(folder)
            except OSError:
                if not folder.is_dir():  # else another submission was faster
                    raise


# -- here -----------------------------------------------------------------------------------


def ssh_argv(
    site: Site, words: Sequence[str], sent: Sent | None, *, prompts: bool, terminal: bool
) -> list[str]:
    """Return the command line of ssh that runs `words` on the site. Pure.

    `sent` comes on standard input. With `prompts` ssh may ask for a password.
    """
    assert site.ssh is not None
    options = [*_OPTIONS, *(() if prompts else ("-o", "BatchMode=yes"))]
    options.append("-t" if terminal else "-T")
    line = [site.holdfast, "forwarded"]
    if sent is not None:
        options.append("-C")
        line += ["--version", encoded(installed_version())]
        line += ["--files", sent.name, str(sent.size), sent.digest]
    line += map(encoded, (site.folder, *words))
    return ["ssh", *options, "--", site.ssh, " ".join(line)]


def run_there(site: Site, words: Sequence[str], sent: Sent | None = None) -> int:
    """Run a command there with this process's terminal or pipes; return its exit code.

    Raises:
        UserError: HF210 the site cannot be reached; HF211 it has no holdfast; HF650 ssh is not
            installed here.
    """
    prompts = os.isatty(0)
    terminal = sent is None and all(map(os.isatty, (0, 1, 2)))
    argv = ssh_argv(site, words, sent, prompts=prompts, terminal=terminal)
    stdin = None if terminal or takes_stdin(words) else subprocess.PIPE
    try:
        process = subprocess.Popen(argv, stdin=stdin)
    except FileNotFoundError:
        raise UserError("HF650", "ssh is not installed here, or not on the PATH") from None
    except OSError as error:
        if error.errno != errno.E2BIG:
            raise UserError("HF650", f"ssh cannot be started: {error.strerror}") from error
        message = "too much for one command line; write what --set gives into the job file"
        raise UserError("HF205", message) from error
    try:
        if sent is not None:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the exit code says why
                shutil.copyfileobj(sent.archive, process.stdin)
                process.stdin.flush()
        code = process.wait()
    finally:
        with suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if takes_stdin(words):
        return code  # the shell's own
    if code == 255:  # ssh's own
        acts = words[0] in ("submit", "cancel", "restart")
        look = f"; had it begun there, `holdfast list --site` shows what {words[0]} has done"
        raise UserError("HF210", f"ssh {site.ssh} failed, as it says above{look if acts else ''}")
    if code in (126, 127):  # a shell starts no command
        raise UserError(
            "HF211",
            f"{site.ssh} cannot run {site.holdfast}; install it there, or name its path in "
            "`holdfast:` of the site (logins without a terminal may have a shorter PATH)",
        )
    return code


# -- there ----------------------------------------------------------------------------------


def refuse_version(asked: str) -> None:
    """Refuse a job that another version has checked.

    Raises:
        UserError: HF212.
    """
    if asked != installed_version():
        raise UserError(
            "HF212",
            f"holdfast {installed_version() or '(not installed)'} is on the site and "
            f"{asked or '(not installed)'} asks it; install the same version, or name another in "
            "`holdfast:` of the site",
        )


def end_with_stdin() -> None:
    """Interrupt this process once its standard input ends; nothing else may read it."""
    asked = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def wait() -> None:
        with suppress(OSError):
            while os.read(asked, 4096):
                pass
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()
