"""Writes rendered bundles."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import UserError
from launcher.render.bundle import JOB_FILE, Bundle
from launcher.render.local import HEAD

_MADE_BY_A_RUN = ("board", "events", "submitted.json")


def write_bundle(run_dir: Path, bundle: Bundle) -> None:
    """Write `bundle` into `run_dir`, over an earlier one, and make `logs`, as Slurm wants it.

    Raises:
        UserError: HF611 a run has begun there; HF612 it cannot be written.
    """
    begun = [name for name in _MADE_BY_A_RUN if (run_dir / name).exists()]
    if begun:
        raise UserError(
            "HF611",
            f"{run_dir} is the directory of a run that has begun (it has {begun[0]}); use another",
        )
    own = run_dir / JOB_FILE
    if JOB_FILE in bundle and own.is_file() and not _is_ours(own):
        raise UserError("HF611", f"{own} would be written over; use another folder")
    try:
        for folder in {run_dir, *((run_dir / name).parent for name in bundle)}:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        for name, text in bundle.items():
            (run_dir / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            "HF612", f"{run_dir} cannot be written: {error.strerror or error}; use another"
        ) from error


def _is_ours(path: Path) -> bool:
    with path.open("rb") as file:
        return bool(file.read(len(HEAD)) == HEAD.encode())
