"""Jobs that end before the run does, on a real Slurm: asked to save, requeued or in a chain."""

from __future__ import annotations

import json

import pytest
from jobs import STEPS, make_run

from launcher.platforms.slurm.parse import expand_nodes, parse_scontrol
from launcher.record.files import LauncherLog


def shorten(run):
    """Have a run end soon whose first attempt has ended; return its number of steps.

    So any machine, however fast or slow, is asked in time and comes to the end.
    """
    steps = run.step() + STEPS
    path = run.path / "job.json"
    config = json.loads(path.read_text())
    config["train"]["steps"] = steps
    path.write_text(json.dumps(config))
    return steps


@pytest.mark.timeout(400)
def test_two_jobs_on_the_same_nodes_save_when_asked_and_go_on_in_the_next(slurm, plain, tmp_path):
    shared = ("slurm.exclusive=false", "slurm.mem=100M", "slurm.cpus=1")
    requeued, chained = runs = [
        make_run(
            slurm,
            tmp_path / how,
            steps=10**6,
            nodes=2,
            # Of one name: a successor waits for its own job alone.
            sets=(*shared, f"slurm.restart={how}"),
        )
        for how in ("requeue", "chain")
    ]
    jobs = [run.submit("-w", "n1,n2") for run in runs]
    for run in runs:
        run.wait_step(4)
    assert all(slurm.job(job).state == "RUNNING" for job in jobs)

    second = requeued.submit()
    assert requeued.ended(second, "FAILED").exit_code == 93
    said = (requeued.path / "logs" / f"slurm-{second}.out").read_text()
    assert f"{jobs[0]}.0" in said, "the live job is named"
    following = (chained.path / "attempts" / f"{jobs[1]}.0" / "next").read_text().strip()
    assert slurm.job(following).reason == "Dependency"

    for job in jobs:  # the signal of the time limit
        slurm.run("scancel", "--signal=USR2", "--batch", job)
    steps = {}

    def both_have_ended():
        for number, run in enumerate(runs):
            if number not in steps and any(e["code"] == 91 for e in run.events("run.ended")):
                steps[number] = shorten(run)
        return len(steps) == 2

    requeued.until("both first attempts have ended", both_have_ended)
    assert requeued.ended(jobs[0], "COMPLETED").restarts == 1
    assert chained.ended(jobs[1], "FAILED").exit_code == 91
    assert chained.ended(following, "COMPLETED").restarts == 0
    last = (chained.path / "attempts" / f"{following}.0" / "next").read_text().strip()
    assert chained.ended(last, "CANCELLED"), "nothing was left to do for it"
    for number, run in enumerate(runs):
        run.check_done(plain, steps[number])
        assert [e["code"] for e in run.events("run.ended") if e["code"] != 93] == [91, 0]
        check_saved_where_it_stopped(run)
        ports = {event["port"] for event in run.events("agent.started")}
        assert ports <= set(range(29400, 29500))


def check_saved_where_it_stopped(run):
    """See that what followed went on from the last step before."""
    ended = run.events("run.ended")
    ended_at = next(e["t_unix"] for e in ended if e["code"] == 91)
    resumed = next(e for e in run.events("trainer.started") if e["t_unix"] > ended_at)
    done = [e["step"] for e in run.events("step.completed") if e["t_unix"] < ended_at]
    assert resumed["resume_step"] == max(done), "saved at the step it was stopped at"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["requeue", "chain"])
def test_what_continues_starts_on_no_machine_that_the_run_has_excluded(slurm, tmp_path, how):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=1, sets=(f"slurm.restart={how}",))
    job = run.submit("--exclude=n4")
    run.wait_step(1)
    bad = slurm.job(job).nodes
    evicted = {"member": bad, "host": bad, "reason": "two failures"}
    LauncherLog(run.path, "test").emit("member.evicted", node=bad, **evicted)
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    run.until("the first attempt has ended", lambda: run.events("run.ended"))
    shorten(run)
    if how == "chain":
        job = (run.path / "attempts" / f"{job}.0" / "next").read_text().strip()
    run.ended(job, "COMPLETED")
    assert slurm.job(job).nodes in {"n1", "n2", "n3"} - {bad}
    [fields] = parse_scontrol(slurm.run("scontrol", "-o", "show", "job", job).stdout)
    assert set(expand_nodes(fields["ExcNodeList"])) == {bad, "n4"}
