from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.api import load_job, plan, render, submit
from launcher.errors import UserError

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "llama3-405b.yaml"
WITHOUT_TORCH = """
import sys
from launcher.api import load_job, plan, render, submit
job = load_job({job!r})
bundle = render(job, plan(job), to="slurm", run_dir="/shared/r")
assert bundle["job.sbatch"].startswith("#!/bin/bash"), bundle
assert "torch" not in sys.modules
"""


def test_the_four_functions_never_import_torch():
    code = WITHOUT_TORCH.format(job=str(JOB))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_render_is_what_the_command_prints(tmp_path, capsys, monkeypatch):
    from launcher.cli.main import run_cli

    monkeypatch.chdir(tmp_path)
    assert run_cli(["render", str(JOB), "--to", "slurm"]) == 0
    printed = capsys.readouterr().out
    job = load_job(JOB)
    assert render(job)["job.sbatch"] == printed == render(job, plan(job))["job.sbatch"]
    assert list(tmp_path.iterdir()) == []


def test_render_writes_a_bundle_over_its_own_but_never_into_a_run(tmp_path, capsys):
    from launcher.cli.main import run_cli

    out = tmp_path / "a run"
    for _ in range(2):
        assert run_cli(["render", str(JOB), "-o", str(out)]) == 0
        listed = capsys.readouterr().out.splitlines()
        assert listed == [str(out / name) for name in ("job.sbatch", "job.json", "job.yaml")]
    assert f'#SBATCH --chdir="{out}"' in (out / "job.sbatch").read_text()
    assert (out / "logs").is_dir()
    (out / "events").mkdir()
    assert run_cli(["render", str(JOB), "-o", str(out)]) == 2
    assert "HF611" in capsys.readouterr().err


def test_mistakes_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="HF160"):
        render(load_job(JOB, ["slurm.time=1"]))
    with pytest.raises(UserError, match="HF206"):
        render(load_job(JOB), to="nowhere")
    with pytest.raises(UserError, match="HF001"):
        submit(tmp_path / "none.yaml")
