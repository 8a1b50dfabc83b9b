"""Jobs that Slurm stops for a while, and nodes that are back before it has missed them."""

from __future__ import annotations

import time

import pytest
from jobs import STEPS, make_run

pytestmark = pytest.mark.timeout(400)


def suspended_for(slurm, run, job, seconds):
    """Suspend the job, see that its processes are stopped for so long, resume it."""
    slurm.run("scontrol", "suspend", job)
    names = run.events("epoch.formed")[0]["members"]
    stopped = ("pgrep", "--runstates", "T", "-f", "elastic_trainer.agent")

    def all_stopped():  # SIGSTOP comes two seconds after SIGTSTP
        return all(slurm.on(name, *stopped, check=False).returncode == 0 for name in names)

    run.until("all are stopped", all_stopped)
    begun, seen = time.monotonic(), run.step()
    run.until("the time is over", lambda: time.monotonic() - begun >= seconds, seconds + 60)
    assert all_stopped()
    assert run.step() <= seen + 1, "it trains though it is suspended"  # a line under way
    slurm.run("scontrol", "resume", job)


def check_unnoticed(slurm, run, job):
    seen = run.step()
    run.wait_step(seen + 6)
    assert len(run.events("epoch.formed")) == 1
    assert run.events("member.lost") == run.events("worker.hung") == []
    assert run.events("worker.stalled") == []
    assert len(run.events("coordinator.elected")) == 1
    assert slurm.job(job).state == "RUNNING"
    assert slurm.job(job).restarts == 0
    account = run.audit()
    assert (account.lost, account.repeated, account.steps_redone) == (0, 0, 0)


def test_a_job_that_is_suspended_and_resumed_does_not_notice(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3)
    job = run.submit()
    run.wait_step(4)
    suspended_for(slurm, run, job, 12.0)  # three times dead_after_s
    check_unnoticed(slurm, run, job)


@pytest.mark.slow  # longer than any limit on hangs
def test_a_job_that_is_suspended_for_long_does_not_notice(slurm, tmp_path):
    sets = ("elastic.hang_ceiling_s=20",)
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3, sets=sets)
    job = run.submit()
    run.wait_step(4)
    suspended_for(slurm, run, job, 80.0)
    check_unnoticed(slurm, run, job)


def test_a_node_that_reboots_takes_no_other_with_it_and_comes_back(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3, sets=("checkpoint.every_steps=null",))
    job = run.submit()
    run.wait_step(4)
    before = slurm.job(job)
    names = run.events("epoch.formed")[0]["members"]
    lost = next(name for name in names if name != before.batch_host)
    slurm.power_off(lost)
    slurm.power_on(lost)

    def comes_back():
        formed = run.events("epoch.formed")
        return len(formed) >= 3 and sorted(formed[-1]["members"]) == sorted(names)

    run.until("it trains with the others again", comes_back)
    run.wait_step(run.step() + 3)
    [event] = run.events("step.lost")
    assert (event["nodes"], event["alone"]) == ([lost], False)
    agents = [event["node"] for event in run.events("agent.started")]
    assert sorted(agents) == sorted([*names, lost]), "the others' agents live on"
    assert slurm.job(job).restarts == 0
    # Nobody had a checkpoint to go back to: it was all in the others' memory.
    assert run.events("checkpoint.committed") == []
    assert {e["restored_from"] for e in run.events("trainer.started")} <= {"memory", None}
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)
    curve = run.losses()
    for step in curve.keys() & plain.keys():
        assert curve[step] == pytest.approx(plain[step], rel=2e-5), step


@pytest.mark.slow
def test_when_every_node_reboots_it_goes_on_from_storage_in_its_allocation(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3)
    job = run.submit()
    run.wait_step(STEPS)
    saved = max(e["step"] for e in run.events("checkpoint.committed"))
    host = slurm.job(job).batch_host
    for name in (name for name in slurm.names[:3] if name != host):
        slurm.power_off(name)
        slurm.power_on(name)
    # The batch script lives, its own node's agent does not.
    slurm.on(host, "pkill", "-KILL", "-f", "launcher.node agent")
    run.until("all are lost", lambda: any(e["alone"] for e in run.events("step.lost")))
    lost_at = run.events("step.lost")[-1]["t_unix"]
    run.until(
        "it trains again",
        lambda: any(e["t_unix"] > lost_at for e in run.events("step.completed")),
    )
    started = next(e for e in run.events("trainer.started") if e["t_unix"] > lost_at)
    assert started["restored_from"] == "storage"
    assert started["resume_step"] >= saved
    assert slurm.job(job).restarts == 0
    said = (run.path / "logs" / f"slurm-{job}.out").read_text()
    assert "no agent is left, so storage counts: the newest checkpoint is of step" in said
