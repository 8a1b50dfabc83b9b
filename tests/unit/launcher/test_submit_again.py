"""submit --resume: a run, or what is left of a sweep, goes on in another job."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path

import pytest
from fake_slurm import SUBMIT, tree
from slurm_bench import fresh, submit

from elastic_trainer.plan.config import TrainConfig
from elastic_trainer.plan.ladder import Ladder
from launcher.cli.main import run_cli
from launcher.plan.loading import load_spec
from launcher.record import stop_request
from launcher.record.files import LauncherLog, events_named

__all__ = ["fresh"]  # the fixture


def test_a_run_is_submitted_again_when_its_job_has_ended(fresh, capsys):
    submit("--run-dir", "runs/one")
    assert run_cli(["submit", "--resume", "one"]) == 2
    assert "HF615" in capsys.readouterr().err
    fresh.is_now("FAILED", ExitCode="91:0")
    stop_request.ask(Path("runs/one"), why="test", t_unix=0.0)
    fresh.accepts("18")
    assert run_cli(["submit", "--resume", "one"]) == 0
    assert "slurm job 18: " in capsys.readouterr().out
    assert not stop_request.asked(Path("runs/one"))
    said = json.loads(Path("runs/one/submitted.json").read_text())
    assert (said["job_id"], [each["job_id"] for each in said["former"]]) == ("18", ["17"])


def test_who_had_what_done_is_in_the_record(fresh, capsys, monkeypatch):
    monkeypatch.setattr("getpass.getuser", lambda: "ann")
    submit("--run-dir", "runs/one")
    monkeypatch.setattr("getpass.getuser", lambda: "bob")
    found = events_named(Path("runs/one"), ["operator.acted"])
    host = socket.gethostname()
    assert [(e.fields["action"], e.fields["by"], e.fields["job"]) for e in found] == [
        ("submit", f"ann@{host}", "17")
    ]
    fresh.is_now("FAILED", ExitCode="91:0")
    fresh.accepts("18")
    assert run_cli(["submit", "--resume", "one"]) == 0
    found = events_named(Path("runs/one"), ["operator.acted"])
    assert [(e.fields["by"], e.fields["job"]) for e in found][1:] == [(f"bob@{host}", "18")]
    capsys.readouterr()
    assert run_cli(["describe", "one", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["operators"]
    assert [line.split("  ")[1] for line in told] == [
        f"submit by ann@{host} (job 17)",
        f"submit by bob@{host} (job 18)",
    ]


def exclude(run, node, t):
    log = LauncherLog(run, "agent.n1", wall=lambda: t)
    log.emit("member.evicted", node="n1", member=node, host=node, reason="failed twice")


def test_excluded_nodes_are_kept_off_when_a_run_is_submitted_again(fresh, capsys):
    submit("--run-dir", "runs/one", "--set", "slurm.exclude=['bad[1-2]']")
    run = Path("runs/one").absolute()
    exclude(run, "n0", SUBMIT - 60)
    exclude(run, "n3", SUBMIT + 60)
    fresh.is_now("FAILED", ExitCode="92:0")
    fresh.accepts("18")
    capsys.readouterr()
    assert run_cli(["submit", "--resume", "one"]) == 0
    assert fresh.calls("sbatch")[-1] == (
        f"sbatch --parsable --exclude=bad[1-2],n3 {run}/job.sbatch"
    )
    out = capsys.readouterr().out
    for value in ("n3", "failed twice", "--all-nodes", "slurm.exclude"):
        assert value in out
    assert json.loads((run / "submitted.json").read_text())["without"] == ["n3"]


def test_excluded_nodes_may_be_used_again(fresh, capsys):
    submit("--run-dir", "runs/one")
    exclude(Path("runs/one"), "n3", SUBMIT + 60)
    fresh.is_now("FAILED", ExitCode="92:0")
    fresh.accepts("18")
    capsys.readouterr()
    assert run_cli(["submit", "--resume", "one", "--all-nodes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without"] == []
    assert "--exclude" not in fresh.calls("sbatch")[-1]


RESUME = ["submit", "--resume", "one"]


def test_a_run_that_goes_on_may_ask_for_something_else(fresh, capsys):
    submit("--run-dir", "runs/one")
    run = Path("runs/one")
    job_json = (run / "job.json").read_text()
    fresh.is_now("FAILED", ExitCode="91:0")
    fresh.accepts("18")
    assert run_cli([*RESUME, "--set", "slurm.time=07:00:00", "--set", "slurm.qos=low"]) == 0
    out = capsys.readouterr().out
    assert "slurm.time=07:00:00\n" in out
    assert "slurm.qos=low\n" in out
    assert "--time=07:00:00" in (run / "job.sbatch").read_text()
    text = (run / "job.yaml").read_text()
    assert text.count(f" {Path().absolute()}\n") == 1, "where relative paths begin is there once"
    spec = load_spec(run / "job.yaml")
    assert spec.slurm.qos == "low"
    assert (run / "job.json").read_text() == job_json


def test_a_run_that_goes_on_keeps_what_was_planned(fresh, capsys):
    submit("--run-dir", "runs/one", "--set", "checkpoint.memory_every_steps=1")
    path = Path("runs/one/job.json")
    config = TrainConfig.from_json(path.read_text())
    # As another version predicted it.
    rungs = tuple(dataclasses.replace(each, memory_gib=7.0) for each in config.ladder.rungs)
    checkpoint = dataclasses.replace(config.checkpoint, memory_every_steps=3)
    config = dataclasses.replace(config, ladder=Ladder(rungs), checkpoint=checkpoint)
    path.write_text(config.to_json())
    job = Path("runs/one/job.yaml")
    job.write_text(job.read_text().replace("cluster: {", "cluster: {profile: gone, ", 1))
    assert "profile: gone" in job.read_text()
    fresh.is_now("FAILED", ExitCode="91:0")
    fresh.accepts("18")
    assert run_cli([*RESUME, "--set", "slurm.time=07:00:00"]) == 0, capsys.readouterr().err
    assert path.read_text() == config.to_json()
    assert "--time=07:00:00" in Path("runs/one/job.sbatch").read_text()


@pytest.mark.parametrize(
    "set_", ["train.steps=9", "slurm.array=3", "slurm={time: 1}", "kubernetes.image=x"]
)
def test_what_a_run_that_goes_on_may_not_change(fresh, capsys, set_):
    submit("--run-dir", "runs/one")
    before = tree("runs/one")
    fresh.is_now("FAILED", ExitCode="91:0")
    capsys.readouterr()
    assert run_cli([*RESUME, "--set", set_]) == 2
    key = set_.partition("=")[0]
    assert f"HF655 --set {key}:" in capsys.readouterr().err
    assert tree("runs/one") == before


def test_a_refused_resume_leaves_what_was_asked_for(fresh, capsys):
    submit("--run-dir", "runs/one")
    before = {name: Path("runs/one", name).read_text() for name in ("job.sbatch", "job.yaml")}
    fresh.is_now("FAILED", ExitCode="91:0")
    fresh.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    assert run_cli([*RESUME, "--set", "slurm.qos=low"]) == 2
    assert {name: Path("runs/one", name).read_text() for name in before} == before


def test_a_refused_resume_stays_stopped(fresh, capsys):
    submit("--run-dir", "runs/one")
    fresh.is_now("CANCELLED", ExitCode="0:15")
    stop_request.ask(Path("runs/one"), why="test", t_unix=0.0)
    fresh.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    assert run_cli(["submit", "--resume", "runs/one"]) == 2
    assert stop_request.asked(Path("runs/one"))
    assert json.loads(Path("runs/one/submitted.json").read_text())["job_id"] == "17"


def test_one_task_of_a_sweep_is_submitted_again_alone(fresh, capsys):
    submit("--sweep", "train.seed=1,2", "--run-dir", "runs/s")
    assert run_cli(["why", "runs/s"]) == 2
    err = capsys.readouterr().err
    assert "HF651 runs/s " in err
    assert "runs/s/0" in err
    fresh.says("squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    fresh.says("sbatch", out="20")
    assert run_cli(["submit", "--resume", "runs/s/1"]) == 0
    assert fresh.calls("sbatch")[-1].startswith("sbatch --parsable --array=1 ")
    assert json.loads(Path("runs/s/1/submitted.json").read_text())["job_id"] == "20_1"


def squeue_rows(*tasks):
    """What squeue says of (job id of a task, its state)."""
    rows = []
    for task, state in tasks:
        script = Path("runs/s/job.sbatch").absolute()
        fields = [task, task, state, "None", str(SUBMIT), "N/A", "N/A", "", "n/a"]
        fields += ["a-job", str(script)]
        rows.append("\x1f".join(fields))
    return "\n".join(rows)


def test_a_whole_sweep_is_submitted_again_but_for_what_is_done_or_live(fresh, capsys):
    submit("--sweep", "train.seed=1,2,3,4", "--run-dir", "runs/s")
    capsys.readouterr()
    assert run_cli(["submit", "--resume", "s", "--watch"]) == 2
    assert "HF610 --resume" in capsys.readouterr().err
    states = ("COMPLETED", "RUNNING", "FAILED", "CANCELLED")
    rows = squeue_rows(*((f"17_{i}", state) for i, state in enumerate(states)))
    fresh.says("squeue", out=rows)
    LauncherLog(Path("runs/s/0"), "n1").emit("job.stopped", node="n1", code=0, reason="done")
    stop_request.ask(Path("runs/s/3"), why="test", t_unix=0.0)
    fresh.says("sbatch", out="20")
    assert run_cli(["submit", "--resume", "s"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("slurm job 20: ")
    assert [line.rpartition(": ")[2] for line in out] == [
        "tasks 2, 3 of runs/s",
        "task 1 of runs/s",
        "task 0 of runs/s",
    ]
    assert fresh.calls("sbatch")[-1].startswith("sbatch --parsable --array=2,3 ")
    ids = [json.loads(Path(f"runs/s/{i}/submitted.json").read_text())["job_id"] for i in range(4)]
    assert ids == ["17_0", "17_1", "20_2", "20_3"]
    assert not stop_request.asked(Path("runs/s/3"))


def test_a_sweep_with_nothing_left_to_do_submits_nothing(fresh, capsys):
    submit("--sweep", "train.seed=1,2", "--run-dir", "runs/s")
    capsys.readouterr()
    fresh.says("squeue", out=squeue_rows(("17_0", "COMPLETED"), ("17_1", "COMPLETED")))
    for task in ("0", "1"):
        log = LauncherLog(Path("runs/s") / task, "n1")
        log.emit("job.stopped", node="n1", code=0, reason="done")
    assert run_cli(["submit", "--resume", "s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["job_id"], answer["runs"], len(answer["done"])) == (None, [], 2)
    assert len(fresh.calls("sbatch")) == 1


def test_a_sweep_that_is_refused_stays_stopped(fresh, capsys):
    submit("--sweep", "train.seed=1,2", "--run-dir", "runs/s")
    fresh.says("squeue", out=squeue_rows(("17_0", "FAILED"), ("17_1", "FAILED")))
    stop_request.ask(Path("runs/s/1"), why="test", t_unix=0.0)
    fresh.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    assert run_cli(["submit", "--resume", "s"]) == 2
    assert stop_request.asked(Path("runs/s/1"))
    assert not stop_request.asked(Path("runs/s/0"))


def test_a_resumed_run_keeps_its_code_until_it_is_upgraded(fresh, capsys):
    Path("proj").mkdir()
    Path("proj/tool.py").write_text("x = 1\n")
    submit("--set", "code.dir=proj", "--run-dir", "one")
    Path("proj/tool.py").write_text("x = 2\n")
    capsys.readouterr()

    def resumed(*options):
        fresh.is_now("FAILED")
        assert run_cli(["submit", "--resume", "one", "--json", *options]) == 0
        answer = json.loads(capsys.readouterr().out)["upgraded"]
        code = json.loads(Path("one/job.json").read_text())["code"]["dir"]
        return answer, Path(code, "tool.py").read_text()

    assert resumed() == (None, "x = 1\n")
    (said,), text = resumed("--upgrade")
    assert said.startswith("code ")
    assert text == "x = 2\n"
    assert resumed("--upgrade") == ([], "x = 2\n")
