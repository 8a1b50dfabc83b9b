"""What a run's workers run in, as a digest that shows when it changes under a run.

RUN/environment.json has the interpreter's version, every installed distribution with its version,
and the image's digest. `submit` writes it; `launcher.node begin` compares, since anybody may change
a virtual environment on shared storage. Reads files only: nothing is started or imported.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from elastic_trainer.storage.files import read_regular, write_json
from elastic_trainer.storage.typed import parse_json
from launcher.record.files import note_event
from launcher.spec.errors import UserError, writing

ENVIRONMENT_JSON: Final = "environment.json"
MAX_CHANGES: Final = 20
"""In one event."""
_PINNED = re.compile(r"@(sha256:[0-9a-f]{64})$")
_EDGE_BYTES: Final = 1 << 20
"""Digested of an image's file, at its beginning and its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What workers run in."""

    digest: str
    """SHA-256 over everything below but the paths."""
    python: str
    """Version; empty: only the container knows it."""
    prefix: str | None
    """The virtual environment, or the launcher's own; None: the container's, not looked at."""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Name -> version, with the digest of what is installed: two builds may share a version."""
    image: str | None = None
    image_digest: str | None = None
    """None: no image, or a tag, which may mean another image tomorrow."""


def describe(*, venv: str | Path | None, image: str | None) -> Environment:
    """Return what a job with this section `env:` runs in.

    Without `venv` it is the launcher's own Python, or with an image that of the image. `image` is a
    file, or a name with or without a digest.

    Raises:
        UserError: HF201 the environment is not there; HF202 it cannot be read.
    """
    prefix = Path(venv or sys.prefix) if venv is not None or image is None else None
    found: dict[str, Any] = {"python": "", "distributions": {}, "image": image}
    try:
        if prefix is not None:
            if not prefix.is_dir():
                raise UserError("HF201", f"env.venv: {prefix} is not a folder; fix the path")
            folders = _site_packages(prefix)
            found["python"] = _python_of(prefix, folders)
            found["distributions"] = dict(sorted(dict(_distributions(folders)).items()))
        found["image_digest"] = None if image is None else _image_digest(image)
    except OSError as error:
        raise UserError(
            "HF202",
            f"env: {error.filename or prefix} cannot be read: {error.strerror or error}; "
            "grant the permission",
        ) from error
    text = json.dumps(found, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Environment(digest=digest, prefix=None if prefix is None else str(prefix), **found)


def changes(before: Environment, now: Environment) -> list[str]:
    """Return what differs, a text each: `torch 2.13.0 -> 2.13.1`; empty: nothing."""
    parts = (
        ("python", before.python, now.python),
        ("image", before.image, now.image),
        ("image's digest", before.image_digest, now.image_digest),
    )
    found = [f"{name} {was or 'none'} -> {new or 'none'}" for name, was, new in parts if was != new]
    for name in sorted(before.distributions.keys() | now.distributions.keys()):
        was, new = (each.distributions.get(name, "none") for each in (before, now))
        (version, _, _), (new_version, _, _) = was.partition(" "), new.partition(" ")
        if version != new_version:
            found.append(f"{name} {version} -> {new_version}")
        elif was != new:
            found.append(f"{name} {version} was built or installed again")
    return found


def note_environment(run_dir: Path, environment: Environment) -> None:
    """Write RUN/environment.json, whole or not at all, and an event.

    Raises:
        UserError: HF612 the run directory cannot be written.
    """
    path = run_dir / ENVIRONMENT_JSON
    with writing(path):
        write_json(path, dataclasses.asdict(environment), indent=1)
    note_event(
        run_dir,
        "environment.recorded",
        digest=environment.digest,
        python=environment.python,
        distributions=len(environment.distributions),
        image=environment.image,
        image_digest=environment.image_digest,
    )


def load_environment(run_dir: Path) -> Environment | None:
    """Return what `note_environment` wrote; None: nothing.

    Raises:
        UserError: HF613 it cannot be read.
    """
    path = run_dir / ENVIRONMENT_JSON
    try:
        raw: dict[str, Any] = parse_json(read_regular(path))
        return Environment(**raw)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise UserError("HF613", f"{path} cannot be read: {error}") from error


def warn_if_changed(run_dir: Path) -> list[str]:
    """Compare a run's environment with the noted one; return what changed, which becomes an event.

    It never stops an attempt. What cannot be read is reported in the same way: workers will not be
    able to use it either.
    """
    try:
        before = load_environment(run_dir)
        if before is None:
            return []
        now = describe(venv=before.prefix, image=before.image)
        was, digest, found = before.digest, now.digest, changes(before, now)
    except UserError as error:
        was, digest, found = None, None, [error.message]
    if found:
        note_event(
            run_dir,
            "environment.changed",
            was=was,
            digest=digest,
            changes=found[:MAX_CHANGES],
            more=max(0, len(found) - MAX_CHANGES),
        )
    return found


# -- looking ----------------------------------------------------------------------------------


def _python_of(prefix: Path, folders: list[Path]) -> str:
    if prefix == Path(sys.prefix):
        return platform.python_version()
    try:
        text = (prefix / "pyvenv.cfg").read_text(encoding="utf-8")
    except FileNotFoundError:
        return folders[0].parent.name.removeprefix("python") if folders else ""
    pairs = dict(re.findall(r"^\s*(version|version_info)\s*=[^\S\n]*(.*?)\s*$", text, re.MULTILINE))
    return str(pairs.get("version") or pairs.get("version_info", ""))


def _site_packages(prefix: Path) -> list[Path]:
    # Debian has local and dist, for a Python without a virtual environment.
    return sorted(
        folder
        for lib in ("lib", "local/lib")
        for folder in prefix.glob(f"{lib}/python3*/*-packages")
        if folder.name in {"site-packages", "dist-packages"}
    )


def _distributions(folders: list[Path]) -> Iterator[tuple[str, str]]:
    """Yield name and `version digest` of what is installed."""
    for found in metadata.distributions(path=[str(folder) for folder in folders]):
        name = found.metadata["Name"]
        if not name:
            continue  # a torn installation: pip warns of it
        # RECORD lists every file with its digest; an egg-link has none.
        installed = found.read_text("RECORD") or found.read_text("direct_url.json") or ""
        digest = hashlib.sha256(installed.encode(errors="surrogateescape")).hexdigest()[:16]
        yield re.sub(r"[-_.]+", "-", name).lower(), f"{found.version} {digest}"


def _image_digest(image: str) -> str | None:
    if pinned := _PINNED.search(image):
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
