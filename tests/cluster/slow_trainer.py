"""An example, at a pace at which a test can meet a step: slow_trainer.py EXAMPLE ARGUMENTS..."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

from elastic_trainer import api

real = api.WorkerRun.completed


def completed(self, *args, **kwargs):
    time.sleep(0.05)
    return real(self, *args, **kwargs)


api.WorkerRun.completed = completed
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
example = importlib.import_module(sys.argv.pop(1))
example.main()
