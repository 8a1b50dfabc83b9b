"""What a forked worker needs is there before the fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from harness import Run, make_config

from elastic_trainer.layout import ParallelLayout

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
import elastic_trainer.train as train
threads = len(os.listdir("/proc/self/task"))
before = set(sys.modules)
code = train.main()
print(json.dumps({"threads": threads, "code": code, "late": sorted(set(sys.modules) - before)}))
sys.stdout.flush()
os._exit(0)
"""


def test_a_recovering_worker_imports_nothing_after_the_entry_point(tmp_path):
    """Rank 0 of two: restores, trains two steps, saves."""
    layout = ParallelLayout(dp=2)
    run = Run(tmp_path, make_config(tmp_path, layout, steps=1, recompute="selective"))
    run.train(1, 2)
    run.write(make_config(tmp_path, layout, steps=3, recompute="selective"))
    with run.epoch(2, 2, absent=(0,)) as group:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **group.environments[0]},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert group.wait() == [0]
    report = json.loads(result.stdout)
    assert report["code"] == 0
    assert report["threads"] == 1  # who forks must have no other
    assert report["late"] == []
    assert [commit.step for commit in run.commits()] == [1, 3]
