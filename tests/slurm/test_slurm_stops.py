"""Nodes and controllers that are back before Slurm, or the job, has missed them."""

from __future__ import annotations

import pytest
from jobs import STEPS, make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_one_node_reboots_then_all_do(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3)
    job = run.submit()
    run.wait_step(STEPS)
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
    assert {e["restored_from"] for e in run.events("trainer.started")} <= {"memory", None}
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)
    curve = run.losses()
    for step in curve.keys() & plain.keys():
        assert curve[step] == pytest.approx(plain[step], rel=2e-5), step

    saved = max(e["step"] for e in run.events("checkpoint.committed"))
    for name in (name for name in names if name != before.batch_host):
        slurm.power_off(name)
        slurm.power_on(name)
    # The batch script lives, its own node's agent does not.
    agent = "^[^ ]+ -P -u -m elastic_trainer.agent "
    slurm.on(before.batch_host, "pkill", "-KILL", "-f", agent)
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


def test_agents_are_started_once_a_controller_is_back_that_srun_found_away(slurm, tmp_path):
    hold = tmp_path / "hold"
    hold.touch()
    sets = (f"slurm.setup=[while test -e {hold}; do sleep 0.1; done]",)
    run = make_run(slurm, tmp_path, steps=2, nodes=1, sets=sets)
    job = run.submit()
    slurm.wait_state(job, "RUNNING")
    log = run.path / "logs" / f"slurm-{job}.out"
    run.until("the script has begun", log.exists)
    slurm.run("scontrol", "shutdown", "slurmctld")  # it writes down what it knows
    try:
        hold.unlink()
        run.until("srun fails twice", lambda: log.read_text().count("controller does not") >= 2)
    finally:
        slurm.start_controller()
    assert run.ended(job, "COMPLETED").restarts == 0
    assert not run.events("step.lost")
