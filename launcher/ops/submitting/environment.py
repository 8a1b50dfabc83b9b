"""What a run's workers run in, as a digest: told apart when it changes under a run.

RUN/environment.json has the interpreter's version, every installed distribution with its
version, and the image's digest. `submit` writes it; `launcher.node begin` compares, for a
virtual environment on shared storage may be changed by anybody at any time. Reads files
only: no interpreter is started, nothing is imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from launcher.errors import UserError
from launcher.ops.record.record import LauncherLog
from launcher.whole_file import write_json

ENVIRONMENT_JSON: Final = "environment.json"
MAX_CHANGES: Final = 20
"""Changes that one event lists."""
_PINNED = re.compile(r"@(sha256:[0-9a-f]{64})$")
_EDGE_BYTES: Final = 1 << 20
"""Of the beginning and the end of an image's file that are digested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What workers run in."""

    digest: str
    """SHA-256 over all that follows but the paths."""
    python: str
    """Version; empty where only the container knows."""
    prefix: str | None
    """The virtual environment, or the launcher's own; None: the container's, not looked at."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Name -> version, with the digest of what is installed: two builds may share a version."""
    image: str | None = None
    image_digest: str | None = None
    """None: no image, or a tag, which may mean another image tomorrow."""


def describe(*, venv: Path | None, image: str | None) -> Environment:
    """Return what a job with this section `env:` runs in.

    Args:
        venv: a virtual environment, or any prefix of a Python; None: the launcher's own,
            unless there is an image.
        image: a container image: a file, or a name with or without a digest.

    Raises:
        UserError: HF201 the environment is not there; HF202 it cannot be read.
    """
    prefix = venv if venv is not None else None if image is not None else Path(sys.prefix)
    try:
        if prefix is not None and not prefix.is_dir():
            raise UserError("HF201", f"env.venv: {prefix} is not a folder; mend the path")
        python = _python_of(prefix) if prefix is not None else ""
        found = dict(_distributions(_site_packages(prefix))) if prefix is not None else {}
        image_digest = _image_digest(image) if image is not None else None
    except OSError as error:
        raise UserError(
            "HF202",
            f"env: {error.filename or prefix} cannot be read: {error.strerror or error}; "
            "grant the permission",
        ) from error
    parts = {"python": python, "distributions": found, "image": image, "image_digest": image_digest}
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return Environment(
        digest=digest,
        python=python,
        prefix=None if prefix is None else str(prefix),
        distributions=dict(sorted(found.items())),
        image=image,
        image_digest=image_digest,
    )


def changes(before: Environment, now: Environment) -> list[str]:
    """Return what differs, a text each: `torch 2.13.0 -> 2.13.1`; empty: nothing."""
    found = []
    for name, was, new in (
        ("python", before.python, now.python),
        ("image", before.image, now.image),
        ("image's digest", before.image_digest, now.image_digest),
    ):
        if was != new:
            found.append(f"{name} {was or 'none'} -> {new or 'none'}")
    old, new_ones = before.distributions, now.distributions
    for name in sorted(old.keys() | new_ones.keys()):
        was_text, new_text = old.get(name), new_ones.get(name)
        if was_text == new_text:
            continue
        was_version, new_version = (_version_in(text) for text in (was_text, new_text))
        if was_version == new_version:
            found.append(f"{name} {was_version} was built or installed anew")
        else:
            found.append(f"{name} {was_version} -> {new_version}")
    return found


def record_environment(
    run_dir: Path, environment: Environment, *, wall: Callable[[], float] = time.time
) -> None:
    """Write RUN/environment.json, whole or not at all, and an event.

    Raises:
        UserError: HF612 the run directory cannot be written.
    """
    path = run_dir / ENVIRONMENT_JSON
    try:
        write_json(path, dataclasses.asdict(environment), indent=1)
    except OSError as error:
        raise UserError(
            "HF612",
            f"{path} cannot be written: {error.strerror or error}; make room, or grant the "
            "permission",
        ) from error
    _log(run_dir, wall).emit(
        "environment.recorded",
        digest=environment.digest,
        python=environment.python,
        distributions=len(environment.distributions),
        image=environment.image,
        image_digest=environment.image_digest,
    )


def load_environment(run_dir: Path) -> Environment | None:
    """Return what was recorded of a run; None: nothing.

    Raises:
        UserError: HF613 it cannot be read.
    """
    path = run_dir / ENVIRONMENT_JSON
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return Environment(**raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


def warn_if_changed(run_dir: Path, *, wall: Callable[[], float] = time.time) -> list[str]:
    """Compare a run's environment with what was recorded; what changed becomes an event.

    For the start of an attempt: it never stops one. What cannot be read is told in the same
    way, since the workers will not be able to use it either.

    Returns:
        What changed, a text each; empty: nothing, or nothing was recorded.
    """
    try:
        before = load_environment(run_dir)
        if before is None:
            return []
        prefix = None if before.prefix is None else Path(before.prefix)
        now = describe(venv=prefix, image=before.image)
        found, digest = changes(before, now), now.digest
    except UserError as error:
        before, found, digest = None, [error.message], None
    if found:
        _log(run_dir, wall).emit(
            "environment.changed",
            was=before.digest if before else None,
            digest=digest,
            changes=found[:MAX_CHANGES],
            more=max(0, len(found) - MAX_CHANGES),
        )
    return found


# -- looking ----------------------------------------------------------------------------------


def _python_of(prefix: Path) -> str:
    """Return the version of a prefix's interpreter, as its pyvenv.cfg has it."""
    if prefix == Path(sys.prefix):
        return platform.python_version()
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        found = [path.parent.name for path in _site_packages(prefix)]
        return found[0].removeprefix("python") if found else ""
    pairs = {
        key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)
    }
    return pairs.get("version") or pairs.get("version_info", "")


def _site_packages(prefix: Path) -> list[Path]:
    # The last two are Debian's, of a Python without a virtual environment.
    places = ("python3*/site-packages", "python3*/dist-packages")
    return sorted(
        folder
        for lib in ("lib", "local/lib")
        for place in places
        for folder in prefix.glob(f"{lib}/{place}")
    )


def _distributions(folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and `version digest` of what is installed."""
    for found in metadata.distributions(path=[str(folder) for folder in folders]):
        name = found.metadata["Name"]
        if not name:
            continue  # a torn installation: pip warns of it
        # RECORD lists every file with its digest; an egg-link or a distribution's own
        # packages have none.
        record = found.read_text("RECORD") or found.read_text("direct_url.json") or ""
        digest = hashlib.sha256(record.encode(errors="surrogateescape")).hexdigest()[:16]
        yield re.sub(r"[-_.]+", "-", name).lower(), f"{found.version} {digest}"


def _version_in(text: str | None) -> str:
    return "none" if text is None else text.partition(" ")[0]


def _image_digest(image: str) -> str | None:
    """Return what tells an image from others of its name; None: nothing does."""
    pinned = _PINNED.search(image)
    if pinned:
        return pinned[1]
    path = Path(image)
    if not path.is_absolute() or not path.is_file():
        return None
    # An image has many gigabytes: a squashfs and a SIF have their tables at the edges.
    info = path.stat()
    digest = hashlib.sha256(f"{info.st_size} {info.st_mtime_ns}".encode())
    with path.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(0, info.st_size - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return f"file:{digest.hexdigest()}"


def _log(run_dir: Path, wall: Callable[[], float]) -> LauncherLog:
    return LauncherLog(run_dir, f"environment-{int(wall())}-{os.getpid()}", wall=wall)
