"""The fleet's ledger on a real Slurm: what one job finds bad, the next one is kept off."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import pytest
from cluster import until
from jobs import ALWAYS, WAIT_S, Account, submitted_run

from launcher.platforms.slurm.parse import expand_nodes, parse_scontrol
from launcher.record.files import LauncherLog

pytestmark = pytest.mark.timeout(400)


def read_logs(run):
    return "".join(path.read_text() for path in run.glob("logs/**/*.log"))


def kept_off(slurm, job):
    [fields] = parse_scontrol(slurm.run("scontrol", "-o", "show", "job", job).stdout)
    return set(expand_nodes(fields["ExcNodeList"].replace("(null)", "")))


@pytest.mark.slow
def test_the_next_job_is_kept_off_a_machine_that_another_run_found_bad(user, slurm):
    """The strike is in the ledger while the first job still runs."""
    user.submit(*ALWAYS, nodes=1, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 1)["job_id"]
    first = submitted_run(slurm, Path("runs/one"))
    bad = slurm.job(job).nodes
    about = {"member": bad, "host": bad, "reason": "XID 79", "kind": "node_fault"}
    LauncherLog(first.path, "test").emit("member.evicted", node=bad, **about)
    first.until("it is in the ledger", lambda: user.json("nodes", "history"))
    [row] = user.json("nodes", "list")
    assert (row["machine"], row["out"], row["reason"], row["rack"]) == (bad, True, "XID 79", "s1")

    _, err = user.submit(nodes=1, more=["--run-dir", "runs/two"])
    assert "HF188" in err
    assert bad in err
    second = user.wait("two", "done")["job_id"]
    assert kept_off(slurm, second) == {bad}
    assert slurm.job(second).nodes != bad

    user.submit(nodes=4, more=["--run-dir", "runs/four", "--all-nodes"])
    user("cancel", "runs/four")
    assert kept_off(slurm, user.json("status", "four")["job_id"]) == set()
    user("cancel", "one")

    slurm.run("scontrol", "update", f"NodeName={bad}", "State=DRAIN", "Reason=fan")
    [row] = user.json("nodes", "list")
    assert row["platform"].endswith("drain: fan [root@" + row["platform"].partition("[root@")[2])
    slurm.run("scontrol", "update", f"NodeName={bad}", "State=RESUME")
    slurm.wait_idle()
    user("nodes", "release", bad)
    assert user.json("nodes", "list") == []
    assert [each["verdict"] for each in user.json("nodes", "history", bad)] == ["out", "release"]


SHARING = """\
name: shared
command: [train.py]
cluster: {{nodes: 1, gpus_per_node: 1, gpu: cpu, fleet: {place}}}
slurm: {{partition: main, time: 30, shutdown_s: 60, signal_lead_s: 200}}
"""


@pytest.mark.slow
@pytest.mark.parametrize("umasks", [(0o077, 0o022), (0o022, 0o077)])
def test_two_users_share_a_ledger_and_only_the_admin_is_its_operator(user, slurm, umasks):
    """Whatever their umasks; a job writes the ledger while it runs, of nobody's asking."""
    one, two = Account(slurm, "games", umask=umasks[0]), Account(slurm, "news", umask=umasks[1])
    place = Path(mkdtemp(dir=slurm.dir))
    place.chmod(0o1777)
    (place / "operators").mkdir(0o755)
    fleet = ("--fleet", str(place))
    for who in (one, two):
        who.write("job.yaml", SHARING.format(place=place))
    one.write("train.py", "import time; print('begun', flush=True); time.sleep(600)")
    two.write("train.py", "print('trained')")

    first = one.json("submit", "job.yaml", "--run-dir", "run")
    slurm.wait_state(first["job_id"], "RUNNING")
    bad = slurm.job(first["job_id"]).nodes
    run = one.home / "run"
    until("it has begun", lambda: "begun" in read_logs(run), timeout_s=WAIT_S)
    about = {"member": bad, "host": bad, "reason": "XID 79", "kind": "node_fault"}
    LauncherLog(run, "test").emit("member.evicted", node=bad, **about)
    until("it is there", lambda: two.json("nodes", "history", *fleet), timeout_s=WAIT_S)
    assert {each["by"].partition("@")[0] for each in two.json("nodes", "history", *fleet)} == {
        "games"
    }

    done = two.holdfast("submit", "job.yaml", "--run-dir", "run")
    assert "HF188" in done.stderr
    job = two.json("status", "run")["job_id"]
    slurm.wait_state(job, "COMPLETED", timeout_s=WAIT_S)
    assert kept_off(slurm, job) == {bad}
    assert slurm.job(job).nodes != bad

    # What anybody has said anybody can end; the admin's word only the admin.
    one.holdfast("cancel", "run")
    slurm.wait_idle()
    two.holdfast("nodes", "release", bad, *fleet)
    assert one.json("nodes", "list", *fleet) == []
    user("nodes", "exclude", bad, "--reason", "fan", *fleet)
    assert "HF690" in one.holdfast("nodes", "release", bad, "--force", *fleet, code=2).stderr
    [row] = two.json("nodes", "list", *fleet)
    assert (row["machine"], row["out"], row["reason"]) == (bad, True, "fan")
    user("nodes", "release", bad, *fleet)
    assert two.json("nodes", "list", *fleet) == []
    owners = {path.stat().st_uid for path in place.glob("*.json")}
    assert owners == {one.uid, two.uid}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["requeue", "chain"])
def test_what_continues_a_job_is_kept_off_what_the_operator_has_excluded(user, slurm, how):
    user.submit(*ALWAYS, f"slurm.restart={how}", nodes=1, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 1)["job_id"]
    run = submitted_run(slurm, Path("runs/one"))
    bad = slurm.job(job).nodes
    user("nodes", "exclude", bad, "--reason", "fan")
    slurm.run("scancel", "--signal=USR2", "--batch", job)
    run.until("the first attempt has ended", lambda: run.events("run.ended"))
    if how == "chain":
        job = (run.path / "attempts" / f"{job}.0" / "next").read_text().strip()
    run.until("it trains again", lambda: len(run.events("run.started")) == 2)
    assert slurm.job(job).nodes not in {"", bad}
    assert kept_off(slurm, job) == {bad}
    user("cancel", "one")


def test_two_nodes_that_are_drained_leave_and_no_step_is_done_again(user, slurm, plain):
    """One by `holdfast drain`, one by the admin's own command; both while the job runs."""
    user.submit(*ALWAYS, nodes=4, more=["--run-dir", "runs/one"])
    job = user.wait_step("one", 3)["job_id"]
    run = submitted_run(slurm, Path("runs/one"))
    host = slurm.job(job).batch_host
    ours, theirs = [name for name in slurm.names if name != host][:2]
    slurm.run("scontrol", "update", f"NodeName={theirs}", "State=DRAIN", "Reason=new driver")
    told = user.json("drain", ours, "--reason", "fan", "--by", "3m")
    assert (told["left"], told["waiting"]) == ([ours], [])
    run.until("both have left", lambda: len(run.events("member.left")) == 2)

    def given_back():
        return {slurm.state(name) for name in (ours, theirs)} == {"drained"}

    run.until("Slurm may have them", given_back)
    assert set(expand_nodes(slurm.job(job).nodes)) == set(slurm.names) - {ours, theirs}
    run.wait_step(run.step() + 3)
    assert len(run.events("epoch.formed")[-1]["members"]) == 2
    assert [e["host"] for e in run.events("member.lost")] == []
    steps = [event["step"] for event in run.events("step.completed")]
    assert len(steps) == len(set(steps)), "no step was done twice"
    account = run.audit()
    assert (account.lost, account.repeated) == (0, 0)
    assert {e["restored_from"] for e in run.events("trainer.started")} <= {"memory", None}
    assert [each["verdict"] for each in user.json("nodes", "history")] == ["drain"], "no strike"
    user("cancel", "one", "--save")
    curve = run.losses()
    for step in curve.keys() & plain.keys():
        assert curve[step] == pytest.approx(plain[step], rel=2e-5), step
