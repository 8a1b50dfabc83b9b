from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_slurm import SUBMIT, FakeSlurm, tree

from launcher import stop_request
from launcher.backends.slurm_queries import Patience
from launcher.cli.main import run_cli
from launcher.ops.record import LauncherLog

TINY = """\
name: a-job
model: tiny
layout: {dp: auto}
cluster: {nodes: 2, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 128, global_batch: 24, micro_batch: 2, steps: 60, precision: fp32}
data: {path: corpus, format: text, tokenizer: bytes}
slurm: {partition: main, time: "60", save_s: 5}
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("corpus").write_text("some text\n" * 200)
    Path("job.yaml").write_text(TINY)
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


def submit(*options, code=0):
    assert run_cli(["submit", "job.yaml", "--to", "slurm", *options]) == code


def refused(capsys, *options, code=2):
    before = tree(".")
    submit(*options, code=code)
    assert tree(".") == before, "something was left behind"
    return capsys.readouterr().err


def test_a_job_is_submitted_with_all_that_belongs_to_it(slurm, capsys):
    submit("--run-dir", "runs/one")
    run = Path("runs/one").absolute()
    out, err = capsys.readouterr()
    assert out == f"slurm job 17: {run}\nnext: holdfast status {run}\n"
    assert err == ""
    assert slurm.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
    said = json.loads((run / "submitted.json").read_text())
    assert (said["target"], said["job_id"], said["submit_time"]) == ("slurm", "17", SUBMIT)
    assert (said["run_dir"], said["run_id"], said["former"]) == (
        str(run),
        "a-job-" + said["run_id"][6:],
        [],
    )
    assert {"job.json", "spec.yaml", "job.sbatch", "logs", "events", "checkpoints"} <= set(
        tree(run)
    )


def test_a_name_with_spaces_and_quotes_in_the_path(slurm, capsys):
    submit("--run-dir", 'runs/it\'s a "run"')
    run = Path('runs/it\'s a "run"').absolute()
    assert slurm.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
    assert (run / "submitted.json").is_file()
    assert run_cli(["status", str(run), "--json"]) == 0
    assert '"state": "pending"' in capsys.readouterr().out


def test_dry_run_shows_the_script_and_contacts_nothing(slurm, capsys):
    before = tree(".")
    submit("--dry-run")
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/bash\n")
    assert "nothing was submitted" in err
    submit("--dry-run", "--json")
    answer = json.loads(capsys.readouterr().out)
    assert {"job.sbatch", "job.json", "spec.yaml"} == set(answer["files"])
    assert (slurm.calls(), tree(".")) == ([], before)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sbatch: error: invalid partition specified: moon",
            (
                "HF652 slurm.partition: Slurm refuses the job: invalid partition specified: moon; "
                "there are main, debug"
            ),
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Requested node configuration is not "
                "available"
            ),
            (
                "HF652 Slurm refuses the job: Batch job submission failed: Requested node "
                "configuration is not available; ask for no more than nodes have"
            ),
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Invalid account or account/partition "
                "combination specified"
            ),
            "HF652 slurm.account: ",
        ),
    ],
)
def test_what_sbatch_refuses_leaves_nothing_behind(slurm, capsys, said, told):
    slurm.says("sbatch", err=said, code=1)
    slurm.says("sinfo", out="main\ndebug")
    assert told in refused(capsys)
    Path("runs").mkdir()
    assert told in refused(capsys, "--run-dir", "deep/down/here")
    Path("mine").mkdir()  # an empty folder of the user's stays
    assert told in refused(capsys, "--run-dir", "mine")


def test_an_sbatch_that_is_not_there(slurm, capsys, monkeypatch):
    (slurm.bin / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(slurm.bin))
    err = refused(capsys)
    assert "HF650 sbatch is not installed here, or not on the PATH; run this where" in err
    assert "holdfast render --to slurm" in err


def test_a_slurm_that_answers_garbage(slurm, capsys, monkeypatch):
    monkeypatch.setattr("launcher.backends.slurm.Patience", lambda: Patience(adopt_s=0.0))
    slurm.says("sbatch", out="<html>502 Bad Gateway</html>")
    slurm.says("squeue", out="<html>502 Bad Gateway</html>")
    err = refused(capsys, code=1)
    assert "sbatch answered with no job's id, but: <html>502 Bad Gateway</html>" in err


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["name=a;rm -rf"], "HF015 name: "),
        (["slurm.partition=a\nb"], "HF015 slurm.partition: "),
        (["slurm.time=1"], "HF160 slurm.time"),
        (["data.path=gone"], "HF201 data.path: "),
    ],
)
def test_mistakes_are_found_before_slurm_is_asked(slurm, capsys, sets, told):
    err = refused(capsys, *(word for text in sets for word in ("--set", text)))
    assert told in err
    assert slurm.calls() == []


def test_paths_that_only_nodes_see(slurm, capsys):
    submit("--set", "data.path=/nodes/only/corpus", "--unseen", "--run-dir", "one")
    assert Path("one/submitted.json").is_file()


def test_a_run_directory_that_is_in_use_is_refused_and_stays(slurm, capsys):
    submit("--run-dir", "one")
    assert "HF611" in refused(capsys, "--run-dir", "one")
    Path("file").write_text("x")
    assert "HF611" in refused(capsys, "--run-dir", "file")
    assert len(slurm.calls("sbatch")) == 1


def test_variables_of_sbatch_are_named_and_not_used(slurm, capsys, monkeypatch):
    monkeypatch.setenv("SBATCH_PARTITION", "moon")
    slurm.says("sbatch", out="17", then='echo "env: $SBATCH_PARTITION" >>calls')
    submit("--run-dir", "one")
    assert "SBATCH_PARTITION is set and not used" in capsys.readouterr().err
    assert "env: " in slurm.calls()


def test_code_is_frozen_and_removed_again_with_the_rest(slurm, capsys):
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
    slurm.says("sbatch", err="sbatch: error: invalid partition specified: x", code=1)
    refused(capsys, "--run-dir", "two")


def test_a_sweep_is_one_array_with_a_run_for_each_task(slurm, capsys):
    submit("--sweep", "train.optimizer.lr=1e-4,3e-4", "--sweep", "train.seed=1,2", "--run-dir", "s")
    run = Path("s").absolute()
    assert capsys.readouterr().out.startswith(f"slurm job 17, 4 tasks: {run}\n")
    assert slurm.calls("sbatch") == [f"sbatch --parsable {run}/job.sbatch"]
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
        (["--sweep", "train.seed"], "HF654 --sweep 'train.seed': expected KEY=V1,V2"),
        (["--sweep", "train.seed=1,,2"], "HF654"),
        (["--sweep", "train.seed=1", "--sweep", "train.seed=2"], "is there twice"),
        (["--sweep", "train.seed=1,1"], "the value 1 is there twice"),
        (["--sweep", "train.seeds=1,2"], "HF010 train.seeds"),
        (["--sweep", "train.seed=1,x"], "HF012 train.seed"),
        (["--sweep", "cluster.nodes=2,3"], "HF654 --sweep: its values change what is asked"),
        (["--sweep", "train.seed=1,2", "--set", "checkpoint.dir=c"], "HF654 checkpoint.dir"),
        (["--sweep", "train.seed=1,2", "--set", "slurm.array=0-3"], "HF016 slurm.array"),
        (["--sweep", "train.seed=1,2", "--set", "slurm.restart=chain"], "HF016 slurm.restart"),
        (["--sweep", "train.seed=" + ",".join(map(str, range(1001)))], "at most 1,000"),
        (["--sweep", "train.seed=1,2", "--watch"], "HF610"),
        (["--upgrade"], "HF610 --upgrade"),
        (["--all-nodes"], "HF610 --all-nodes"),
    ],
)
def test_sweeps_that_cannot_be(slurm, capsys, options, told):
    assert told in refused(capsys, *options)
    assert slurm.calls() == []


def test_a_run_is_submitted_again_when_its_job_has_ended(slurm, capsys):
    submit("--run-dir", "runs/one")
    assert run_cli(["submit", "--resume", "one"]) == 2
    assert "HF615" in capsys.readouterr().err
    slurm.is_now("FAILED", ExitCode="91:0")
    stop_request.ask(Path("runs/one"), why="test", t_unix=0.0)
    slurm.accepts("18")
    assert run_cli(["submit", "--resume", "one"]) == 0
    assert "slurm job 18: " in capsys.readouterr().out
    assert not stop_request.asked(Path("runs/one"))
    said = json.loads(Path("runs/one/submitted.json").read_text())
    assert (said["job_id"], [each["job_id"] for each in said["former"]]) == ("18", ["17"])


def put_out(run, node, t):
    log = LauncherLog(run, "agent.n1", wall=lambda: t)
    log.emit("member.evicted", node="n1", member=node, reason="failed twice")


def test_nodes_that_were_put_out_are_kept_off_when_a_run_is_submitted_again(slurm, capsys):
    submit("--run-dir", "runs/one", "--set", "slurm.exclude=['bad[1-2]']")
    run = Path("runs/one").absolute()
    put_out(run, "n0", SUBMIT - 60)
    put_out(run, "n3", SUBMIT + 60)
    slurm.is_now("FAILED", ExitCode="92:0")
    slurm.accepts("18")
    capsys.readouterr()
    assert run_cli(["submit", "--resume", "one"]) == 0
    assert slurm.calls("sbatch")[-1] == (
        f"sbatch --parsable --exclude=bad[1-2],n3 {run}/job.sbatch"
    )
    out = capsys.readouterr().out
    assert "keeps off n3, which the run has put out: failed twice" in out
    assert "submit --resume RUN --all-nodes" in out
    assert "slurm.exclude" in out
    assert json.loads((run / "submitted.json").read_text())["without"] == ["n3"]


def test_nodes_that_were_put_out_may_be_used_again(slurm, capsys):
    submit("--run-dir", "runs/one")
    put_out(Path("runs/one"), "n3", SUBMIT + 60)
    slurm.is_now("FAILED", ExitCode="92:0")
    slurm.accepts("18")
    capsys.readouterr()
    assert run_cli(["submit", "--resume", "one", "--all-nodes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["without"] == []
    assert "--exclude" not in slurm.calls("sbatch")[-1]


def test_a_refused_resume_stays_stopped(slurm, capsys):
    submit("--run-dir", "runs/one")
    slurm.is_now("CANCELLED", ExitCode="0:15")
    stop_request.ask(Path("runs/one"), why="test", t_unix=0.0)
    slurm.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    assert run_cli(["submit", "--resume", "runs/one"]) == 2
    assert stop_request.asked(Path("runs/one"))
    assert json.loads(Path("runs/one/submitted.json").read_text())["job_id"] == "17"


def test_one_task_of_a_sweep_is_submitted_again_alone(slurm, capsys):
    submit("--sweep", "train.seed=1,2", "--run-dir", "runs/s")
    assert run_cli(["why", "runs/s"]) == 2
    assert "HF651 runs/s is a sweep; name one of its runs, as runs/s/0" in capsys.readouterr().err
    slurm.says("squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    slurm.says("sbatch", out="20")
    assert run_cli(["submit", "--resume", "runs/s/1"]) == 0
    assert slurm.calls("sbatch")[-1].startswith("sbatch --parsable --array=1 ")
    assert json.loads(Path("runs/s/1/submitted.json").read_text())["job_id"] == "20_1"


def squeue_rows(*tasks):
    """What squeue says of (job id of a task, its state)."""
    rows = []
    for task, state in tasks:
        script = Path("runs/s/job.sbatch").absolute()
        fields = [task, task, state, "None", str(SUBMIT), "N/A", "N/A", "", "a-job", str(script)]
        rows.append("\x1f".join(fields))
    return "\n".join(rows)


def test_a_whole_sweep_is_submitted_again_but_for_what_is_done_or_live(slurm, capsys):
    submit("--sweep", "train.seed=1,2,3,4", "--run-dir", "runs/s")
    capsys.readouterr()
    assert run_cli(["submit", "--resume", "s", "--watch"]) == 2
    assert "HF610 --resume of a sweep" in capsys.readouterr().err
    states = ("COMPLETED", "RUNNING", "FAILED", "CANCELLED")
    rows = squeue_rows(*((f"17_{i}", state) for i, state in enumerate(states)))
    slurm.says("squeue", out=rows)
    LauncherLog(Path("runs/s/0"), "n1").emit("job.stopped", node="n1", code=0, reason="done")
    stop_request.ask(Path("runs/s/3"), why="test", t_unix=0.0)
    slurm.says("sbatch", out="20")
    assert run_cli(["submit", "--resume", "s"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "slurm job 20: goes on: 2, 3 of runs/s",
        "waiting or running, left alone: 1 of runs/s",
        "done already: 0 of runs/s",
    ]
    assert slurm.calls("sbatch")[-1].startswith("sbatch --parsable --array=2,3 ")
    ids = [json.loads(Path(f"runs/s/{i}/submitted.json").read_text())["job_id"] for i in range(4)]
    assert ids == ["17_0", "17_1", "20_2", "20_3"]
    assert not stop_request.asked(Path("runs/s/3"))


def test_a_sweep_with_nothing_left_to_do_submits_nothing(slurm, capsys):
    submit("--sweep", "train.seed=1,2", "--run-dir", "runs/s")
    capsys.readouterr()
    slurm.says("squeue", out=squeue_rows(("17_0", "COMPLETED"), ("17_1", "COMPLETED")))
    for task in ("0", "1"):
        log = LauncherLog(Path("runs/s") / task, "n1")
        log.emit("job.stopped", node="n1", code=0, reason="done")
    assert run_cli(["submit", "--resume", "s", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["job_id"], answer["runs"], len(answer["done"])) == (None, [], 2)
    assert len(slurm.calls("sbatch")) == 1


def test_a_sweep_that_is_refused_stays_stopped(slurm, capsys):
    submit("--sweep", "train.seed=1,2", "--run-dir", "runs/s")
    slurm.says("squeue", out=squeue_rows(("17_0", "FAILED"), ("17_1", "FAILED")))
    stop_request.ask(Path("runs/s/1"), why="test", t_unix=0.0)
    slurm.says("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    assert run_cli(["submit", "--resume", "s"]) == 2
    assert stop_request.asked(Path("runs/s/1"))
    assert not stop_request.asked(Path("runs/s/0"))


def test_check_live_asks_slurm_without_submitting(slurm, capsys):
    slurm.says(
        "sbatch", err="sbatch: Job 5 to start at 1767225600 using 2 processors on nodes n[1-2]"
    )
    assert run_cli(["check", "job.yaml", "--to", "slurm", "--live"]) == 0
    assert "Slurm would start it at " in capsys.readouterr().out
    assert slurm.calls() == ["sbatch --test-only"]
    slurm.says("sbatch", err="allocation failure: Invalid qos specification", code=1)
    assert run_cli(["check", "job.yaml", "--to", "slurm", "--live", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["problems"][0]["key"] == "slurm.qos"


def test_what_every_later_start_needs_is_kept_with_the_run(slurm, capsys):
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


def test_a_resumed_run_keeps_its_code_until_it_is_upgraded(slurm, capsys):
    Path("proj").mkdir()
    Path("proj/tool.py").write_text("x = 1\n")
    submit("--set", "code.dir=proj", "--run-dir", "one")
    Path("proj/tool.py").write_text("x = 2\n")
    capsys.readouterr()

    def resumed(*options):
        slurm.is_now("FAILED")
        assert run_cli(["submit", "--resume", "one", "--json", *options]) == 0
        answer = json.loads(capsys.readouterr().out)["upgraded"]
        code = json.loads(Path("one/job.json").read_text())["code"]["dir"]
        return answer, Path(code, "tool.py").read_text()

    assert resumed() == (None, "x = 1\n")
    (said,), text = resumed("--upgrade")
    assert said.startswith("code ")
    assert text == "x = 2\n"
    assert resumed("--upgrade") == ([], "x = 2\n")


def test_a_group_that_is_not_there_is_refused(slurm, capsys):
    assert "HF643" in refused(capsys, "--set", "slurm.group=no-such-group", "--run-dir", "one")


def test_tasks_of_a_sweep_share_one_copy_of_the_code(slurm, capsys):
    Path("proj").mkdir()
    Path("proj/tool.py").write_text("x = 1\n")
    submit("--set", "code.dir=proj", "--sweep", "train.seed=1,2,3", "--run-dir", "s")
    folders = {json.loads(Path(f"s/{i}/job.json").read_text())["code"]["dir"] for i in range(3)}
    (folder,) = folders
    assert Path(folder).parent == Path("s/code").absolute()
    assert Path(folder, "tool.py").read_text() == "x = 1\n"
    assert not list(Path("s").glob("[0-9]/code"))
    assert len(list(Path("s").glob("[0-9]/environment.json"))) == 3
