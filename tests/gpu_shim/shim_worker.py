"""What a zygote of the trainer preloads, and a worker that only says what it finds of CUDA."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from elastic_trainer.worker.process import children

if os.environ.get("SHIM_PLANT"):
    torch.cuda.is_available()


def main() -> int:
    found = {"bad_fork": torch.cuda._is_in_bad_fork(), "pid": os.getpid()}
    if os.environ.get("SHIM_COMPILE"):
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()  # as inductor does before it compiles
        found["children"] = len(children())
    torch.cuda.is_available()
    Path(os.environ["SHIM_REPORT"]).write_text(json.dumps(found))
    return 0
