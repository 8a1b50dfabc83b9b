"""Jobs that end before the run does, on a real Slurm: at the limit, in a chain, asked to save."""

from __future__ import annotations

import pytest
from jobs import STEPS, make_run

pytestmark = pytest.mark.timeout(400)


def ask_to_save(slurm, job):
    """Send the batch shell the signal of the time limit."""
    slurm.run("scancel", "--signal=USR2", "--batch", job)


def check_saved_where_it_stopped(run):
    """See that the second attempt went on from the last step of the first."""
    second = run.events("run.started")[1]["t_unix"]
    resumed = next(e for e in run.events("trainer.started") if e["t_unix"] > second)
    done = [e["step"] for e in run.events("step.completed") if e["t_unix"] < second]
    assert resumed["resume_step"] == max(done), "saved at the step it was stopped at"


def test_asked_to_save_it_requeues_itself_and_finishes(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=STEPS, nodes=2)
    job = run.submit()
    run.wait_step(4)
    ask_to_save(slurm, job)
    assert run.ended(job, "COMPLETED").restarts == 1
    run.check_done(plain, STEPS)
    assert [event["code"] for event in run.events("run.ended")] == [91, 0]
    check_saved_where_it_stopped(run)
