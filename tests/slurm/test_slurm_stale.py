"""What goes on running where Slurm cannot end it, on a real Slurm: it must not count."""

from __future__ import annotations

import time

import pytest
from jobs import make_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

OURS = "elastic_trainer"
"""In the command lines of agents, zygotes and workers."""
WRITES = ("step.completed", "step.committed", "checkpoint.committed")


def signal_ours(slurm, node, name):
    """Send a signal to a node's agent and workers; their parent, which Slurm knows, is not ours."""
    slurm.on(node, "pkill", f"-{name}", "-f", OURS)


def runs_ours(slurm, node):
    return slurm.on(node, "pgrep", "-f", f"{OURS}.agent", check=False).returncode == 0


def next_attempt_trains(run):
    """Return whether steps are done in an epoch of the second attempt."""
    begun = [event["t_unix"] for event in run.events("run.started")]
    return len(begun) > 1 and any(e["t_unix"] > begun[1] for e in run.events("step.completed"))


def check_next_attempt(run, unheard):
    """See that the second attempt went on from the first one's last step, on other nodes."""
    second = run.events("run.started")[1]["t_unix"]
    formed = next(e for e in run.events("epoch.formed") if e["t_unix"] > second)
    assert unheard not in formed["members"]
    resumed = next(e for e in run.events("trainer.started") if e["t_unix"] > second)
    done = [e["step"] for e in run.events("step.completed") if e["t_unix"] < second]
    assert resumed["resume_step"] == max(done)
    epochs = [e["epoch"] for e in run.events("checkpoint.committed")]
    assert epochs == sorted(epochs)
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)


def test_requeued_from_outside_it_saves_first_also_where_slurmd_is_dead(slurm, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=2, sets=("checkpoint.every_steps=2",))
    job = run.submit()
    run.wait_step(4)
    host = slurm.job(job).batch_host
    # Not always n1 and n2: one of them may still be ending the job of the test before.
    unheard = next(name for name in run.events("epoch.formed")[-1]["members"] if name != host)
    slurm.kill_slurmd(unheard)  # Slurm can signal nothing there any more
    slurm.run("scontrol", "requeue", job)
    run.until("the next attempt trains", lambda: next_attempt_trains(run))
    exits = run.until(
        "its peers told it",
        lambda: [e for e in run.events("agent.exit") if e["node"] == unheard],
    )
    assert [e["code"] for e in exits] == [91]
    check_next_attempt(run, unheard)


def test_a_node_that_was_cut_off_and_frozen_commits_nothing_when_it_goes_on(slurm, plain, tmp_path):
    run = make_run(slurm, tmp_path, steps=10**6, nodes=3)
    job = run.submit()
    run.wait_step(4)
    host = slurm.job(job).batch_host
    names = run.events("epoch.formed")[-1]["members"]
    assert len(names) == 3
    lone = next(name for name in names if name != host)
    others = sorted(set(names) - {lone})
    slurm.link(lone, up=False)
    signal_ours(slurm, lone, "STOP")

    def epoch_of_the_others():
        formed = [e for e in run.events("epoch.formed") if sorted(e["members"]) == others]
        done = {e["epoch"] for e in run.events("step.completed")}
        return next((e["epoch"] for e in formed if e["epoch"] in done), None)

    epoch = run.until("the others go on", epoch_of_the_others)
    [*_, [pid]] = [e["pids"] for e in run.events("workers.started") if e["node"] == lone]
    woken = time.time()
    signal_ours(slurm, lone, "CONT")  # it still has the storage, and its workers a step to end
    run.until(
        "its worker has ended",
        lambda: slurm.on(lone, "test", "-d", f"/proc/{pid}", check=False).returncode,
    )
    assert runs_ours(slurm, lone), "the agent itself goes on, and seeks its peers"
    seen = run.step()
    run.wait_step(seen + 5)
    written = [(name, e) for name in WRITES for e in run.events(name)]
    assert [(name, e) for name, e in written if e["node"] == lone and e["t_unix"] > woken] == []
    assert max(e["epoch"] for _, e in written) >= epoch
    formed = run.events("epoch.formed")
    assert all(len(e["members"]) > 1 for e in formed), "alone it forms no epoch"
    assert slurm.job(job).restarts == 0
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)
    curve = run.losses()
    for step in curve.keys() & plain.keys():
        assert curve[step] == pytest.approx(plain[step], rel=2e-5), step
