"""Which Python a torchrun means: real interpreters in small environments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import run_cli
from launcher.spec.errors import UserError
from launcher.wrap.interpreter import agents_python, main, python_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def other(tmp_path):
    """Return another environment, with a torchrun and nothing else."""
    folder = tmp_path / "other"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    torchrun(folder, f"#!{folder}/bin/python3")
    return folder


def torchrun(folder, *lines):
    path = folder / "bin" / "torchrun"
    path.write_text("\n".join([*lines, "import torch"]))
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "lines",
    [
        ["#!{0}/bin/python3"],
        ["#!{0}/bin/python3 -s"],
        ["#!/bin/sh", '\'\'\'exec\' "{0}/bin/python3" "$0" "$@"', "' '''"],
        ["#!/bin/bash", "exec something"],
    ],
)
def test_a_torchruns_python_is_found(other, lines):
    path = torchrun(other, *(line.format(other) for line in lines))
    assert Path(python_of(str(path)) or "").parent == other / "bin"


def test_words_that_name_one(other, monkeypatch):
    monkeypatch.setenv("PATH", str(other / "bin"))
    for word in ("torchrun", "python", str(other), str(other / "bin" / "python3")):
        assert Path(python_of(word) or "").parent == other / "bin"
    assert python_of("no-such-torchrun") is None
    torchrun(other, "#!/usr/bin/env python3")
    assert python_of("torchrun") == str(other / "bin" / "python3")


def test_our_own_is_ours_and_one_without_holdfast_is_refused(other, capsys):
    assert agents_python(str(Path(sys.executable).with_name("torchrun"))) == sys.executable
    assert agents_python("no-such-torchrun") == sys.executable
    with pytest.raises(UserError, match="HF678") as caught:
        agents_python(str(other / "bin" / "torchrun"))
    assert str(other) in str(caught.value)
    assert main(str(other)) == 93
    assert "HF678" in capsys.readouterr().err


def test_another_environment_that_has_it_runs_the_agents(other, monkeypatch, capsys):
    packages = next((other / "lib").iterdir()) / "site-packages"
    own = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "all.pth").write_text(f"{own}\n{ROOT}\n")
    assert agents_python(str(other / "bin" / "torchrun")) == str(other / "bin" / "python3")
    monkeypatch.chdir(other)
    assert main(str(other)) == 0
    assert capsys.readouterr().out == f"{other}/bin/python\n"


def test_wrap_refuses_what_it_can_see_and_a_start_the_rest(other, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "a.sbatch"
    script.write_text("#!/bin/bash\nsrun ./other/bin/torchrun a.py\n")
    assert run_cli(["wrap", str(script)]) == 2
    assert "HF678" in capsys.readouterr().err
    script.write_text("#!/bin/bash\nsrun torchrun a.py\n")
    assert run_cli(["wrap", str(script)]) == 0
    monkeypatch.setenv("PATH", str(other / "bin"))
    for name, value in {"JOB_ID": "7", "JOB_NUM_NODES": "1", "JOB_NODELIST": "n1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    folder = tmp_path / "holdfast-7-x"
    folder.mkdir()
    (folder / "where").write_text(str(tmp_path))
    monkeypatch.setenv("HOLDFAST_SCRIPT", str(folder))
    assert run_cli(["batch", "--", "srun", "torchrun", "a.py"]) == 93
    assert "HF678" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
