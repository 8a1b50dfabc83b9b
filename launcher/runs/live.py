"""What only a look at this machine can show: paths, permissions. Reads, writes nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from elastic_trainer.plan.command import split_command
from launcher.render.local import resolve
from launcher.spec.errors import Problem
from launcher.spec.spec import JobSpec

_PAIR = (".bin", ".idx")


def live_problems(spec: JobSpec, base_dir: str | Path) -> list[Problem]:
    """Return what keeps `spec` from running on this machine; empty when nothing does.

    Args:
        spec: the checked job.
        base_dir: folder that its relative paths are relative to.
    """
    return [*_data(spec, base_dir), *_checkpoints(spec, base_dir), *_script(spec, base_dir)]


def _data(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    bad_corpus = _bad_pair if spec.data.format == "megatron" else _bad_corpus
    for key, written in spec.data_paths.items():
        path = Path(resolve(written, base_dir))
        problem = (_unreadable if key == "data.tokenizer" else bad_corpus)(path)
        if problem:
            yield spec.problem(problem[0], key, problem[1])


def _bad_corpus(path: Path) -> tuple[str, str] | None:
    """Return (code, message) when `path` is no file or folder with something in it."""
    problem = _unreadable(path)
    if problem:
        return problem
    if path.is_dir() and next(path.iterdir(), None) is None:
        return "HF203", f"{path} is empty; put the corpus there"
    if path.is_file() and path.stat().st_size == 0:
        return "HF203", f"{path} is an empty file"
    return None


def _bad_pair(path: Path) -> tuple[str, str] | None:
    """Return (code, message) when `path` does not mean a .bin and its .idx.

    It may be their prefix, one of the two, or a folder with one pair, as the trainer's
    data/megatron.py reads it; a test holds the two together.
    """
    prefix = path.with_suffix("") if path.suffix in _PAIR else path
    try:
        there = [suffix for suffix in _PAIR if Path(f"{prefix}{suffix}").is_file()]
        is_folder = not there and path.is_dir()
    except OSError as error:
        return "HF202", f"{path} cannot be looked at: {error.strerror}"
    if is_folder:
        problem = _unreadable(path)
        found = [] if problem else _prefixes(path)
        if len(found) != 1:
            names = ", ".join(each.name for each in found[:4]) or "none"
            message = (
                f"{path} holds {len(found)} Megatron datasets ({names}), a folder must hold one "
                "pair of .bin and .idx; name one by its prefix"
            )
            return problem or ("HF203", message)
        prefix = found[0]
    elif not there:
        return "HF201", f"{prefix}.bin and {prefix}.idx do not exist; fix the path"
    files = [Path(f"{prefix}{suffix}") for suffix in _PAIR]
    missing = [file for file in files if not file.is_file()]
    if missing:
        return "HF201", f"{missing[0]} does not exist; a Megatron dataset has a .bin and an .idx"
    return _bad_corpus(files[0]) or _bad_corpus(files[1])


def _prefixes(folder: Path) -> list[Path]:
    """Return what the .bin and .idx files of `folder` are called without these."""
    return sorted({file.with_suffix("") for file in folder.iterdir() if file.suffix in _PAIR})


def _unreadable(path: Path) -> tuple[str, str] | None:
    """Return (code, message) when `path` cannot be read."""
    try:
        if not path.exists():
            return "HF201", f"{path} does not exist; create it, or fix the path"
    except OSError as error:  # a parent that may not be searched, a name too long
        return "HF202", f"{path} cannot be looked at: {error.strerror}"
    if not (path.is_dir() or path.is_file()):
        return "HF202", f"{path} is neither a file nor a folder; name one of the two"
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


def _script(spec: JobSpec, base_dir: str | Path) -> Iterator[Problem]:
    """Yield a problem when the script or the executable of `command` is not there."""
    if spec.command is None:
        return
    folder, command = Path(resolve(spec.code.dir, base_dir)), split_command(spec.command)
    path = folder / command.target
    if not folder.is_dir():
        message = f"{folder} is not a folder; fix the path, the command runs in it"
        yield spec.problem("HF201", "code.dir", message)
    elif command.kind == "script":
        problem = _unreadable(path)
        if path.is_dir():
            problem = ("HF201", f"{path} is a folder; name the script")
        if problem:
            yield spec.problem(problem[0], "command", problem[1])
    elif command.kind == "command":
        name = str(path) if "/" in command.target else command.target
        if shutil.which(name) is None:
            message = f"{name} is not an executable here; fix the name, or leave --no-python out"
            yield spec.problem("HF201", "command", message)
