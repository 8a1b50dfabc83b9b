"""What the benchmarks share: machine facts, medians, Markdown tables."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import click

# From a checkout, whatever is installed: what is measured lies beside this folder.
ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from launcher.platforms.installed import installed_version  # noqa: E402

OUT = click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the result to it."
)


def machine() -> str:
    """Return one line that says where and when numbers were measured."""
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, {platform.machine()}, "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, "
        f"torch {version('torch')}, holdfast {installed_version()}, load {load} at the start"
    )


def say(text: str) -> None:
    """Report progress on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def median(values: Sequence[float | None]) -> float | None:
    """Return the median in seconds, to a millisecond; None when one run never recovered."""
    if not values or any(value is None for value in values):
        return None
    return round(statistics.median(v for v in values if v is not None), 3)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def environment() -> dict[str, str]:
    """Return the environment of measured programs: one thread each, compiled files kept."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    # Compiling every module at every start is not what an installed program does.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def write_out(text: str, out: Path | None) -> None:
    """Print the result, and keep it in `out` when given."""
    print(text, flush=True)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
