"""PyTorchJobs of users, and what `holdfast wrap` makes of them, to be read in review.

HOLDFAST_UPDATE_GOLDEN=1 writes the wrapped ones.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.wrap.manifest import wrap_manifest

FOLDER = Path(__file__).parent / "wrapped"
RUN_DIRS = {
    "elastic": "/data/runs/resnet-…",
    "master-worker": "/ckpt/runs/finetune",
    "rdma": "/ckpt/runs/llama",
    "shell": "/ckpt/runs/shell",
}


@pytest.mark.parametrize("name", RUN_DIRS)
def test_the_wrapped_manifests_are_those_reviewed(name):
    path = FOLDER / f"{name}.wrapped.yaml"
    made = wrap_manifest((FOLDER / f"{name}.yaml").read_text(), f"{name}.yaml")
    if os.environ.get("HOLDFAST_UPDATE_GOLDEN"):
        path.write_text(made.text)
    assert made.text == path.read_text(), (
        "if it is meant: HOLDFAST_UPDATE_GOLDEN=1 pytest tests/golden/test_golden_wrapped.py"
    )
    assert made.run_dir == RUN_DIRS[name]
