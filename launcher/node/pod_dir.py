"""The run directory as a pod finds or makes it, and small notes that many pods write at once."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from launcher.node.attempt import NodeError
from launcher.whole_file import read_json

CONFIG_DIR: Final = Path("/etc/holdfast")
"""Where the job's ConfigMap is mounted; HOLDFAST_CONFIG_DIR changes it."""
MAX_FILE_BYTES: Final = 4 << 20


def prepare(run_dir: Path, config_dir: Path) -> list[str]:
    """Make the run directory from the job's ConfigMap where `submit` has not made it.

    Any number of pods may do so at once: each file is complete when it appears, and the first
    one counts. What is there already stays: it may name the frozen code.

    Args:
        run_dir: on the claim.
        config_dir: of the ConfigMap's files; it need not be there.

    Returns:
        Names of the files that this pod has put there.

    Raises:
        NodeError: HF675, the directory belongs to another run; HF502, there is no job.json.
        OSError: the claim cannot be used.
    """
    rendered = config_dir / "job.json"
    made = []
    if rendered.is_file():
        run_dir.mkdir(parents=True, exist_ok=True)
        for source in sorted(config_dir.iterdir()):
            # The kubelet's own links begin with dots.
            if not source.name.startswith(".") and source.is_file():
                content = source.read_bytes()[:MAX_FILE_BYTES]
                if publish(run_dir / source.name, content):
                    made.append(source.name)
        _same_run(run_dir / "job.json", rendered)
    if not (run_dir / "job.json").is_file():
        raise NodeError(
            "HF502",
            f"{run_dir / 'job.json'} is missing and {rendered} too: submit the job again",
        )
    return made


def _same_run(here: Path, rendered: Path) -> None:
    ours, theirs = _run_id(rendered), _run_id(here)
    if ours is not None and theirs is not None and ours != theirs:
        raise NodeError(
            "HF675",
            f"{here.parent} is the directory of run {theirs}, this pod is of run {ours}: give "
            "the run another directory, or the other claim",
        )


def _run_id(path: Path) -> str | None:
    """Return the run that a job.json is of; None where it cannot be read: the agent says why."""
    found = read_json(path).get("run_id")
    return found if isinstance(found, str) else None


def publish(path: Path, content: bytes) -> bool:
    """Write a file, complete or not at all, unless there is one; return whether this call did.

    Raises:
        OSError: the folder cannot be written.
    """
    if path.exists():
        return False
    fresh = path.with_name(
        f".{path.name}.{os.uname().nodename}.{os.getpid()}.{time.monotonic_ns()}"
    )
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            view = memoryview(content)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        try:
            os.link(fresh, path)
        except FileExistsError:
            return False
        return True
    finally:
        with contextlib.suppress(OSError):
            fresh.unlink()


def publish_json(path: Path, value: Mapping[str, Any]) -> bool:
    """Write a JSON file as `publish` does."""
    return publish(path, json.dumps(value).encode() + b"\n")


def failures(path: Path, *, lived: bool) -> int:
    """Count a failure of a pod in its own file and return how many there were in a row.

    Args:
        path: the file; of this pod alone.
        lived: it has lived long before this one: the count begins anew.

    Raises:
        OSError: the folder cannot be written.
    """
    count = 0
    with contextlib.suppress(OSError, ValueError):
        count = int(path.read_text(encoding="ascii"))
    count = 1 if lived else max(count, 0) + 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{count}\n", encoding="ascii")
    return count
