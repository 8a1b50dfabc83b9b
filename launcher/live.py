"""What only a look at this machine can tell: paths, permissions. Reads, writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import Problem
from launcher.render.local import resolve
from launcher.spec import JobSpec


def live_problems(spec: JobSpec, base_dir: str | Path) -> list[Problem]:
    """Return what keeps `spec` from running on this machine; empty when nothing does.

    Args:
        spec: the checked job.
        base_dir: folder that its relative paths are relative to.
    """
    return [*_data(spec, base_dir), *_checkpoints(spec, base_dir), *_local_limits(spec)]


def _data(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    path = Path(resolve(spec.data.path, base_dir))
    mistake = _unreadable(path)
    if mistake:
        yield spec.problem(mistake[0], "data.path", mistake[1])
    elif path.is_dir() and next(path.iterdir(), None) is None:
        yield spec.problem("HF203", "data.path", f"{path} is empty; put the corpus there")
    elif path.is_file() and path.stat().st_size == 0:
        yield spec.problem("HF203", "data.path", f"{path} is an empty file")
    if spec.data.tokenizer != "bytes":
        tokenizer = Path(resolve(spec.data.tokenizer, base_dir))
        mistake = _unreadable(tokenizer)
        if mistake:
            yield spec.problem(mistake[0], "data.tokenizer", mistake[1])


def _unreadable(path: Path) -> tuple[str, str] | None:
    """Return (code, message) when `path` cannot be read."""
    try:
        if not path.exists():
            return "HF201", f"{path} does not exist; create it, or mend the path"
    except OSError as error:  # a parent that may not be searched, a name too long
        return "HF202", f"{path} cannot be looked at: {error.strerror}"
    wanted = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
    if not os.access(path, wanted):
        return "HF202", f"{path} cannot be read; grant the permission"
    return None


def _checkpoints(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    """Yield a problem when the folder, or the nearest one above it, cannot be written."""
    if spec.checkpoint.dir is None:
        return
    path = Path(resolve(spec.checkpoint.dir, base_dir))
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not nearest.is_dir():
        message = f"{nearest} is not a folder, so {path} cannot be made; choose another"
        yield spec.problem("HF204", "checkpoint.dir", message)
    elif not os.access(nearest, os.W_OK | os.X_OK):
        message = f"{nearest} cannot be written; choose another, or grant the permission"
        yield spec.problem("HF204", "checkpoint.dir", message)


def _local_limits(spec: JobSpec) -> Iterator[Problem]:
    if spec.data.format == "megatron":
        message = "the trainer cannot read megatron yet; use text or nanogpt"
        yield spec.problem("HF205", "data.format", message)
    if spec.command is not None:
        message = "the local target runs the built-in trainer only; leave command out"
        yield spec.problem("HF205", "command", message)
