"""Jobs that end before the run does, on a real Slurm: at the limit, in a chain, asked to save."""

from __future__ import annotations

import json

import pytest
from jobs import STEPS, make_run

pytestmark = pytest.mark.timeout(400)


def ask_to_save(slurm, job):
    """Send the batch shell the signal of the time limit."""
    slurm.run("scancel", "--signal=USR2", "--batch", job)


def few_more_steps(run):
    """Once its first attempt has ended, have the run end soon; return its number of steps.

    So any machine, however fast or slow, is asked in time and comes to the end.
    """
    run.until("the first attempt has ended", lambda: run.events("run.ended"))
    steps = run.step() + STEPS
    path = run.path / "job.json"
    config = json.loads(path.read_text())
    config["train"]["steps"] = steps
    path.write_text(json.dumps(config))
    return steps


def check_saved_where_it_stopped(run):
    """See that the second attempt went on from the last step of the first."""
    second = run.events("run.started")[1]["t_unix"]
    resumed = next(e for e in run.events("trainer.started") if e["t_unix"] > second)
    done = [e["step"] for e in run.events("step.completed") if e["t_unix"] < second]
    assert resumed["resume_step"] == max(done), "saved at the step it was stopped at"


@pytest.mark.slow  # as at the time limit, where Slurm sends the signal
def test_asked_to_save_it_requeues_itself_and_finishes(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2)
    job = run.submit()
    run.wait_step(4)
    ask_to_save(slurm, job)
    steps = few_more_steps(run)
    assert run.ended(job, "COMPLETED").restarts == 1
    run.check_done(plain, steps)
    assert [event["code"] for event in run.events("run.ended")] == [91, 0]
    check_saved_where_it_stopped(run)


def test_at_the_time_limit_it_saves_requeues_and_finishes(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2)
    job = run.submit()
    run.wait_step(2)
    # Slurm looks at the limits twice a minute. The lead is 500 s: now it is time to save.
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=9")
    steps = few_more_steps(run)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    assert run.ended(job, "COMPLETED").restarts == 1
    run.check_done(plain, steps)
    assert [event["code"] for event in run.events("run.ended")] == [91, 0]
    check_saved_where_it_stopped(run)


def test_a_chain_goes_on_in_a_job_that_was_queued_beforehand(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2, sets=("slurm.restart=chain",))
    first = run.submit()
    run.wait_step(4)
    second = (run.path / "attempts" / f"{first}.0" / "next").read_text().strip()
    assert slurm.job(second).reason == "Dependency"
    ask_to_save(slurm, first)
    steps = few_more_steps(run)
    assert run.ended(first, "FAILED").exit_code == 91
    assert run.ended(second, "COMPLETED").restarts == 0
    run.check_done(plain, steps)
    check_saved_where_it_stopped(run)
    third = (run.path / "attempts" / f"{second}.0" / "next").read_text().strip()
    assert run.ended(third, "CANCELLED"), "nothing was left to do for it"
