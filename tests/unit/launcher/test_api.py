from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from slurm_bench import TINY, asked, fresh, slurm, trains, worker_fails

from holdfast import FailedRunError, load_job, open_run, plan, render, submit, submit_sweep
from launcher.platforms.base import JobState
from launcher.spec.errors import UserError
from launcher.spec.reading import parse_spec

__all__ = ["fresh", "slurm"]  # fixtures

ROOT = Path(__file__).parents[3]
JOB = ROOT / "examples" / "llama3-405b.yaml"
WITHOUT_TORCH = """
import sys
from holdfast import load_job, plan, render, submit
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
    text = (out / "job.sbatch").read_text()
    assert f'#SBATCH --chdir="{out}"' in text
    assert f"#SBATCH --job-name={load_job(JOB).name}\n" in text, "the folder's name is the folder's"
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


VALUES = yaml.safe_load(TINY)


def test_a_job_of_plain_data_is_the_job_of_its_file(fresh):
    assert load_job(VALUES).model_dump() == load_job("job.yaml").model_dump()
    assert load_job(load_job(VALUES, ["train.steps=9"]), ["train.seq_len=64"]).sets == (
        "train.steps=9",
        "train.seq_len=64",
    )
    lr = {**VALUES, "train": {**VALUES["train"], "optimizer": {"lr": 1e-05}}}
    assert load_job(lr).train.optimizer.lr == 1e-05
    with pytest.raises(UserError) as caught:
        load_job({**VALUES, "name": "x: [", "train": {**VALUES["train"], "steps": "60"}})
    assert [(each.code, each.where.key) for each in caught.value.problems] == [
        ("HF015", "name"),
        ("HF012", "train.steps"),
    ]
    with pytest.raises(UserError, match="HF005"):
        load_job({**VALUES, "train": {1, 2}})
    with pytest.raises(UserError, match="HF005"):
        load_job({**VALUES, "train": {"seq_len": float("nan")}})


def test_paths_of_plain_data_are_relative_to_the_working_directory(fresh):
    run = submit({**VALUES, "data": {"path": Path("corpus"), "format": "text"}}, run_dir="runs/a")
    assert load_job(run.path / "job.yaml").text.startswith("# ")
    kept = parse_spec((run.path / "job.yaml").read_text())
    assert kept.data.path == "corpus"
    assert f'"{Path("corpus").absolute()}"' in (run.path / "job.json").read_text()


def test_a_run_that_finishes_has_a_result(slurm):
    run = open_run("one")
    assert (run.path, run.target, run.job_id) == (Path("runs/one").absolute(), "slurm", "17")
    assert run.status().state is JobState.PENDING
    with pytest.raises(TimeoutError):
        run.wait(timeout_s=0)
    trains(ends=0)
    slurm.is_now("COMPLETED")
    assert run.wait(timeout_s=30).state is JobState.DONE
    assert run.result()["steps"] == 3
    texts = [line.text.partition(",")[0] for line in run.logs(ranks=[0])]
    assert [text for text in texts if text.startswith("-- step")] == [
        "-- step 1",
        "-- step 2",
        "-- step 3",
    ]
    assert list(run.logs(follow=True, ranks=[0])) == list(run.logs(ranks=[0]))
    assert list(run.logs(nodes=["n7"])) == []


def test_a_run_that_fails_says_why(slurm):
    run = submit("job.yaml", run_dir="runs/two", sets=["train.steps=7"])
    assert run.job_id == "17"
    worker_fails(trains("runs/two"))
    slurm.is_now("FAILED", ExitCode="93:0")
    with pytest.raises(FailedRunError) as caught:
        run.result(timeout_s=30)
    assert caught.value.why.state is JobState.FAILED
    assert caught.value.why.failure["node"] == "n2"
    assert run.cancel().was_over
    resumed = run.resume()
    assert resumed.job is not None
    assert run.submitted == resumed.run


def test_a_run_has_the_warnings_of_its_job_and_of_its_platform(fresh):
    sets = ["train.optimizer.lr=3.0"]
    assert [each.code for each in submit("job.yaml", sets=sets, run_dir="runs/a").warnings] == [
        *(each.code for each in plan(load_job("job.yaml", sets)).warnings)
    ]
    asked(fresh)
    with pytest.raises(UserError, match="HF680"):
        submit("job.yaml", sets=sets, run_dir="runs/b")
    run = submit("job.yaml", sets=sets, run_dir="runs/b", force=True)
    assert [each.code for each in run.warnings][-1] == "HF680"
    assert "HF170" in [each.code for each in run.warnings]
    assert all(each.is_warning for each in run.warnings)
    runs = submit_sweep("job.yaml", {"train.seed": [1, 2]}, sets=sets, force=True)
    assert [each.warnings for each in runs] == [run.warnings, run.warnings]
    assert open_run("runs/b").warnings == ()


def test_a_run_that_resumes_has_the_warnings_of_that(slurm):
    run = open_run("one")
    slurm.is_now("FAILED")
    asked(slurm)
    with pytest.raises(UserError, match="HF680"):
        run.resume()
    assert run.resume(force=True).warnings == run.warnings
    assert [each.code for each in run.warnings] == ["HF680"]


def test_a_sweep_keeps_the_types_of_its_values(fresh):
    runs = submit_sweep(VALUES, {"train.optimizer.lr": [1e-4, 3e-4], "train.steps": [7, 9]})
    jobs = [load_job(run.path / "job.yaml") for run in runs]
    assert [(job.train.optimizer.lr, job.train.steps) for job in jobs] == [
        (1e-4, 7),
        (1e-4, 9),
        (3e-4, 7),
        (3e-4, 9),
    ]
    with pytest.raises(UserError) as caught:
        submit_sweep(VALUES, {"train.steps": [7, "9"]})
    assert caught.value.code == "HF012"


def test_a_sweep_over_what_a_command_takes(fresh):
    text = (ROOT / "docs" / "api.md").read_text()
    [example] = [
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "tune" in each
    ]
    names: dict[str, dict] = {}
    exec(example.partition("runs =")[0], names)  # noqa: S102  a job of plain data
    Path("train.py").write_text("")
    runs = submit_sweep(names["job"], {"values.lr": [1e-4, 3e-4]})
    commands = [json.loads((run.path / "job.json").read_text())["command"] for run in runs]
    assert commands == [["train.py", "--lr", "0.0001"], ["train.py", "--lr", "0.0003"]]
