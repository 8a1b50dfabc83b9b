"""Parameters that are no DTensors must be the same on all ranks; all of them say so, none hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

RANK = """
import sys, torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from elastic_trainer.worker.progress import ApiError
from elastic_trainer.worker.rank_grid import RankGrid
from elastic_trainer.train.script_checkpointer import _check_equal
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
ranks = RankGrid(timedelta(seconds=60))
def model(seed, layers):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
for seed, layers in ((0, 2), (rank, 2), (0, 1 + rank), (0, 0)):
    try:
        _check_equal(model(seed, layers), None, ranks)
        print("equal")
    except ApiError as error:
        print(error)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_differ_are_told_alike(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=90)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said[0] == said[1]
    same, other_values, other_model, none = said[0]
    assert (same, none) == ("equal", "equal")
    assert re.match(r"HF532 .*\b0\.weight\b", other_values)
    assert re.match(r"HF532 .*\b2 to 4\b", other_model)
