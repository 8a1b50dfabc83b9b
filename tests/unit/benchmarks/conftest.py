from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a benchmark as `python benchmarks/NAME.py` does, and forget it after."""
    monkeypatch.syspath_prepend(str(FOLDER))
    known = set(sys.modules)
    yield importlib.import_module
    for path in FOLDER.glob("*.py"):
        if path.stem not in known:
            sys.modules.pop(path.stem, None)
