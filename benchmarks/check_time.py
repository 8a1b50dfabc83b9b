"""Wall time of `holdfast check` for a job of 16,384 GPUs, and that it never imports torch.

    python benchmarks/check_time.py [--out FILE]

Prints a table, and last a JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import click
from common import OUT, environment, machine, median, table, write_out

JOB = Path(__file__).parents[1] / "examples" / "llama3-405b.yaml"
RUNS = 10
COMMAND = [str(Path(sys.executable).with_name("holdfast")), "check", str(JOB)]
"""As users type it: the installed script, not `python -m`."""


def run_once(**more_env: str) -> tuple[float, str]:
    """Run the command; return its wall time in seconds and what it wrote on stderr."""
    begun = time.perf_counter()
    done = subprocess.run(
        COMMAND, env={**environment(), **more_env}, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - begun, done.stderr


def imported(trace: str) -> set[str]:
    """Return the top-level packages in the output of `-X importtime`."""
    rows = (line for line in trace.splitlines() if line.startswith("import time:"))
    return {row.rpartition("|")[2].strip().partition(".")[0] for row in rows}


@click.command(help=__doc__.split("\n")[0])
@OUT
def main(out: Path | None) -> None:
    """Measure and print."""
    where = machine()
    run_once()  # compiles and fills caches
    seconds = [run_once()[0] for _ in range(RUNS)]
    packages = imported(run_once(PYTHONPROFILEIMPORTTIME="1")[1])
    assert "launcher" in packages, "the trace shows nothing"
    assert "torch" not in packages, "check imported torch"
    text = f"holdfast check, 16,384 GPUs ({where})\n\n" + table(
        ["runs", "median s", "min s", "max s", "imports torch"],
        [[RUNS, median(seconds), round(min(seconds), 3), round(max(seconds), 3), "no"]],
    )
    write_out(text + "\n\n" + json.dumps({"check_s": median(seconds)}), out)


if __name__ == "__main__":
    main()
