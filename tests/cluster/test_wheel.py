"""The built wheel works outside the checkout: `holdfast run` on an example, and the agent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An environment with the wheel; third-party packages come from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for package in ("launcher", "elastic_trainer"):
        shutil.copytree(ROOT / package, source / package)
    for file in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(folder), "."]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=100)
    venv.create(folder / "env", with_pip=False)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "env" / "bin" / "python"


@pytest.mark.timeout(240)
def test_the_wheel_runs_an_example(installed, tmp_path):
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    where = subprocess.run(
        [
            installed,
            "-c",
            "import launcher, elastic_trainer as e; print(launcher.__file__, e.__file__)",
        ],
        cwd=tmp_path,
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    assert all(str(installed.parents[1]) in path for path in where)
    done = subprocess.run(
        [
            installed,
            "-m",
            "launcher.cli.main",
            "run",
            "examples/tiny-cpu.yaml",
            "--nodes",
            "2",
            "--run-dir",
            "run",
            "--set",
            "train.steps=4",
            "--json",
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4
