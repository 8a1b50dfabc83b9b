"""What is wrong with a job on a real Slurm is told by status and why, and a restart mends it."""

from __future__ import annotations

import pytest
from cluster import until
from jobs import WAIT_S
from test_slurm_commands import ALWAYS, user

__all__ = ["user"]  # fixture

pytestmark = pytest.mark.timeout(400)


def kinds(user):
    return [finding["kind"] for finding in user.json("status", "one")["findings"]]


def told(user, kind):
    """Wait until a kind of finding is told; return its text and way out."""

    def look():
        found = user.json("why", "one")["findings"]
        return next((each for each in found if each["kind"] == kind), None)

    found = until(f"{kind} is told", look, timeout_s=WAIT_S, every_s=0.5)
    return found["text"], found["way_out"] or ""


def test_a_suspended_job(user, slurm):
    user.submit(*ALWAYS, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 2)["job_id"]
    assert kinds(user) == []
    assert "nothing is wrong" in user("why", "one")[0]
    slurm.run("scontrol", "suspend", job)
    _, way_out = told(user, "suspended")
    assert f"scontrol resume {job}" in way_out
    assert user("why", "one")[0].startswith("it is suspended: ")
    assert "HF662" in user("restart", "one", code=2)[1]
    user("cancel", "one")


def test_lost_nodes_and_a_restart_on_all_of_them(user, slurm):
    user.submit(*ALWAYS, nodes=4, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 2)["job_id"]
    slurm.power_off("n4")
    text, way_out = told(user, "nodes_lost")
    assert text == "3 of 4 nodes: n4 is lost"
    until(
        "Slurm takes it from the job",
        lambda: user.json("status", "one")["platform"]["nodes_lost"] == ["n4"],
        timeout_s=WAIT_S,
    )
    text, way_out = told(user, "nodes_lost")
    assert text == "3 of 4 nodes: n4 is lost"
    assert "holdfast restart one" in way_out
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
    user("cancel", "one")
