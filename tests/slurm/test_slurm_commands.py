"""The commands of the launcher on a real Slurm: submit, status, why, logs, cancel, sweeps."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from cluster import until
from jobs import ROOT, TEXT, WAIT_S, job_text

from launcher.cli.main import run_cli
from launcher.ops.checkpoints.commits import RunCheckpoints
from launcher.ops.record.record import RunRecord

pytestmark = pytest.mark.timeout(400)

ALWAYS = ["train.steps=1000000", "checkpoint.every_steps=null"]


class User:
    """Runs commands in a folder of their own, on the cluster's login node."""

    def __init__(self, capsys) -> None:
        self.capsys = capsys

    def __call__(self, *words, code=0):
        self.capsys.readouterr()
        found = run_cli(list(words))
        out, err = self.capsys.readouterr()
        assert found == code, f"{words}: {found}\n{out}\n{err}"
        return out, err

    def json(self, *words, code=0):
        return json.loads(self(*words, "--json", code=code)[0])

    def submit(self, *sets, nodes=2, more=(), code=0):
        Path("job.yaml").write_text(job_text(nodes=nodes, steps=6))
        options = [word for text in sets for word in ("--set", text)]
        return self("submit", "job.yaml", "--to", "slurm", *options, *more, code=code)

    def state(self, run):
        return self.json("status", run)["state"]

    def wait(self, run, *states):
        def look():
            found = self.json("status", run)
            assert found["state"] in {*states, "pending", "running"}, found
            return found if found["state"] in states else None

        return until(f"{run} {states}", look, timeout_s=WAIT_S, every_s=0.5)

    def wait_step(self, run, step):
        def look():
            found = self.json("status", run)
            if found["state"] == "unknown":  # submitted by hand, it has not begun yet
                return None
            assert found["state"] in {"pending", "running", "done"}, self("why", run)
            return found if found["training"]["step"] >= step else None

        return until(f"{run} step {step}", look, timeout_s=WAIT_S, every_s=0.5)


@pytest.fixture
def user(slurm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in slurm.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOLDFAST_BEAT_S", "0.5")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    Path("text.txt").write_text(TEXT)
    return User(capsys)


def test_a_job_from_submit_to_its_end(user, slurm):
    out, _ = user.submit(more=["--run-dir", "runs/one"])
    assert "slurm job " in out
    found = user.wait("one", "done")
    assert (found["platform"]["code"], found["training"]["step"]) == (0, 6)
    assert found["platform"]["source"] in {"squeue", "scontrol"}
    assert found["platform"]["submitted"] == pytest.approx(time.time(), abs=WAIT_S)
    assert "it has done its last step" in user("why", "one")[0]
    out, _ = user("logs", "one")
    assert "n1/0: -- step 6, loss " in out
    assert "job: " in out
    sections = user.json("describe", "one")
    assert sections["slurm"]["JobState"] == "COMPLETED"
    assert sections["slurm"]["StartTime"].startswith(time.strftime("%Y-"))
    assert sections["job"]["name"] == "tiny"
    assert [text.split("  ")[1].split(" on ")[0] for text in sections["platform events"]] == [
        "queued",
        "started",
        "ended with code 0: COMPLETED",
    ]
    assert "nothing to do" in user("submit", "--resume", "one")[0]
    summary = json.loads(Path("runs/one/summary.json").read_text())
    assert (summary["code"], summary["steps"], summary["samples_lost"]) == (0, 6, 0)
    assert Path(user("report", "one")[0].strip()).name == "report.html"
    [log] = Path("runs/one/logs").glob("slurm-*.out")
    assert "cpu binding" not in log.read_text()
    [row] = user.json("list")
    assert row["state"] == "done"


def test_cancel_with_save_leaves_a_checkpoint_that_a_resume_goes_on_from(user, slurm):
    user.submit(*ALWAYS, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 3)["job_id"]
    restarts = slurm.job(job).restarts
    out, err = user("cancel", "one", "--save")
    assert "one is over: saved, saved: step " in out
    assert "asking job" in err
    [commit] = RunCheckpoints.of(Path("runs/one")).commits
    assert commit.step >= 3
    found = user.json("status", "one")
    assert (found["state"], found["platform"]["code"]) == ("saved", 91)
    assert found["job_id"] == job
    assert slurm.job(job).restarts == restarts, "nothing has put it back into the queue"
    user("submit", "--resume", "one")
    found = user.wait_step("one", commit.step + 1)
    assert found["job_id"] != job
    user("cancel", "one")
    assert user.state("one") == "cancelled"
    assert f"trains from step {commit.step} on" in user("logs", "one")[0]


def test_cancel_with_save_saves_though_the_batch_host_is_lost(user, slurm):
    user.submit(*ALWAYS, nodes=3, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 3)["job_id"]
    slurm.power_off(slurm.job(job).batch_host)
    seen = user.json("status", "one")["training"]["step"]
    user.wait_step("one", seen + 3)
    begun = time.monotonic()
    out, _ = user("cancel", "one", "--save")
    took_s = time.monotonic() - begun
    [commit] = RunCheckpoints.of(Path("runs/one")).commits
    assert f"one is over: cancelled, saved: step {commit.step}\n" in out
    assert commit.step >= seen + 3
    # One of the nodes has seen for 30 s that the script is gone, and cancels the job in its place.
    assert took_s < 120
    assert slurm.run("squeue", "-h").stdout == ""


def test_logs_follow_a_rank_over_a_requeue(user, slurm):
    user.submit(*ALWAYS, nodes=1, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 2)["job_id"]

    def trains_again():
        events = RunRecord(Path("runs/one"))
        events.poll()
        starts = [event.t_unix for event in events.events if event.event == "run.started"]
        steps = [event.t_unix for event in events.events if event.event == "step.completed"]
        return len(starts) == 2 and steps[-1] > starts[1]

    def act():
        slurm.run("scontrol", "requeue", job)
        try:
            until("the second attempt trains", trains_again, timeout_s=WAIT_S)
        finally:
            slurm.run("scancel", job)

    thread = threading.Thread(target=act)
    thread.start()
    out, err = user("logs", "one", "-f")
    thread.join()
    lines = out.splitlines()
    starts = [line for line in lines if " trains from step " in line]
    assert len(starts) >= 2, out
    assert any(f"-- attempt {job}.1" in line for line in lines), out
    assert err.splitlines()[-1].startswith("-- cancelled")


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        (["slurm.partition=moon"], "HF652 slurm.partition: Slurm refuses the job: "),
        (["slurm.gres=gpu:16"], "HF652 "),
        (["slurm.gres=fpga:1"], "HF652 cluster.gpus_per_node: "),
        (["slurm.constraint=nosuch"], "HF652 slurm.constraint: "),
        (["slurm.reservation=nosuch"], "HF652 slurm.reservation: "),
    ],
)
def test_what_slurm_refuses_leaves_nothing_behind(user, sets, told):
    _, err = user.submit(*sets, nodes=4, code=2)
    assert told in err, err
    assert not Path("runs").exists()
    assert user("list")[0] == "no run in runs\n"
    options = [word for text in sets for word in ("--set", text)]
    _, err = user("check", "job.yaml", "--to", "slurm", "--live", *options, code=2)
    assert "HF652 " in err


def test_check_live_says_when_it_would_start(user):
    Path("job.yaml").write_text(job_text(nodes=2, steps=6))
    out, _ = user("check", "job.yaml", "--to", "slurm", "--live")
    assert "Slurm would start it at " in out
    assert "on n[1-2]" in out


def test_why_a_job_waits_and_cancelling_it(user, slurm):
    user.submit(*ALWAYS, nodes=4, more=["--run-dir", "runs/first"])
    user.wait("first", "running")
    user.submit(*ALWAYS, nodes=3, more=["--run-dir", "runs/second"])
    answer = user.json("why", "second")
    assert answer["state"] == "pending"
    assert "Resources" in answer["why"] or "Priority" in answer["why"]
    rows = user.json("status")
    assert [row["state"] for row in rows] == ["running", "pending"]
    user("cancel", "second")
    assert user.state("second") == "cancelled"
    assert user.state("first") == "running"


def test_what_slurm_takes_but_will_never_start(user):
    user.submit("slurm.partition=spare", nodes=4, more=["--run-dir", "runs/one"])

    def told():
        return "more nodes than its partition gives" in user.json("why", "one")["why"]

    until("the reason", told, timeout_s=WAIT_S)


LEAKS = {
    "AWS_SECRET_ACCESS_KEY": "of-the-shell",
    "GITHUB_TOKEN": "of-the-shell",
    "BASH_ENV": "/dev/null",
    "HOLDFAST_GENERATION": "7",
    "SRUN_CPUS_PER_TASK": "3",
    "SLURM_CPU_BIND": "cores",
    "SBATCH_REQUEUE": "1",
    "LC_ALL": "C.UTF-8",
}


def test_only_what_is_named_of_the_submitting_shell_reaches_the_workers(user, slurm, monkeypatch):
    for name, value in LEAKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDED_PROJECT", "mine")
    monkeypatch.setenv("LANG", "C.UTF-8")
    wanted = ("env.inherit=[WANDED_PROJECT]", "env.variables={SET: here}")
    user.submit(*ALWAYS, *wanted, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 2)["job_id"]
    record = RunRecord(Path("runs/one"))
    record.poll()
    started = next(e for e in record.events if e.event == "worker.started")
    listed = slurm.on(started.node, "cat", f"/proc/{started.fields['pid']}/environ").stdout
    found = dict(line.split("=", 1) for line in listed.split("\0") if line)
    assert found.keys() & {*LEAKS, "SLURM_TIME_FORMAT"} <= {"SLURM_CPU_BIND"}
    assert found.get("SLURM_CPU_BIND") != "cores"
    assert (found["WANDED_PROJECT"], found["SET"], found["LANG"]) == ("mine", "here", "C.UTF-8")
    assert (found["HOME"], found["PYTHONPATH"]) == (os.environ["HOME"], str(ROOT))
    steps = slurm.run("squeue", "--steps", "-h", f"--jobs={job}", "-o", "%i").stdout.split()
    own = [step for step in steps if step.rpartition(".")[2].isdigit()]
    assert len(own) == 2, "one for each node"
    for step in own:
        told = slurm.run("scontrol", "show", "step", step).stdout
        assert "CPUs=16 " in told, told


def test_a_controller_that_is_away(user, slurm):
    user.submit(*ALWAYS, more=["--run-dir", "runs/one"])
    user.wait("one", "running")
    seen, state = time.time(), slurm.dir / "state" / "job_state"
    # What it has not written down yet it would not know any more.
    until("the state is written", lambda: state.stat().st_mtime > seen, timeout_s=60)
    user.wait_step("one", 2)  # srun, which asks the controller too, has started the agents
    slurm.kill_controller()
    try:
        found = user.json("status", "one")
        assert found["state"] == "unknown", found
        assert "does not answer" in found["platform"]["reason"]
    finally:
        slurm.start_controller()

    def answer():
        found = user.json("status", "one")
        assert found["state"] in {"unknown", "running"}, found
        return found["state"] == "running"

    until("an answer", answer, timeout_s=60)


def test_a_sweep_has_a_run_for_each_task(user, slurm):
    out, _ = user.submit(
        nodes=1, more=["--sweep", "train.optimizer.lr=1e-3,3e-3", "--run-dir", "runs/lr"]
    )
    assert ", 2 tasks: " in out
    for task in ("lr/0", "lr/1"):
        found = user.wait(f"runs/{task}", "done")
        assert found["training"]["step"] == 6
    rows = user.json("list")
    assert [row["state"] for row in rows] == ["done", "done"]
    losses = [row["training"]["loss"] for row in rows]
    assert losses[0] != losses[1]
    assert "n1/0: -- step 6" in user("logs", "runs/lr/0")[0]


def test_cancelling_a_task_that_waits_with_others(user, slurm):
    """Slurm forgets it at once, and has no accounts here that would tell."""
    sweep = ["--sweep", "train.optimizer.lr=1e-3,3e-3,5e-3,7e-3", "--run-dir", "runs/lr"]
    user.submit(*ALWAYS, nodes=4, more=sweep)
    user.wait("runs/lr/0", "running")
    began = time.monotonic()
    out, _ = user("cancel", "runs/lr/2")
    assert time.monotonic() - began < 60, "not the time in which a job ends"
    assert "is over: cancelled, nothing is saved" in out
    assert user.state("runs/lr/2") == "cancelled"
    assert user.state("runs/lr/3") == "pending"


def test_a_script_that_was_submitted_by_hand(user, slurm):
    Path("job.yaml").write_text(job_text(nodes=2, steps=1_000_000))
    user("render", "job.yaml", "--to", "slurm", "-o", "runs/one")
    assert "never started" in user("status", "one")[0]
    job = slurm.sbatch(Path("runs/one/job.sbatch").absolute(), env=dict(os.environ))
    found = user.wait_step("one", 2)
    assert (found["target"], found["job_id"], found["state"]) == ("slurm", job, "running")
    out, _ = user("cancel", "one", "--save")
    assert "one is over: saved, saved: step " in out
    user("submit", "--resume", "one")
    found = user.wait_step("one", found["training"]["step"] + 1)
    assert found["job_id"] != job
