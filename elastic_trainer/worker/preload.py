"""What torch and our trainer import only once a step runs: imported before the fork.

A worker forked from the zygote then imports nothing more; a test holds that. Each
line costs the first step of every recovery up to seconds when it is missing.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from elastic_trainer.board.address import BOARD_VARIABLE
from elastic_trainer.storage.files import read_json
from elastic_trainer.worker.process import ask_for_a_name
from elastic_trainer.worker.torch_private import compile_in_this_process, find_cpu_instructions

MODULES = (
    "torch._dynamo",
    "torch.profiler._cupti_monitor",  # 2.13 only
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

As of torch 2.13; what another version does not have is left out.

Not torch.utils.cpp_extension: importing it counts devices, which initialises the CUDA driver, and
CUDA fails in all that is forked later. Of what it imports setuptools takes most of the time."""


FLOAT8 = ("torch._inductor.codegen.triton",)
"""For jobs with `train.float8`: what torchao patches as layers are converted."""
FLOAT8_ON_CPU = ("torchao.float8", "torchao.float8._inductor_patch", "torchao.float8.float8_ops")
"""Not where there may be GPUs: importing it counts devices, as torch.utils.cpp_extension does."""
TRANSFORMERS = (
    "transformers.initialization",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
)
"""For jobs with a model of transformers' own class."""
_BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
BOARD = ("elastic_trainer.board.kubernetes_board",)
"""For jobs whose board is a ConfigMap: HTTP and TLS."""


def preload(env: Mapping[str, str]) -> None:
    """Import what workers of this run will need, and know. `env` is that of the zygote."""
    run_dir = env.get("HOLDFAST_RUN_DIR")
    # What is wrong with it the workers will say.
    job = read_json(Path(run_dir) / "job.json") if run_dir is not None else {}
    compiles, float8 = (bool(job.get("train", {}).get(key)) for key in ("compile", "float8"))
    on_cpu = job.get("device") == "cpu"
    for name in (
        *MODULES,
        *(COMPILER if compiles else ()),
        *(FLOAT8 if float8 else ()),
        *(BOARD if env.get(BOARD_VARIABLE, "").startswith("kubernetes:") else ()),
    ):
        _import_if_there(name)
    if job.get("model", {}).get("family") == "transformers":
        _import_class(job["model"])
    if float8 and on_cpu:
        with suppress(ImportError):  # the worker says it (parallel/apply.py)
            for name in FLOAT8_ON_CPU:
                importlib.import_module(name)
    if compiles:
        _prepare_compiler(env, on_cpu=on_cpu)
    ask_for_a_name()


def _import_class(model: Mapping[str, str]) -> None:
    """Import transformers' own class of a job's model, and all that building it takes.

    What transformers imports asks whether there are GPUs (torchao): by NVML, which leaves CUDA's
    driver alone.
    """
    before = os.environ.get(_BY_NVML)
    os.environ[_BY_NVML] = "1"
    try:
        for name in TRANSFORMERS:
            importlib.import_module(name)
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

        kind = json.loads(model["config"])["model_type"]
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]]
        if "lora" in model:
            importlib.import_module("peft")
    except (ImportError, KeyError):
        pass  # the worker says it (model/transformers_model.py, model/adapters.py)
    finally:
        if before is None:
            del os.environ[_BY_NVML]


def _import_if_there(name: str) -> None:
    """Import a module, unless this version of torch has none of that name."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise


def _prepare_compiler(env: Mapping[str, str], *, on_cpu: bool) -> None:
    """Have forked workers find what does not change from worker to worker."""
    if "TORCHINDUCTOR_COMPILE_THREADS" not in env:
        compile_in_this_process()
    if on_cpu:
        find_cpu_instructions()  # it also imports torch.utils.cpp_extension, see COMPILER
