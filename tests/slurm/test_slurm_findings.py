"""What is wrong with a job on a real Slurm is told by status and why, and a restart fixes it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from cluster import until
from jobs import ALWAYS, WAIT_S, submitted_run

from launcher.runs.checkpoints.commits import RunCheckpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def kinds(user):
    return [finding["kind"] for finding in user.json("status", "one")["findings"]]


def told(user, kind):
    """Wait until a kind of finding is told; return its text and how to fix it."""

    def look():
        found = user.json("why", "one")["findings"]
        return next((each for each in found if each["kind"] == kind), None)

    found = until(f"{kind} is told", look, timeout_s=WAIT_S, every_s=0.5)
    return found["text"], found["how_to_fix"] or ""


def test_a_suspended_job_is_told_and_does_not_notice(user, slurm):
    """Suspended for three times dead_after_s, and longer than a hang may last."""
    sets = ("elastic.hang_ceiling_s=10",)
    user.submit(*ALWAYS, *sets, nodes=3, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 4)["job_id"]
    assert kinds(user) == []
    run = submitted_run(slurm, Path("runs/one"))
    names = run.events("epoch.formed")[0]["members"]
    stopped = ("pgrep", "--runstates", "T", "-f", "elastic_trainer.agent")

    def all_stopped():  # SIGSTOP comes two seconds after SIGTSTP
        return all(slurm.on(name, *stopped, check=False).returncode == 0 for name in names)

    slurm.run("scontrol", "suspend", job)
    run.until("all are stopped", all_stopped)
    begun, seen = time.monotonic(), run.step()
    _, how_to_fix = told(user, "suspended")
    assert f"scontrol resume {job}" in how_to_fix
    assert "HF662" in user("restart", "one", code=2)[1]
    run.until("the time is over", lambda: time.monotonic() - begun >= 12.0, 60)
    assert all_stopped()
    assert run.step() <= seen + 1, "it trains though it is suspended"  # a line under way
    slurm.run("scontrol", "resume", job)

    run.wait_step(run.step() + 6)
    assert len(run.events("epoch.formed")) == len(run.events("coordinator.elected")) == 1
    for name in ("member.lost", "worker.hung", "worker.stalled"):
        assert run.events(name) == [], name
    assert (slurm.job(job).state, slurm.job(job).restarts) == ("RUNNING", 0)
    account = run.audit()
    assert (account.lost, account.repeated, account.steps_redone) == (0, 0, 0)


def test_lost_nodes_a_restart_on_all_of_them_and_a_lost_batch_host(user, slurm):
    user.submit(*ALWAYS, nodes=4, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 2)["job_id"]
    slurm.power_off("n4")
    text, how_to_fix = told(user, "nodes_lost")
    assert re.search(r"\b3 of 4\b.*\bn4\b", text)
    until(
        "Slurm takes it from the job",
        lambda: user.json("status", "one")["platform"]["nodes_lost"] == ["n4"],
        timeout_s=WAIT_S,
    )
    text, how_to_fix = told(user, "nodes_lost")
    assert re.search(r"\b3 of 4\b.*\bn4\b", text)
    assert "holdfast restart one" in how_to_fix
    slurm.power_on("n4")
    until(
        "the node is back",
        lambda: "idle" in slurm.run("sinfo", "-hN", "-n", "n4", "-o", "%T").stdout,
        timeout_s=WAIT_S,
    )
    answer = user.json("restart", "one")
    assert (answer["requeued"], answer["job_id"]) == (True, job)

    def whole():
        found = user.json("status", "one")
        training = found["training"]
        trains = training["state"] == "training" and training["step"] > answer["saved_step"]
        return found if trains and len(training["nodes"]) == 4 else None

    found = until("it trains on four nodes again", whole, timeout_s=WAIT_S, every_s=0.5)
    assert (found["job_id"], found["findings"]) == (job, [])
    assert slurm.job(job).restarts == 1

    slurm.power_off(slurm.job(job).batch_host)
    text, _ = told(user, "batch_host_lost")
    assert slurm.job(job).batch_host in text
    assert kinds(user) == ["batch_host_lost", "nodes_lost"]
    seen = user.json("status", "one")["training"]["step"]
    user.wait_step("one", seen + 3)
    begun = time.monotonic()
    out, _ = user("cancel", "one", "--save")
    commit = RunCheckpoints.of(Path("runs/one")).commits[-1]
    assert f"step {commit.step}\n" in out
    assert commit.step >= seen + 3
    # One of the nodes has seen for 30 s that the script is gone, and cancels the job in its place.
    assert time.monotonic() - begun < 120
    assert slurm.run("squeue", "-h").stdout == ""
