"""What a zygote of the trainer preloads, and a worker that only says what it finds of CUDA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from elastic_trainer import train as train  # noqa: PLC0414  what the trainer's zygote has

if os.environ.get("SHIM_PLANT"):
    torch.cuda.is_available()


def main() -> int:
    found = {"bad_fork": torch.cuda._is_in_bad_fork(), "pid": os.getpid()}
    torch.cuda.is_available()
    Path(os.environ["SHIM_REPORT"]).write_text(json.dumps(found))
    return 0
