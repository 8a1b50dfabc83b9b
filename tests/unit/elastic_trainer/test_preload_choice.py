"""The compiler is imported before the fork where the job compiles, and only there."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_trainer.worker import preload as preloading
from elastic_trainer.worker.preload import COMPILER, FLOAT8, FLOAT8_ON_CPU, MODULES, preload


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(importlib, "import_module", names.append)
    monkeypatch.setattr(preloading, "_prepare_compiler", lambda _env, *, on_cpu: None)
    return names


def job_json(device: str = "cuda", **train: bool) -> str:
    return json.dumps({"device": device, "train": train})


@pytest.mark.parametrize(
    ("job", "more"),
    [
        (job_json(compile=True), COMPILER),
        (job_json(compile=False), ()),
        (job_json(float8=True), FLOAT8),
        (job_json(float8=True, compile=True), (*COMPILER, *FLOAT8)),
        (job_json("cpu", float8=True), (*FLOAT8, *FLOAT8_ON_CPU)),
        (json.dumps({}), ()),
        ("torn {", ()),
        ("[]", ()),
        (None, ()),
    ],
)
def test_the_job_decides(
    tmp_path: Path, imported: list[str], job: str | None, more: tuple[str, ...]
) -> None:
    if job is not None:
        (tmp_path / "job.json").write_text(job)
    preload({"HOLDFAST_RUN_DIR": str(tmp_path)})
    assert imported == [*MODULES, *more]


def test_where_torchao_is_missing_the_worker_says_so(
    tmp_path: Path, imported: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_missing(name: str) -> None:
        if name.startswith("torchao"):
            raise ModuleNotFoundError(name)
        imported.append(name)

    (tmp_path / "job.json").write_text(job_json("cpu", float8=True))
    monkeypatch.setattr(importlib, "import_module", is_missing)
    preload({"HOLDFAST_RUN_DIR": str(tmp_path)})
    assert imported == [*MODULES, *FLOAT8]


PROBES = """
import os, sys
from torch._inductor import config, cpu_vec_isa
from elastic_trainer.worker.preload import preload
calls = []
cpu_vec_isa.pick_vec_isa = lambda: calls.append(1)
preload(os.environ)
sys.stdout.write(f"{len(calls)} {config.compile_threads}")
"""


@pytest.mark.process
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("device", "more", "found"),
    [
        ("cpu", {}, "1 1"),
        ("cuda", {}, "0 1"),
        ("cuda", {"TORCHINDUCTOR_COMPILE_THREADS": "3"}, "0 3"),
    ],
)
def test_the_processor_is_probed_once_and_no_pool_of_compilers_starts(
    tmp_path: Path, device: str, more: dict[str, str], found: str
) -> None:
    """Not for GPUs: what the probe imports counts devices."""
    (tmp_path / "job.json").write_text(json.dumps({"train": {"compile": True}, "device": device}))
    repo = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(repo), "HOLDFAST_RUN_DIR": str(tmp_path), **more}
    command = [sys.executable, "-c", PROBES]
    said = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=170)
    assert said.stdout.decode() == found


def test_without_a_run_there_is_no_job(imported: list[str]) -> None:
    preload({})
    assert imported == list(MODULES)


LISTED_FOR_THIS_TORCH = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="which modules a first step imports is listed for torch 2.13",
)

COUNTS = """
import sys, torch
from elastic_trainer.worker.preload import COMPILER, FLOAT8, MODULES, _import_if_there
for name in MODULES:
    _import_if_there(name)
calls = []
torch.cuda._is_compiled, torch.version.cuda = (lambda: True), "13.0"
torch.cuda.is_available = torch.cuda.device_count = lambda: calls.append(1) or False
for name in (*COMPILER, *FLOAT8, *sys.argv[1:]):
    _import_if_there(name)
sys.stdout.write(str(len(calls)))
"""


@pytest.mark.process
@pytest.mark.skipif(
    torch.__version__.startswith(("2.11.", "2.12.")), reason="the trainer needs torch 2.13"
)
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("planted", "counted"),
    [
        ((), 0),
        (("torch.utils.cpp_extension",), 1),
        pytest.param(("torchao.float8",), 1, marks=LISTED_FOR_THIS_TORCH),
    ],
)
def test_no_module_counts_devices(tmp_path: Path, planted: tuple[str, ...], counted: int) -> None:
    """As in a build of torch with CUDA, where the toolkit is installed."""
    repo = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": str(repo), "CUDA_HOME": str(tmp_path)}
    env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
    command = [sys.executable, "-c", COUNTS, *planted]
    found = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True, timeout=170)
    assert int(found.stdout) == counted


@LISTED_FOR_THIS_TORCH
@pytest.mark.parametrize("name", MODULES + COMPILER + FLOAT8 + FLOAT8_ON_CPU)
def test_every_module_is_there(name: str) -> None:
    assert importlib.util.find_spec(name) is not None
