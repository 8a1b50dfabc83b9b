"""The zygote makes no call of the CUDA driver, so each of its workers can.

`torch.cuda.is_initialized()` does not tell: counting devices initialises the driver, and in forked
children CUDA then fails, but it stays False. So torch's CUDA build runs here with a driver of its
own, `libcuda.c`, that counts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_trainer.agent.workers.environment import base_environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE_S = 120.0
pytestmark = pytest.mark.timeout(2 * DEADLINE_S)

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def cuda_python() -> str:
    found = ROOT / ".venv-cuda" / "bin" / "python"
    if not found.exists():
        pytest.skip("torch's CUDA build is not installed: make .venv-cuda/ready (4.5 GB)")
    return str(found)


@pytest.fixture(scope="session")
def driver(cuda_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a libcuda.so.1 that counts calls."""
    folder = tmp_path_factory.mktemp("driver")
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), "libcuda.c"]
    subprocess.run(command, cwd=HERE, check=True, timeout=DEADLINE_S)
    return folder


@pytest.fixture
def run(cuda_python: str, driver: Path, tmp_path: Path) -> Run:
    """Return what runs a script of this folder where torch has CUDA, and the driver counts."""

    def run(script: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
            "LD_LIBRARY_PATH": str(driver),
            "STUB_LOG": str(tmp_path / "driver.log"),
            **more,
        }
        return subprocess.run(
            [cuda_python, str(HERE / script), *args],
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )

    return run


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[int], list[str]]:
    """Return what names the driver's calls of a process."""

    def calls(pid: int) -> list[str]:
        log = tmp_path / "driver.log"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line.split()[1] for line in lines if line.split()[0] == str(pid)]

    return calls


@pytest.fixture
def zygote(run: Run, tmp_path: Path) -> Callable[..., tuple[int, dict[str, int]]]:
    """Return what runs one and a worker: its process id, and what the worker found."""

    def zygote(*, compiles: bool, **more: str) -> tuple[int, dict[str, int]]:
        (tmp_path / "job.json").write_text(json.dumps({"train": {"compile": compiles}}))
        env = base_environment(
            {}, workers=1, address="127.0.0.1", run_dir=tmp_path, record_dir=tmp_path
        )
        report = tmp_path / "report.json"
        toolkit = {"CUDA_HOME": str(tmp_path), "SHIM_REPORT": str(report)}
        found = run("zygote_of.py", str(tmp_path), str(DEADLINE_S / 2), **env, **toolkit, **more)
        said = json.loads(found.stdout)
        assert (said["ready"]["tasks"], said["ready"]["error"]) == (1, None)
        assert (said["started"]["how"], said["exited"]["status"]) == ("zygote", 0)
        return said["zygote"], json.loads(report.read_text())

    return zygote


@pytest.mark.parametrize("compiles", [False, True])
def test_the_zygote_makes_no_call_of_the_driver(
    zygote: Callable[..., tuple[int, dict[str, int]]],
    calls: Callable[[int], list[str]],
    *,
    compiles: bool,
) -> None:
    pid, worker = zygote(compiles=compiles)
    assert calls(pid) == []
    assert not worker["bad_fork"]
    assert calls(worker["pid"]).count("cuInit") == 1  # the driver counts


def test_a_call_that_is_planted_is_seen(
    zygote: Callable[..., tuple[int, dict[str, int]]], calls: Callable[[int], list[str]]
) -> None:
    pid, worker = zygote(compiles=False, SHIM_PLANT="1")
    assert calls(pid).count("cuInit") == 1
    assert worker["bad_fork"]


@pytest.mark.parametrize(
    ("more", "pool"), [({}, False), ({"TORCHINDUCTOR_COMPILE_THREADS": "2"}, True)]
)
def test_a_worker_that_compiles_starts_no_pool(
    zygote: Callable[..., tuple[int, dict[str, int]]],
    more: dict[str, str],
    *,
    pool: bool,
) -> None:
    """With triton, which comes with torch's CUDA build, it would by default."""
    _, worker = zygote(compiles=True, SHIM_COMPILE="1", **more)
    assert (worker["children"] > 0) == pool
