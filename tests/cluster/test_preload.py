"""What a forked worker needs is there before the fork."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import SHAPE as TWO_LAYERS
from harness import Run, make_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import Transformers

SHAPE = dataclasses.replace(TWO_LAYERS, num_layers=4)

OWN_CLASS = Transformers(
    num_layers=2, dim=32, num_heads=4, num_kv_heads=4, ffn_dim=48, vocab_size=256, params=1,
    active=1, config=json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
                                 "vocab_size": 256, "n_positions": 64, "resid_pdrop": 0.0,
                                 "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
)  # fmt: skip

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, sys
import elastic_trainer.train.main as train
threads = len(os.listdir("/proc/self/task"))
before = set(sys.modules)
code = train.main()
print(json.dumps({"threads": threads, "code": code, "late": sorted(set(sys.modules) - before)}))
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("layout", "interleave", "more"),
    [
        (ParallelLayout(cp=2, pp=2), 2, {}),
        pytest.param(ParallelLayout(dp=2, tp=2), 1, {}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(cp=2, pp=2, tp=2), 2, {}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(pp=2), 2, {}, marks=pytest.mark.slow),
        pytest.param(ParallelLayout(dp=2), 1, {"model": OWN_CLASS}, marks=pytest.mark.slow),
        pytest.param(
            ParallelLayout(tp=2),
            1,
            {"float8": True, "precision": "bf16"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_recovering_worker_imports_nothing_after_the_entry_point(
    layout, interleave, more, tmp_path
):
    """Rank 0: restores, trains two steps, saves."""
    world = layout.world_size
    options = {"recompute": "selective", "interleave": interleave, "model": SHAPE, **more}
    run = Run(tmp_path, make_config(tmp_path, layout, steps=1, **options))
    run.train(1, world)
    run.write(make_config(tmp_path, layout, steps=3, **options))
    with run.epoch(2, world, absent=(0,)) as group:
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, **group.environments[0]},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert group.wait() == [0] * (world - 1)
    report = json.loads(result.stdout)
    assert report["code"] == 0
    assert report["threads"] == 1  # who forks must have no other
    assert report["late"] == []
    assert [commit.step for commit in run.commits()] == [1, 3]
