"""What torch and our trainer import only once a step runs: imported before the fork.

A worker forked from the zygote then imports nothing more; a test holds that. Each
line costs the first step of every recovery up to seconds when it is missing.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path

from elastic_trainer.board.open_board import BOARD_VARIABLE
from elastic_trainer.name_service import ask_for_a_name

MODULES = (
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "torch.utils._device",
    "torch.utils.serialization.config",
    "encodings.ascii",
)
COMPILER = (
    "torch._inductor.compile_fx",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.repro.after_dynamo",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._export.passes.add_runtime_assertions_for_constraints_pass",
    "torch.export._unlift",
    "torch.fx.experimental.validator",
    "setuptools.command.build_ext",
)
"""For jobs with `train.compile`: most of its 800 modules, which take seconds a worker.

Not torch.utils.cpp_extension: importing it counts devices, which initialises the CUDA driver, and
CUDA fails in all that is forked later. Of what it imports setuptools takes most of the time."""


BOARD = ("elastic_trainer.board.kubernetes_board",)
"""For jobs whose board is a ConfigMap: HTTP and TLS."""


def preload(env: Mapping[str, str]) -> None:
    """Import what workers of this run will need, and know. `env` is that of the zygote."""
    for name in (
        *MODULES,
        *(COMPILER if _compiles(env) else ()),
        *(BOARD if env.get(BOARD_VARIABLE, "").startswith("kubernetes:") else ()),
    ):
        importlib.import_module(name)
    ask_for_a_name()


def _compiles(env: Mapping[str, str]) -> bool:
    """Return whether the run's job.json says so; what is wrong with it the workers will say."""
    run_dir = env.get("HOLDFAST_RUN_DIR")
    if run_dir is None:
        return False
    try:
        job = json.loads((Path(run_dir) / "job.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(job, dict) and bool(job.get("train", {}).get("compile"))
