from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))  # harness.py


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="no CUDA device is here")
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue  # the hook sees the items of all folders
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(skip)
