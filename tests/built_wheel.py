"""Builds the wheel, from a copy of what it is made of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Return the wheel of this checkout, built in `folder`."""
    source = folder / "source"
    for package in ("holdfast", "launcher", "elastic_trainer"):
        shutil.copytree(ROOT / package, source / package, symlinks=True)
    shutil.copytree(ROOT / "slurm", source / "slurm")  # the package links to its template
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    return wheel
