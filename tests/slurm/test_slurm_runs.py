"""Runs on a real Slurm of several nodes: they finish, lose nodes, come back by themselves."""

from __future__ import annotations

import pytest
from jobs import STEPS, make_run

from launcher import stop_request

pytestmark = pytest.mark.timeout(400)


def test_a_job_of_four_nodes_trains_and_finishes(plain):
    assert len(plain) == STEPS


def test_a_node_without_power_is_left_out_and_training_goes_on_in_the_allocation(
    slurm, plain, tmp_path
):
    run = make_run(slurm, tmp_path, steps=STEPS)
    job = run.submit()
    run.wait_step(4)
    before = slurm.job(job)
    lost = next(name for name in slurm.names if name != before.batch_host)
    slurm.power_off(lost)
    ended = run.ended(job, "COMPLETED")
    assert ended.restarts == 0
    run.check_done(plain, STEPS)
    formed = run.events("epoch.formed")
    assert lost in formed[0]["members"]
    assert lost not in formed[-1]["members"]
    assert len(formed[-1]["members"]) == 3
    first = min(e["step"] for e in run.events("step.completed") if e["epoch"] > 1)
    committed = max(e["step"] for e in run.events("step.committed") if e["epoch"] == 1)
    assert first > committed, "no committed step is done again"


def test_a_spare_of_the_allocation_takes_the_place_of_a_lost_node(slurm, plain, tmp_path):
    sets = ("cluster.spares=1", "elastic.min_nodes=3")  # it cannot go on with two
    run = make_run(slurm, tmp_path, steps=STEPS, nodes=3, sets=sets)
    job = run.submit()
    run.wait_step(4)
    before = slurm.job(job)
    assert before.nodes == "n[1-4]"
    members = run.events("epoch.formed")[0]["members"]
    assert len(members) == 3
    (spare,) = set(slurm.names) - set(members)
    lost = next(name for name in members if name != before.batch_host)
    slurm.power_off(lost)
    assert run.ended(job, "COMPLETED").restarts == 0
    run.check_done(plain, STEPS)
    last = run.events("epoch.formed")[-1]["members"]
    assert sorted(last) == sorted({*members, spare} - {lost})


def test_a_job_whose_batch_host_is_lost_comes_back_by_itself(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=STEPS, nodes=3)
    job = run.submit()
    run.wait_step(4)
    host = slurm.job(job).batch_host
    slurm.power_off(host)
    # The others finish the run; then one of them has the job started again, to end it.
    ended = run.ended(job, "COMPLETED")
    assert ended.restarts == 1
    run.check_done(plain, STEPS)
    assert (run.path / "attempts" / f"{job}.0" / "caretaker.0").read_text().strip() != host


@pytest.mark.slow  # what test_slurm_commands.py has `holdfast cancel --save` do, by hand
def test_cancelled_with_save_it_leaves_a_checkpoint_and_stays_stopped(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2)
    job = run.submit()
    run.wait_step(4)
    stop_request.ask(run.path, why="test", t_unix=0.0)
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    assert run.ended(job, "FAILED").exit_code == 91
    saved = run.events("checkpoint.committed")
    assert saved[-1]["step"] == run.step()
    assert slurm.run("squeue", "-h").stdout == ""


def test_a_second_job_of_a_live_run_names_the_first_and_exits_with_93(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2)
    job = run.submit()
    run.wait_step(2)
    second = run.submit()
    assert run.ended(second, "FAILED").exit_code == 93
    said = (run.path / "logs" / f"slurm-{second}.out").read_text()
    assert f"live in job {job}.0" in said
    assert slurm.job(job).state == "RUNNING"


def test_two_jobs_on_the_same_nodes_do_not_take_each_others_ports(slurm, plain, tmp_path):
    shared = ("slurm.exclusive=false", "slurm.mem=100M", "slurm.cpus=1")
    runs = [
        make_run(slurm, tmp_path / name, steps=STEPS, nodes=2, sets=shared) for name in ("a", "b")
    ]
    jobs = [run.submit("-w", "n1,n2") for run in runs]
    runs[0].until("both run", lambda: all(slurm.job(job).state == "RUNNING" for job in jobs))
    for run, job in zip(runs, jobs, strict=True):
        run.ended(job, "COMPLETED")
        run.check_done(plain, STEPS)
        ports = {event["port"] for event in run.events("agent.started")}
        assert ports <= set(range(29400, 29500))
