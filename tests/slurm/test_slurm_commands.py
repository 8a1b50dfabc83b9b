"""The commands of the launcher on a real Slurm: submit, status, why, logs, cancel, sweeps."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from cluster import until
from jobs import ALWAYS, ROOT, WAIT_S, job_text

from launcher.record.files import workers_of
from launcher.runs.checkpoints.commits import RunCheckpoints

pytestmark = pytest.mark.timeout(400)


@pytest.mark.scenario
def test_a_job_from_submit_to_its_end(user, slurm):
    Path("job.yaml").write_text(job_text(nodes=2, steps=6))
    out, _ = user("check", "job.yaml", "--to", "slurm", "--live")
    assert "on n[1-2]" in out
    out, _ = user.submit(more=["--run-dir", "runs/one"])
    assert "slurm job " in out
    found = user.wait("one", "done")
    assert (found["platform"]["code"], found["training"]["step"]) == (0, 6)
    assert found["platform"]["source"] in {"squeue", "scontrol"}
    assert found["platform"]["submitted"] == pytest.approx(time.time(), abs=WAIT_S)
    assert user.json("why", "one")["state"] == "done"
    out, _ = user("logs", "one")
    assert "n1/0: -- step 6, loss " in out
    assert "job: " in out
    sections = user.json("describe", "one")
    assert sections["slurm"]["JobState"] == "COMPLETED"
    assert sections["slurm"]["StartTime"].startswith(time.strftime("%Y-"))
    assert sections["job"]["name"] == "tiny"
    texts = [text.split("  ")[1] for text in sections["platform events"]]
    assert [text.split()[0] for text in texts] == ["queued", "started", "ended"]
    assert "COMPLETED" in texts[-1]
    assert user.json("submit", "--resume", "one")["job_id"] is None
    summary = json.loads(Path("runs/one/summary.json").read_text())
    assert (summary["code"], summary["steps"], summary["samples_lost"]) == (0, 6, 0)
    assert Path(user("report", "one")[0].strip()).name == "report.html"
    [log] = Path("runs/one/logs").glob("slurm-*.out")
    assert "cpu binding" not in log.read_text()
    [row] = user.json("list")
    assert row["state"] == "done"


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


def test_a_job_of_a_shell_with_secrets_is_saved_cancelled_and_resumed(user, slurm, monkeypatch):
    """Of the shell only what is named reaches the workers."""
    for name, value in LEAKS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDED_PROJECT", "mine")
    monkeypatch.setenv("LANG", "C.UTF-8")
    wanted = ("env.inherit=[WANDED_PROJECT]", "env.variables={SET: here}")
    user.submit(*ALWAYS, *wanted, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 3)["job_id"]
    [worker, *_] = workers_of(Path("runs/one")).values()
    listed = slurm.on(worker.node, "cat", f"/proc/{worker.pid}/environ").stdout
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

    restarts = slurm.job(job).restarts
    out, _ = user("cancel", "one", "--save")
    [commit] = RunCheckpoints.of(Path("runs/one")).commits
    assert f"step {commit.step}" in out
    assert commit.step >= 3
    found = user.json("status", "one")
    assert (found["state"], found["platform"]["code"], found["job_id"]) == ("saved", 91, job)
    assert slurm.job(job).restarts == restarts, "nothing has put it back into the queue"
    user("submit", "--resume", "one")
    found = user.wait_step("one", commit.step + 1)
    assert found["job_id"] != job
    user("cancel", "one")
    assert user.state("one") == "cancelled"
    assert f"from step {commit.step} " in user("logs", "one")[0]


def test_what_slurm_refuses_leaves_nothing_behind(user):
    refused = {
        "slurm.partition=moon": "HF652 slurm.partition: ",
        "slurm.gres=gpu:16": "HF681 slurm.gres: ",
        "slurm.gres=fpga:1": "HF681 slurm.gres: ",
        "slurm.constraint=nosuch": "HF681 slurm.constraint: ",
        "slurm.reservation=nosuch": "HF652 slurm.reservation: ",
        "slurm.cpus=32": "HF681 slurm.cpus: ",
        # Those it takes, and never starts.
        "slurm.partition=spare": "HF680 cluster.nodes: ",
        "cluster.spares=1": "HF680 cluster.nodes: ",
        "slurm.exclude=[n1]": "HF680 cluster.nodes: ",
    }
    for text, told in refused.items():
        _, err = user.submit(text, nodes=4, code=2)
        assert told in err, err
        _, err = user("check", "job.yaml", "--to", "slurm", "--live", "--set", text, code=2)
        assert told.partition(" ")[0] in err
    assert not Path("runs").exists()
    _, err = user.submit("slurm.partition=spare", "cluster.nodes=1", "slurm.time=11", code=2)
    assert "HF682 slurm.time: " in err
    assert "main" in err, "a partition that would do"


def test_jobs_and_tasks_of_a_sweep_wait_are_cancelled_and_run(user, slurm):
    user.submit(*ALWAYS, nodes=4, more=["--run-dir", "runs/first"])
    user.wait("first", "running")
    user.submit(*ALWAYS, nodes=3, more=["--run-dir", "runs/second"])
    answer = user.json("why", "second")
    assert answer["state"] == "pending"
    assert "Resources" in answer["why"] or "Priority" in answer["why"]
    assert [row["state"] for row in user.json("status")] == ["running", "pending"]
    user("cancel", "second")
    assert user.state("second") == "cancelled"

    sweep = ["--sweep", "train.optimizer.lr=1e-3,3e-3,5e-3", "--run-dir", "runs/lr"]
    out, _ = user.submit(nodes=2, more=sweep)
    assert ", 3 tasks: " in out
    began = time.monotonic()
    user("cancel", "runs/lr/1")  # Slurm forgets it at once, and has no accounts that would tell
    assert time.monotonic() - began < 60, "not the time in which a job ends"
    states = [user.state(f"runs/lr/{task}") for task in range(3)]
    assert states == ["pending", "cancelled", "pending"]
    assert user.state("first") == "running"

    user("cancel", "first")
    for task in (0, 2):
        assert user.wait(f"runs/lr/{task}", "done")["training"]["step"] == 6
    losses = [row["training"]["loss"] for row in user.json("list") if row["state"] == "done"]
    assert len(set(losses)) == 2
    assert "0: -- step 6" in user("logs", "runs/lr/0")[0]


@pytest.mark.slow
def test_a_job_submitted_by_hand_and_a_controller_that_is_away(user, slurm):
    Path("job.yaml").write_text(job_text(nodes=2, steps=1_000_000))
    user("render", "job.yaml", "--to", "slurm", "-o", "runs/one")
    assert "never started" in user("status", "one")[0]
    job = slurm.sbatch(Path("runs/one/job.sbatch").absolute(), env=dict(os.environ))
    slurm.wait_state(job, "RUNNING")
    seen, state = time.time(), slurm.dir / "state" / "job_state"
    found = user.wait_step("one", 2)  # srun, which asks the controller too, has started the agents
    assert (found["target"], found["job_id"], found["state"]) == ("slurm", job, "running")

    # What it has not written down yet it would not know any more.
    until("the state is written", lambda: state.stat().st_mtime > seen, timeout_s=60)
    slurm.kill_controller()
    try:
        found = user.json("status", "one")
        assert found["state"] == "unknown", found
        assert found["platform"]["reason"]
    finally:
        slurm.start_controller()

    def answer():
        found = user.json("status", "one")
        assert found["state"] in {"unknown", "running"}, found
        return found["state"] == "running"

    until("an answer", answer, timeout_s=60)
    user("cancel", "one", "--save")
    saved = user.json("status", "one")
    assert (saved["state"], saved["platform"]["code"]) == ("saved", 91)
    user("submit", "--resume", "one")
    found = user.wait_step("one", saved["training"]["saved_step"] + 1)
    assert found["job_id"] != job
