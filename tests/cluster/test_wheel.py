"""The built wheel works outside the checkout: it runs an example, with agents, and renders one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from built_wheel import build_wheel

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An environment with the wheel; third-party packages come from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    venv.create(folder / "env", with_pip=False)
    site = next((folder / "env").glob("lib/python*/site-packages"))
    with zipfile.ZipFile(build_wheel(folder)) as wheel:
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


def test_it_bears_its_name_and_its_licence(installed):
    (about,) = installed.parents[1].glob("lib/python*/site-packages/holdfast_ml-*.dist-info")
    metadata = (about / "METADATA").read_text()
    assert "\nName: holdfast-ml\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    licence = (about / "licenses" / "LICENSE").read_text()
    assert licence == (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence


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
