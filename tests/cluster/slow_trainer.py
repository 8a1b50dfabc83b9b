"""examples/hf_trainer.py, at a pace at which a test can meet a step."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from transformers import Trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import hf_trainer

real = Trainer.training_step


def training_step(self, *args, **kwargs):
    time.sleep(0.05)
    return real(self, *args, **kwargs)


Trainer.training_step = training_step
hf_trainer.main()
