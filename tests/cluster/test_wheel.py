"""The built wheel works outside the checkout: it runs an example, with agents, and renders one."""

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
        shutil.copytree(ROOT / package, source / package, symlinks=True)
    shutil.copytree(ROOT / "slurm", source / "slurm")  # the package links to its template
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


def holdfast(installed, folder, *args):
    """Run a command of the installed wheel on a copy of the examples."""
    shutil.copytree(ROOT / "examples", folder / "examples")
    return subprocess.run(
        [installed, "-m", "launcher.cli.main", *args],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_it_is_the_wheel_that_is_imported(installed, tmp_path):
    where = subprocess.run(
        [
            installed,
            "-c",
            "import launcher, elastic_trainer as e; print(launcher.__file__, e.__file__)",
        ],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()
    assert all(str(installed.parents[1]) in path for path in where)


@pytest.mark.timeout(240)
def test_the_wheel_runs_an_example(installed, tmp_path):
    options = ("--nodes", "2", "--run-dir", "run", "--set", "train.steps=4", "--json")
    done = holdfast(installed, tmp_path, "run", "examples/tiny-cpu.yaml", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"] == 4


def test_the_wheel_has_the_template_of_the_batch_script(installed, tmp_path):
    done = holdfast(installed, tmp_path, "render", "examples/llama3-8b.yaml", "--to", "slurm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "-m launcher.node agent" in done.stdout
    done = subprocess.run(["bash", "-n"], input=done.stdout, text=True, check=False, timeout=60)
    assert done.returncode == 0
