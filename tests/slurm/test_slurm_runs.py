"""Runs on a real Slurm of several nodes: they finish, lose nodes, come back by themselves."""

from __future__ import annotations

import pytest
from jobs import make_run

from launcher import stop_request

STEPS = 24

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def plain(slurm_session, tmp_path_factory):
    """Step -> loss of an undisturbed run on four nodes."""
    run = make_run(slurm_session, tmp_path_factory.mktemp("plain"), steps=STEPS)
    job = run.submit()
    run.ended(job, "COMPLETED")
    curve = run.losses()
    run.check_done(curve, STEPS)
    assert {event["code"] for event in run.events("agent.exit")} == {0}
    assert [event["code"] for event in run.events("run.ended")] == [0]
    return curve


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


def test_asked_to_save_it_requeues_itself_and_finishes(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=STEPS, nodes=2)
    job = run.submit()
    run.wait_step(4)
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    assert run.ended(job, "COMPLETED").restarts == 1
    run.check_done(plain, STEPS)
    assert [event["code"] for event in run.events("run.ended")] == [91, 0]
    second = run.events("run.started")[1]["t_unix"]
    resumed = next(e for e in run.events("trainer.started") if e["t_unix"] > second)
    done = [e["step"] for e in run.events("step.completed") if e["t_unix"] < second]
    assert resumed["resume_step"] == max(done), "saved at the step it was stopped at"


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


@pytest.mark.slow
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


def test_requeued_from_outside_it_saves_first_also_where_slurmd_is_dead(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2, sets=("checkpoint.every_steps=2",))
    job = run.submit()
    run.wait_step(4)
    host = slurm.job(job).batch_host
    unheard = next(name for name in slurm.names[:2] if name != host)
    slurm.kill_slurmd(unheard)  # Slurm can signal nothing there any more
    slurm.run("scontrol", "requeue", job)
    run.until("the next attempt trains", lambda: next_attempt_trains(run))
    check_next_attempt(run, unheard)


def next_attempt_trains(run):
    """Return whether steps are done in an epoch of the second attempt."""
    begun = [event["t_unix"] for event in run.events("run.started")]
    return len(begun) > 1 and any(e["t_unix"] > begun[1] for e in run.events("step.completed"))


def check_next_attempt(run, unheard):
    """See that the first attempt ended on all nodes, and the second went on from its last step."""
    second = run.events("run.started")[1]["t_unix"]
    first = [e for e in run.events("agent.exit") if e["t_unix"] < second]
    assert {e["code"] for e in first} == {91}
    assert unheard in {e["node"] for e in first}, "its peers told it"
    formed = next(e for e in run.events("epoch.formed") if e["t_unix"] > second)
    assert unheard not in formed["members"]
    resumed = next(e for e in run.events("trainer.started") if e["t_unix"] > second)
    done = [e["step"] for e in run.events("step.completed") if e["t_unix"] < second]
    assert resumed["resume_step"] == max(done)
    epochs = [e["epoch"] for e in run.events("checkpoint.committed")]
    assert epochs == sorted(epochs)
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)


@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_at_the_time_limit_it_saves_requeues_and_finishes(slurm, plain, tmp_path):
    times = ("slurm.time=2", "slurm.save_s=20", "slurm.shutdown_s=30", "slurm.signal_lead_s=100")
    steps = 600
    run = make_run(slurm, tmp_path, steps=steps, nodes=2, sets=times)
    job = run.submit()
    ended = run.ended(job, "COMPLETED", timeout_s=1500)
    assert ended.restarts >= 1
    run.check_done(plain, steps)
    codes = [event["code"] for event in run.events("run.ended")]
    assert codes[-1] == 0
    assert set(codes[:-1]) == {91}
