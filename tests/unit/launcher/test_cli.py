from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import COMMANDS, run_cli

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture
def job(tmp_path, job_text):
    path = tmp_path / "job.yaml"
    path.write_text(job_text)
    return str(path)


def test_examples_are_there():
    assert {path.name for path in EXAMPLES} >= {
        "tiny-cpu.yaml",
        "llama3-8b.yaml",
        "llama3-405b.yaml",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_passes_check_without_a_warning(path, capsys):
    assert run_cli(["check", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: ok\n")
    assert err == ""


def test_check_as_json(job, capsys):
    assert run_cli(["check", job, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], answer["problems"], answer["world_size"]) == (True, [], 32)
    assert [rung["num_nodes"] for rung in answer["ladder"]] == [4, 3, 2, 1]
    assert run_cli(["check", job, "--json", "--set", "layout.tp=3", "--set", "x=1"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False
    assert [problem["code"] for problem in answer["problems"]] == ["HF102", "HF010"]
    assert set(answer["problems"][0]) == {"code", "file", "line", "key", "message", "offers"}
    assert {"layout.tp": 8} in answer["problems"][0]["offers"]


def test_warnings_are_shown_apart_and_stop_a_job_only_if_asked(job, capsys):
    odd = ["--set", "cluster.spares=9", "--set", "train.global_batch=512"]
    assert run_cli(["check", job, *odd]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{job}: ok, 1 warning\n")
    assert "warning: HF172 cluster.spares: " in err
    assert run_cli(["check", job, *odd, "--strict"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "HF172" in err
    wrong = [*odd, "--set", "cluster.gpu=H1", "--set", "x=1"]
    assert run_cli(["check", job, *wrong]) == 2
    errors, warnings = capsys.readouterr().err.split("\n\n")
    assert ("HF010" in errors, "HF122" in errors, "HF172" in errors) == (True, True, False)
    assert ("HF010" in warnings, "HF122" in warnings, "HF172" in warnings) == (False, False, True)
    assert run_cli(["check", job, *wrong, "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert [each["code"] for each in answer["problems"]] == ["HF122", "HF010"]
    assert [each["code"] for each in answer["warnings"]] == ["HF172"]
    assert run_cli(["check", job, *wrong, "--json", "--strict"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert sorted(each["code"] for each in answer["problems"]) == ["HF010", "HF122", "HF172"]
    assert answer["warnings"] == []


def test_check_looks_at_this_machine_when_the_job_would_run_here(job, capsys):
    assert run_cli(["check", job, "--set", "cluster.gpu=cpu"]) == 2
    assert "HF201 data.path" in capsys.readouterr().err
    assert run_cli(["check", job, "--to", "local"]) == 2
    assert "HF201 data.path" in capsys.readouterr().err
    assert run_cli(["check", job, "--to", "moon"]) == 2
    err = capsys.readouterr().err
    assert "HF206 moon" in err
    assert "use local" in err


@pytest.mark.parametrize("command", ["check", "plan"])
def test_a_missing_file_is_the_users_mistake(command, capsys):
    assert run_cli([command, "gone.yaml"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gone.yaml: HF001 ")


def test_plan_shows_placement_and_ladder(job, capsys):
    sets = ["--set", "layout.tp=4", "--set", "layout.cp=2"]
    assert run_cli(["plan", job, *sets]) == 0
    out = capsys.readouterr().out
    assert "node 0     ranks 0-7           dp 0, cp 0-1, tp 0-3" in out
    assert "node 3     ranks 24-31         dp 3, cp 0-1, tp 0-3" in out
    top = next(line for line in out.splitlines() if line.lstrip().startswith("4  dp4·cp2·tp4"))
    assert " 16 " in top
    assert "100.0%" in top
    assert run_cli(["plan", job, *sets, "--set", "cluster.gpu=cpu"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["3", "dp3·cp2·tp4", "22", "2", "of", "66", "-"] in rows


def test_plan_shows_the_fastest_layouts(job, capsys, tmp_path):
    picture = tmp_path / "layouts.svg"
    assert run_cli(["plan", job, "--top", "3", "--picture", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["layouts"]
    assert len(found) == 3
    assert found[0]["slower_by"] == 0
    assert [each["step_s"] for each in found] == sorted(each["step_s"] for each in found)
    assert sum(found[0]["items_s"].values()) == pytest.approx(found[0]["step_s"])
    assert picture.read_text().startswith("<?xml")
    assert run_cli(["plan", job, "--top", "3", "--explain"]) == 0
    out = capsys.readouterr().out
    assert found[0]["settings"]["train.recompute"] in out
    assert "matmul" in out
    assert run_cli(["plan", job, "--picture", str(tmp_path / "layouts.txt")]) == 2
    assert "HF620" in capsys.readouterr().err
    assert run_cli(["plan", job, "--top", "3", "--set", "cluster.gpu=cpu"]) == 2
    assert "HF136" in capsys.readouterr().err


def test_plan_shows_the_fastest_layouts_of_the_nodes_left(job, capsys):
    sizes = {}
    for nodes in ([], ["--nodes", "3"]):
        assert run_cli(["plan", job, "--top", "2", "--json", *nodes]) == 0
        found = json.loads(capsys.readouterr().out)["layouts"]
        sizes[len(nodes)] = {math.prod(each["layout"][axis] for axis in AXES) for each in found}
    assert sizes == {0: {32}, 2: {24}}


AXES = ("dp", "tp", "pp", "cp")


@pytest.mark.parametrize(("standby", "fixed_s"), [(False, 30), (True, 10)])
def test_plan_says_what_a_change_of_mesh_is_taken_to_cost(job, capsys, standby, fixed_s):
    sets = ["--set", f"elastic.standby={json.dumps(standby)}"]
    assert run_cli(["plan", job, *sets, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    change = answer["mesh_change"]
    moved = change["bytes_per_gpu"]
    assert moved == pytest.approx(12 * answer["model"]["num_params"] / 32)
    assert 0 < change["seconds"] - fixed_s < moved / 1e9
    assert change["away_s"] == 3600
    assert run_cli(["plan", job, *sets]) == 0
    [line] = (each for each in capsys.readouterr().out.splitlines() if each.startswith("change"))
    assert f"{change['seconds']:.3g} s" in line
    assert run_cli(["plan", job, "--set", "cluster.gpu=cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh_change"] is None


def test_plan_for_the_nodes_left(job, capsys):
    sets = ["--set", "layout.pp=2", "--set", "cluster.gpu=cpu"]
    assert run_cli(["plan", job, *sets, "--nodes", "3", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert (chosen["nodes"], chosen["spares"], chosen["rung"]["text"]) == (3, 1, "dp1-pp2-cp1-tp8")
    assert run_cli(["plan", job, *sets, "--nodes", "1"]) == 2
    assert "HF125 --nodes: 1 node left" in capsys.readouterr().err


def test_what_only_a_script_knows_is_null(tmp_path, capsys):
    text = "name: own\ncommand: train.py\ncluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}\n"
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(text + f"code: {{dir: {tmp_path}}}\n")
    assert run_cli(["plan", str(tmp_path / "job.yaml"), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["model"], plan["global_batch"]) == (None, None)
    rungs = [*plan["ladder"], plan["chosen"]["rung"]]
    assert {rung["micro_batches"] for rung in rungs} == {None}


def test_long_lists_are_shortened_unless_all_is_asked_for(capsys):
    path = str(ROOT / "examples" / "llama3-405b.yaml")
    assert run_cli(["plan", path]) == 0
    short = capsys.readouterr().out
    assert "2,032 more nodes (--all" in short
    assert len(short.splitlines()) < 40
    assert run_cli(["plan", path, "--all"]) == 0
    assert "node 1000  " in capsys.readouterr().out


def test_schema_is_json(capsys):
    assert run_cli(["schema"]) == 0
    assert "layout" in json.loads(capsys.readouterr().out)["properties"]


def test_version(capsys):
    assert run_cli(["--version"]) == 0
    assert capsys.readouterr().out.startswith("holdfast ")


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["chek"], ("'chek'", " check?")),
        (["zzz"], ("'zzz'", "use check, plan")),
        (["check"], ("'JOB'",)),
        (["plan", "x", "--nodes", "0"], ("--nodes", "x>=1")),
    ],
)
def test_mistakes_on_the_command_line_exit_with_2(args, values, capsys):
    assert run_cli(args) == 2
    err = capsys.readouterr().err
    assert all(value in err for value in values)


@pytest.mark.parametrize("command", ["check", "plan", "schema"])
def test_help_ends_with_an_example(command, capsys):
    assert run_cli([command, "--help"]) == 0
    assert capsys.readouterr().out.rstrip().splitlines()[-1].startswith("  Example: holdfast ")


def test_help_lists_all_commands(capsys):
    assert run_cli(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in COMMANDS)


def test_colours_stay_out_of_pipes(job):
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", "check", job, "--set", "layout.tp=3"],
        capture_output=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert b"\x1b" not in done.stderr + done.stdout
    assert b"Traceback" not in done.stderr


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error():
    path = str(ROOT / "examples" / "llama3-405b.yaml")
    command = [sys.executable, "-m", "launcher.cli.main", "plan", path, "--all"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as child:
        child.stdout.readline()
        child.stdout.close()
        err = child.stderr.read()
        assert child.wait(timeout=30) == 0
    assert err == b""
