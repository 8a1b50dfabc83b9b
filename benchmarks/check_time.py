"""Wall time of `holdfast check` for a job of 16,384 GPUs, and that it never imports torch.

python benchmarks/check_time.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from common import machine, median, table

JOB = Path(__file__).parents[1] / "examples" / "llama3-405b.yaml"
RUNS = 10
COMMAND = [sys.executable, "-m", "launcher.cli.main", "check", str(JOB)]


def main() -> None:
    """Measure and print."""
    subprocess.run(COMMAND, check=True, capture_output=True)  # compiles and fills caches
    seconds = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        subprocess.run(COMMAND, check=True, capture_output=True)
        seconds.append(time.perf_counter() - begun)
    trace = subprocess.run(
        [COMMAND[0], "-X", "importtime", *COMMAND[1:]], check=True, capture_output=True, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in trace.stderr.splitlines()}
    assert not any(name.split(".")[0] == "torch" for name in imported), "check imported torch"
    print(f"holdfast check, 16,384 GPUs ({machine()})\n")
    print(
        table(
            ["runs", "median s", "min s", "max s", "imports torch"],
            [[RUNS, median(seconds), round(min(seconds), 3), round(max(seconds), 3), "no"]],
        )
    )
    print(json.dumps({"check_s": median(seconds)}))


if __name__ == "__main__":
    main()
