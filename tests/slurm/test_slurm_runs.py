"""A run on a real Slurm that loses nodes: a spare takes a place, then fewer go on."""

from __future__ import annotations

import time

import pytest
from jobs import LOSS_REL, make_run

from launcher.record import stop_request


@pytest.mark.timeout(400)
def test_a_spare_takes_the_place_of_a_lost_node_and_without_one_the_others_go_on(
    slurm, plain, tmp_path
):
    sets = ("cluster.spares=1", "elastic.min_nodes=2")
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3, sets=sets)
    job = run.submit()
    run.wait_step(4)
    before = slurm.job(job)
    assert before.nodes == "n[1-4]"
    members = run.events("epoch.formed")[0]["members"]
    assert len(members) == 3
    (spare,) = set(slurm.names) - set(members)

    lost = min({*members} - {before.batch_host})
    slurm.power_off(lost)
    with_spare = sorted({*members, spare} - {lost})
    epoch = run.until("the spare takes part", lambda: trains(run, with_spare))
    first = min(e["step"] for e in run.events("step.completed") if e["epoch"] == epoch)
    committed = max(e["step"] for e in run.events("step.committed") if e["epoch"] == 1)
    assert first > committed, "no committed step is done again"

    lost = min({*with_spare} - {before.batch_host})
    slurm.power_off(lost)
    left = sorted({*with_spare} - {lost})
    run.until("two nodes go on", lambda: trains(run, left))

    stop_request.ask(run.path, why="test", t_unix=time.time())
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    ended = run.ended(job, "FAILED")
    assert (ended.exit_code, ended.restarts) == (91, 0)
    assert run.events("checkpoint.committed")[-1]["step"] == run.step()
    assert slurm.run("squeue", "-h").stdout == "", "it stays stopped"
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)
    curve = run.losses()
    for step in curve.keys() & plain.keys():
        assert curve[step] == pytest.approx(plain[step], rel=LOSS_REL), step


def trains(run, members):
    """Return the newest epoch of `members` once a step of it is committed: all have it twice."""
    formed = run.events("epoch.formed")[-1]
    done = [e for e in run.events("step.committed") if e["epoch"] == formed["epoch"]]
    return formed["epoch"] if sorted(formed["members"]) == members and done else None
