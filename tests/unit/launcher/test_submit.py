"""submit with programs that stand in for Slurm's: all that belongs to a job, or nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from fake_slurm import SUBMIT, tree
from slurm_bench import TINY, asked, cli, fresh, refused, slurm, submit

from elastic_trainer.storage.storage_probe import probe_storage
from launcher.cli.main import run_cli
from launcher.platforms.slurm.queries import SlurmPatience
from launcher.runs import run_dir as run_dirs

__all__ = ["fresh", "slurm"]  # fixtures

ROOT = Path(__file__).parents[3]


def test_a_job_is_submitted_with_all_that_belongs_to_it(fresh, capsys):
    submit("--run-dir", "runs/one")
    run = Path("runs/one").absolute()
    out, err = capsys.readouterr()
    assert out == f"slurm job 17: {run}\nnext: holdfast status {run}\n"
    assert err == ""
    assert fresh.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
    said = json.loads((run / "submitted.json").read_text())
    assert (said["target"], said["job_id"], said["submit_time"]) == ("slurm", "17", SUBMIT)
    assert (said["run_dir"], said["run_id"], said["former"]) == (
        str(run),
        "a-job-" + said["run_id"][6:],
        [],
    )
    assert {"job.json", "job.yaml", "job.sbatch", "logs", "events", "checkpoints"} <= set(tree(run))


def test_a_name_with_spaces_and_quotes_in_the_path(fresh, capsys):
    submit("--run-dir", 'runs/it\'s a "run"')
    run = Path('runs/it\'s a "run"').absolute()
    assert fresh.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
    assert (run / "submitted.json").is_file()
    assert run_cli(["status", str(run), "--json"]) == 0
    assert '"state": "pending"' in capsys.readouterr().out


def test_dry_run_shows_the_script_and_contacts_nothing(fresh, capsys):
    before = tree(".")
    submit("--dry-run")
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n")
    assert err
    submit("--dry-run", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert {"job.sbatch", "job.json", "job.yaml"} == set(answer["files"])
    assert (fresh.calls(), tree(".")) == ([], before)


@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("sbatch: error: invalid partition specified: moon", "slurm.partition: "),
        ("Batch job submission failed: Requested node configuration is not available", ""),
        ("Batch job submission failed: Invalid account specified", "slurm.account: "),
    ],
)
def test_what_sbatch_refuses_leaves_nothing_behind(fresh, capsys, said, key):
    fresh.says("sbatch", err=said, code=1)
    fresh.says("sinfo", out="main\ndebug")
    Path("runs").mkdir()
    Path("mine").mkdir()  # an empty folder of the user's stays
    for options in ((), ("--run-dir", "deep/down/here"), ("--run-dir", "mine")):
        told = refused(capsys, *options)
        assert f"HF652 {key}" in told
        assert said.removeprefix("sbatch: error: ") in told
        assert ("main, debug" in told) == (key == "slurm.partition: ")


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_who_is_ended_while_sbatch_runs_leaves_nothing_behind(fresh, number):
    (fresh.folder / "wait").touch()
    fresh.says("sbatch", then="while [ -e wait ]; do sleep 0.1; done")
    before = tree(".")
    words = [sys.executable, "-m", "launcher.cli.main", "submit", "job.yaml", "--to", "slurm"]
    try:
        with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
            deadline = time.monotonic() + 60
            while not (fresh.calls("sbatch") and list(Path("runs").glob("*/job.json"))):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(60) == 130
    finally:
        (fresh.folder / "wait").unlink()
    assert tree(".") == before


def test_an_sbatch_that_is_not_there(fresh, capsys, monkeypatch):
    (fresh.bin / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(fresh.bin))
    err = refused(capsys)
    assert "HF650 sbatch" in err
    assert "holdfast render --to slurm" in err


def test_a_slurm_that_answers_garbage(fresh, capsys, monkeypatch):
    monkeypatch.setattr(
        "launcher.platforms.slurm.backend.SlurmPatience", lambda: SlurmPatience(adopt_s=0.0)
    )
    fresh.says("sbatch", out="<html>502 Bad Gateway</html>")
    fresh.says("squeue", out="<html>502 Bad Gateway</html>")
    err = refused(capsys, code=1)
    assert "<html>502 Bad Gateway</html>" in err


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["name=a;rm -rf"], "HF015 name: "),
        (["slurm.partition=a\nb"], "HF015 slurm.partition: "),
        (["slurm.time=1"], "HF160 slurm.time"),
        (["data.path=gone"], "HF201 data.path: "),
    ],
)
def test_mistakes_are_found_before_slurm_is_asked(fresh, capsys, sets, told):
    err = refused(capsys, *(word for text in sets for word in ("--set", text)))
    assert told in err
    assert fresh.calls("sbatch") == []


def test_paths_that_only_nodes_see(fresh, capsys):
    submit("--set", "data.path=/nodes/only/corpus", "--unseen", "--run-dir", "one")
    assert Path("one/submitted.json").is_file()


def test_a_run_directory_that_is_in_use_is_refused_and_stays(fresh, capsys):
    submit("--run-dir", "one")
    assert "HF611" in refused(capsys, "--run-dir", "one")
    Path("file").write_text("x")
    assert "HF611" in refused(capsys, "--run-dir", "file")
    assert len(fresh.calls("sbatch")) == 1


def test_variables_of_sbatch_are_named_and_not_used(fresh, capsys, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "moon")
    fresh.says("sbatch", out="17", then='echo "env: $SBATCH_PARTITION" >>calls')
    submit("--run-dir", "one")
    assert "SBATCH_PARTITION" in capsys.readouterr().err
    assert "env: " in fresh.calls()


def test_code_is_frozen_and_removed_again_with_the_rest(fresh, capsys):
    Path("src").mkdir()
    Path("src/train.py").write_text("print('x')\n")
    job = TINY.replace("model: tiny\n", "").replace(
        "train: {", "command: train.py\ncode: {dir: src}\n#"
    )
    job = "\n".join(line for line in job.splitlines() if not line.startswith(("data", "#")))
    Path("job.yaml").write_text(job + "\n")
    submit("--run-dir", "one")
    [code] = Path("one/code").glob("*/train.py")
    assert code.read_text() == "print('x')\n"
    fresh.says("sbatch", err="sbatch: error: invalid partition specified: x", code=1)
    refused(capsys, "--run-dir", "two")


def test_a_sweep_is_one_array_with_a_run_for_each_task(fresh, capsys):
    submit("--sweep", "train.optimizer.lr=1e-4,3e-4", "--sweep", "train.seed=1,2", "--run-dir", "s")
    run = Path("s").absolute()
    assert capsys.readouterr().out.startswith(f"slurm job 17, 4 tasks: {run}\n")
    assert fresh.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
    assert "--array=0-3" in (run / "job.sbatch").read_text()
    lrs = []
    for index in range(4):
        config = json.loads((run / str(index) / "job.json").read_text())
        lrs.append((config["train"]["optimizer"]["lr"], config["train"]["seed"]))
        assert config["run_id"].endswith(f"-{index}")
        said = json.loads((run / str(index) / "submitted.json").read_text())
        assert said["job_id"] == f"17_{index}"
    assert lrs == [(1e-4, 1), (1e-4, 2), (3e-4, 1), (3e-4, 2)]
    tasks = json.loads((run / "sweep.json").read_text())["tasks"]
    assert tasks[3] == {"index": 3, "values": {"train.optimizer.lr": "3e-4", "train.seed": "2"}}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--sweep", "train.seed"], "HF654 --sweep 'train.seed': "),
        (["--sweep", "train.seed=1,,2"], "HF654"),
        (["--sweep", "train.seed=1", "--sweep", "train.seed=2"], "HF654 --sweep train.seed"),
        (["--sweep", "train.seed=1,1"], "HF654 --sweep train.seed: "),
        (["--sweep", "train.seeds=1,2"], "HF010 train.seeds"),
        (["--sweep", "train.seed=1,x"], "HF012 train.seed"),
        (["--sweep", "cluster.nodes=2,3"], "HF654 --sweep: "),
        (["--sweep", "train.seed=1,2", "--set", "checkpoint.dir=c"], "HF654 checkpoint.dir"),
        (["--sweep", "train.seed=1,2", "--set", "slurm.array=0-3"], "HF016 slurm.array"),
        (["--sweep", "train.seed=1,2", "--set", "slurm.restart=chain"], "HF016 slurm.restart"),
        (["--sweep", "train.seed=" + ",".join(map(str, range(1001)))], "HF654 --sweep"),
        (["--sweep", "train.seed=1,2", "--watch"], "HF610"),
        (["--upgrade"], "HF610 --upgrade"),
    ],
)
def test_sweeps_that_cannot_be(fresh, capsys, options, told):
    assert told in refused(capsys, *options)
    assert fresh.calls("sbatch") == []


def test_check_live_asks_slurm_without_submitting(fresh, capsys):
    fresh.says(
        "sbatch", err="sbatch: Job 5 to start at 1767225600 using 2 processors on nodes n[1-2]"
    )
    assert run_cli(["check", "job.yaml", "--to", "slurm", "--live"]) == 0
    assert "n[1-2]" in capsys.readouterr().out
    assert fresh.calls("sbatch") == ["sbatch --test-only"]
    fresh.says("sbatch", err="allocation failure: Invalid qos specification", code=1)
    assert run_cli(["check", "job.yaml", "--to", "slurm", "--live", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["key"] == "slurm.qos"


def test_what_every_later_start_needs_is_kept_with_the_run(fresh, capsys):
    Path("proj").mkdir()
    Path("proj/tool.py").write_text("x = 1\n")
    submit("--set", "code.dir=proj", "--set", "slurm.umask='0027'", "--run-dir", "one")
    run = Path("one")
    kept = json.loads((run / "code.json").read_text())
    assert Path(kept["dir"], "tool.py").read_text() == "x = 1\n"
    assert json.loads((run / "job.json").read_text())["code"]["dir"] == kept["dir"]
    assert json.loads((run / "environment.json").read_text())["distributions"]["pytest"]
    loose = [str(path) for path in (run, *run.rglob("*")) if path.lstat().st_mode & 0o027]
    assert loose == []


def test_a_group_that_is_not_there_is_refused(fresh, capsys):
    assert "HF643" in refused(capsys, "--set", "slurm.group=no-such-group", "--run-dir", "one")


def test_tasks_of_a_sweep_share_one_copy_of_the_code(fresh, capsys):
    Path("proj").mkdir()
    Path("proj/tool.py").write_text("x = 1\n")
    submit("--set", "code.dir=proj", "--sweep", "train.seed=1,2,3", "--run-dir", "s")
    folders = {json.loads(Path(f"s/{i}/job.json").read_text())["code"]["dir"] for i in range(3)}
    (folder,) = folders
    assert Path(folder).parent == Path("s/code").absolute()
    assert Path(folder, "tool.py").read_text() == "x = 1\n"
    assert not list(Path("s").glob("[0-9]/code"))
    assert len(list(Path("s").glob("[0-9]/environment.json"))) == 3


def test_a_file_system_without_hard_links_is_refused(fresh, capsys, monkeypatch):
    def link(_file, _second):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(run_dirs, "probe_storage", partial(probe_storage, link=link))
    assert "HF617 " in refused(capsys, "--run-dir", "runs/one")
    assert fresh.calls("sbatch") == []


def test_a_run_directory_that_all_may_write_is_refused(fresh, capsys):
    Path("all").mkdir()
    Path("all").chmod(0o777)
    for run_dir in ("all", "all/run"):
        assert "HF616 " in refused(capsys, "--run-dir", run_dir)
    assert fresh.calls("sbatch") == []


def test_what_slurm_would_never_start_is_refused_before_anything_is_made(fresh, capsys):
    asked(fresh)
    told = refused(capsys, "--run-dir", "runs/one")
    assert "job.yaml:4: HF680 cluster.nodes: " in told
    assert "main" in told
    assert fresh.calls("sbatch") == []
    err = cli(capsys, "check", "job.yaml", "--to", "slurm", "--live", code=2)[1]
    assert "HF680" in err


def test_a_run_that_resumes_is_asked_for_too(slurm, capsys):
    slurm.is_now("FAILED")
    asked(slurm)
    before = slurm.calls("sbatch")
    err = cli(capsys, "submit", "--resume", "runs/one", code=2)[1]
    assert "HF680 cluster.nodes: " in err
    assert slurm.calls("sbatch") == before


def test_check_live_shows_what_a_job_waits_for_beside_why_it_is_refused(fresh, capsys):
    asked(fresh)
    said = fresh.folder / "scontrol.then"
    said.write_text(said.read_text().replace("State=UP MaxNodes=1", "State=DOWN"))
    fresh.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    out = cli(capsys, "check", "job.yaml", "--to", "slurm", "--live", "--json", code=2)[0]
    answer = json.loads(out)
    assert [each["code"] for each in answer["problems"]] == ["HF652"]
    assert [each["code"] for each in answer["warnings"]] == ["HF180"]


def test_the_user_may_know_better(fresh, capsys):
    asked(fresh)
    assert "submit --force" in refused(capsys, "--run-dir", "runs/one")
    submit("--run-dir", "runs/one", "--force")
    assert "job.yaml:4: warning: HF680 cluster.nodes: " in capsys.readouterr().err
    assert fresh.calls("sbatch") == [f"sbatch --parsable {Path('runs/one').absolute()}/job.sbatch"]
    submit("--run-dir", "runs/two", "--force", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert (answer["ok"], [each["code"] for each in answer["warnings"]]) == (True, ["HF680"])


def test_the_user_may_know_better_of_a_run_that_resumes(slurm, capsys):
    slurm.is_now("FAILED")
    asked(slurm)
    err = cli(capsys, "submit", "--resume", "runs/one", "--force")[1]
    assert "warning: HF680 cluster.nodes: " in err
    assert len(slurm.calls("sbatch")) == 2


def test_the_user_may_know_better_of_a_sweep(fresh, capsys):
    asked(fresh)
    sweep = ("--sweep", "train.seed=1,2", "--run-dir", "s")
    assert "HF680" in refused(capsys, *sweep)
    submit(*sweep, "--force")
    fresh.says("squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert "HF680" in cli(capsys, "submit", "--resume", "s", code=2)[1]
    assert "warning: HF680" in cli(capsys, "submit", "--resume", "s", "--force")[1]
    assert len(fresh.calls("sbatch")) == 2


def test_what_is_wrong_with_the_job_itself_is_no_matter_of_opinion(fresh, capsys):
    assert "HF160" in refused(capsys, "--force", "--set", "slurm.time=1")
    fresh.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    assert "HF652" in refused(capsys, "--force")


@pytest.mark.parametrize("kind", ["JobSubmitPlugins", "CliFilterPlugins"])
@pytest.mark.parametrize(("test_code", "code"), [(0, 0), (1, 2)])
def test_where_a_plugin_may_change_the_job_slurms_own_test_decides(fresh, test_code, code, kind):
    asked(fresh, more=f"'{kind} = lua'")
    fails = f'[ "$1" = --test-only ] && exit {test_code}'
    then = (fresh.folder / "sbatch.then").read_text()
    (fresh.folder / "sbatch.then").write_text(f"{fails}\n{then}")
    submit("--run-dir", "runs/one", code=code)
    assert fresh.calls("sbatch")[0] == "sbatch --test-only"


def test_a_slurm_that_does_not_answer_is_left_to_sbatch(fresh, capsys):
    for name in ("scontrol", "sinfo", "sacctmgr"):
        (fresh.bin / name).unlink()
    submit("--run-dir", "runs/one")
    assert "HF" not in capsys.readouterr().err
