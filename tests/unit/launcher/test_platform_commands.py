"""status, list, logs, why, describe, cancel with programs that stand in for Slurm's."""

from __future__ import annotations

import json
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from fake_slurm import SUBMIT, FakeSlurm
from test_submit import TINY, submit

from launcher import stop_request
from launcher.backends.base import NO_SUCH_JOB, JobState, JobStatus
from launcher.backends.slurm_queries import Patience
from launcher.cli.main import run_cli
from launcher.ops import cancelling, watch
from launcher.ops.follow_logs import LogReader, Selection
from launcher.ops.record import LauncherLog
from launcher.ops.runs import find_runs


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("COLUMNS", "200")
    Path("corpus").write_text("some text\n" * 200)
    Path("job.yaml").write_text(TINY)
    fake = FakeSlurm(tmp_path / "slurm", monkeypatch)
    submit("--run-dir", "runs/one")
    return fake


def cli(capsys, *words, code=0):
    capsys.readouterr()
    assert run_cli(list(words)) == code
    out, err = capsys.readouterr()
    return out, err


def as_json(capsys, *words, code=0):
    return json.loads(cli(capsys, *words, "--json", code=code)[0])


def trains(run="runs/one", *, attempt="17.0", steps=3, first=1, epoch=1, ends=None):
    """Write the record of an attempt that trains a few steps."""
    log = LauncherLog(Path(run), f"node-{attempt}")
    log.emit("run.started", attempt=attempt, nodes=2)
    members = [{"node": "n1"}, {"node": "n2"}]
    log.emit("epoch.formed", node="n1", epoch=epoch, members=members, spares=[], rung=2)
    log.emit("worker.started", node="n1", rank=0, epoch=epoch, pid=5, local_rank=0)
    for step in range(first, first + steps):
        log.emit(
            "step.completed", node="n1", rank=0, epoch=epoch, step=step, loss=2.5 - step / 10,
            tokens=3072, step_s=0.5,
        )  # fmt: skip
    log.emit("checkpoint.committed", node="n1", epoch=epoch, step=first + steps - 1, dir="x")
    if ends is not None:
        log.emit("job.stopped", node="n1", epoch=epoch, code=ends, reason="the test wants it")
    return log


def worker_fails(log, detail="RuntimeError: boom"):
    log.emit(
        "worker.exit", node="n2", epoch=1, worker_rank=1, local_rank=0, code=1, kind="crash",
        action="stop", detail=detail,
    )  # fmt: skip
    log.emit("job.stopped", node="n1", epoch=1, code=93, reason="it would fail again")


def test_status_of_a_pending_run(slurm, capsys):
    slurm.is_now("PENDING", "Resources", nodes="", start=int(time.time()) + 9000)
    out, _ = cli(capsys, "status", "one")
    assert out.startswith(str(Path("runs/one").absolute()))
    assert "state      pending\n" in out
    assert "expected to start in 2 h 2" in out
    assert "enough nodes are not free yet; it is next in line (Resources)" in out
    answer = as_json(capsys, "status", "runs/one")
    assert (answer["state"], answer["job_id"], answer["target"]) == ("pending", "17", "slurm")
    assert answer["platform"]["reason"] == "Resources"
    assert answer["training"]["state"] is None


def test_status_of_a_running_run_has_both_words(slurm, capsys):
    slurm.is_now("RUNNING", nodes="n[1-2]", start=int(time.time()) - 60)
    trains()
    out, _ = cli(capsys, "status", "17")  # a job's id names a run too
    assert "nodes      n1 n2\n" in out
    assert "training, epoch 1, step 3/60, loss 2.2000" in out
    assert "checkpoint step 3\n" in out
    answer = as_json(capsys, "status", "one")
    training = answer["training"]
    assert (training["epoch"], training["step"], training["loss"]) == (1, 3, 2.2)
    assert (training["nodes"], training["saved_step"]) == (["n1", "n2"], 3)


def test_a_controller_that_is_away_leaves_the_run_unknown(slurm, capsys, monkeypatch):
    patience = Patience(retry_query_s=0.0)
    monkeypatch.setattr("launcher.backends.slurm.Patience", lambda: patience)
    trains()
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm.says("squeue", err=away, code=1)
    answer = as_json(capsys, "status", "one")
    assert answer["state"] == "unknown"
    assert "the Slurm controller does not answer" in answer["platform"]["reason"]
    assert answer["training"]["step"] == 3
    out, err = cli(capsys, "list")
    assert "unknown" in out
    assert "does not answer" in err


def test_without_slurm_here_the_record_still_shows(slurm, capsys, monkeypatch):
    trains()
    monkeypatch.setenv("PATH", "/usr/bin/nowhere")
    answer = as_json(capsys, "status", "one")
    assert answer["state"] == "unknown"
    assert "squeue is not installed here" in answer["platform"]["reason"]
    assert answer["training"]["step"] == 3


def test_a_job_that_slurm_has_forgotten_is_what_its_record_says(slurm, capsys):
    slurm.says("squeue", err="slurm_load_jobs error: Invalid job id specified", code=1)
    assert as_json(capsys, "status", "one")["state"] == "unknown"
    trains(ends=0)
    assert as_json(capsys, "status", "one")["state"] == "done"


def test_list_asks_once_for_all_runs(slurm, capsys):
    for number in range(2, 6):
        slurm.accepts(str(20 + number))
        submit("--run-dir", f"runs/run{number}")
    Path("runs/damaged").mkdir()
    Path("runs/damaged/job.json").write_text("{")
    Path("runs/damaged/submitted.json").write_text("{")
    before = len(slurm.calls())
    out, err = cli(capsys, "list")
    asked = slurm.calls()[before:]
    assert [line.split()[0] for line in asked].count("squeue") == 1
    assert "--jobs=17,22,23,24,25" in asked[0]
    assert all(name in out for name in ("one", "run2", "run5", "damaged"))
    assert "damaged/submitted.json cannot be read" in err
    assert len(as_json(capsys, "list")) == 6
    out, _ = cli(capsys, "status")
    assert "run5" in out
    assert cli(capsys, "list", "--runs", "nowhere")[0] == "no run in nowhere\n"


def test_a_run_that_is_not_there(slurm, capsys):
    _, err = cli(capsys, "status", "two", code=2)
    assert "HF613 two is no run directory, and no run of runs" in err
    slurm.accepts("18")
    submit("--run-dir", "runs/onetwo")
    Path("runs/one").rename("runs/onethree")
    _, err = cli(capsys, "status", "one", code=2)
    assert "HF651 one means several runs: runs/onethree, runs/onetwo; name one" in err


def test_why_it_waits(slurm, capsys):
    slurm.is_now("PENDING", "QOSMaxNodePerUserLimit", nodes="")
    out, _ = cli(capsys, "why", "one")
    assert "it waits: a limit of its account or QOS (QOSMaxNodePerUserLimit)" in out
    assert "no expected start" in out
    slurm.is_now("PENDING", "Priority", nodes="", start=int(time.time()) + 60)
    answer = as_json(capsys, "why", "one")
    assert answer["state"] == "pending"
    assert answer["why"] == "it waits: jobs of higher priority are before it (Priority)"
    assert answer["more"][0].startswith("expected start: in ")


def test_why_it_failed_names_the_first_rank_and_shows_its_log(slurm, capsys):
    worker_fails(trains())
    log = Path("runs/one/logs/17.0/n2/1.log")
    log.parent.mkdir(parents=True)
    log.write_text("fine\nTraceback\nRuntimeError: boom\n")
    slurm.is_now("FAILED", "NonZeroExitCode", ExitCode="93:0")
    out, _ = cli(capsys, "why", "one")
    assert out.startswith("it failed with code 93: it would fail again\n")
    assert "first failure: rank 1 on n2, epoch 1: crash: RuntimeError: boom\n" in out
    assert f"evidence: {log.absolute()}\n" in out
    assert "  | RuntimeError: boom\n" in out
    assert "holdfast submit --resume" in out
    failure = as_json(capsys, "why", "one")["failure"]
    assert (failure["rank"], failure["node"], failure["kind"]) == (1, "n2", "crash")


def test_why_it_failed_before_anything_ran_is_in_the_jobs_own_output(slurm, capsys):
    Path("runs/one/logs/slurm-17.out").write_text("ModuleNotFoundError: No module named 'torch'\n")
    slurm.is_now("FAILED", "NonZeroExitCode", ExitCode="1:0")
    out, _ = cli(capsys, "why", "one")
    assert "user_error: ModuleNotFoundError: No module named 'torch'" in out
    assert "slurm-17.out" in out


def test_why_it_stands_still(slurm, capsys):
    slurm.is_now("RUNNING", nodes="n[1-2]")
    out, _ = cli(capsys, "why", "one")
    assert "its agents have not written anything yet" in out
    log = trains()
    assert "nothing is wrong: running, step 3/60" in cli(capsys, "why", "one")[0]
    log.emit("member.lost", node="n1", epoch=1, member="n2", reason="no answer")
    log.emit("epoch.aborted", node="n1", epoch=1, reason="n2 is lost", victims=["n2"])
    log.emit("membership.parked", node="n1", have=1, need=2)
    out, _ = cli(capsys, "why", "one")
    assert "it is parked: 1 nodes are left, the last rung of its ladder needs 2" in out
    assert "n2 is lost: no answer" in out


def test_describe_has_everything(slurm, capsys):
    slurm.is_now("RUNNING", nodes="n[1-2]", WorkDir="/somewhere")
    folder = Path("runs/one/attempts/17.0")
    folder.mkdir(parents=True)
    (folder / "begin.json").write_text('{"t_unix": 1767225700, "step": -1}')
    (folder / "end.json").write_text('{"code": 91, "reason": "time limit"}')
    out, _ = cli(capsys, "describe", "one")
    assert "  WorkDir: /somewhere\n" in out
    assert "17.0: began " in out
    assert "ended with 91: time limit" in out
    sections = as_json(capsys, "describe", "one")
    assert {"run", "job", "submission", "attempts", "slurm"} <= set(sections)
    assert sections["submission"]["job_id"] == "17"


def test_logs_have_the_batch_log_rank_0_and_the_events(slurm, capsys):
    run = Path("runs/one")
    trains()
    (run / "logs/slurm-17.out").write_text("attempt 17.0 begins\n")
    for node, rank in (("n1", 0), ("n2", 1)):
        folder = run / "logs/17.0" / node
        folder.mkdir(parents=True)
        (folder / f"{rank}.log").write_text(f"I am rank {rank}\n")
        (run / f"logs/17.0/{node}.log").write_text(f"agent of {node}\n")
    out, _ = cli(capsys, "logs", "one")
    assert {"job: attempt 17.0 begins", "n1/0: I am rank 0"} <= set(out.splitlines())
    assert "n1/0: -- step 3, loss 2.2000, 6,144 tokens/s" in out
    assert "rank 1" not in out
    out, _ = cli(capsys, "logs", "one", "--rank", "1")
    assert out == "n2/1: I am rank 1\n"
    out, _ = cli(capsys, "logs", "one", "--node", "n2")
    assert set(out.splitlines()) == {"n2: agent of n2", "n2/1: I am rank 1"}
    out, _ = cli(capsys, "logs", "one", "--rank", "all")
    assert "I am rank 0" in out
    assert "I am rank 1" in out
    assert "HF610" in cli(capsys, "logs", "one", "--rank", "x", code=2)[1]


def later(*acts):
    """Do things one after the other while a command runs."""

    def run():
        for act in acts:
            time.sleep(0.3)
            act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(watch, "Watch", partial(watch.Watch, ask_s=0.1, look_s=0.05))
    monkeypatch.setattr(cancelling, "_POLL_S", 0.05)


def test_logs_follow_over_a_requeue_until_the_job_ends(slurm, capsys, quick):
    def first():
        slurm.is_now("RUNNING")
        trains(ends=91)

    def second():
        slurm.is_now("RUNNING")
        trains(attempt="17.1", first=4, ends=0)

    thread = later(
        first,
        lambda: slurm.is_now("PENDING", "BeginTime", nodes=""),
        second,
        lambda: slurm.is_now("COMPLETED"),
    )
    out, err = cli(capsys, "logs", "one", "-f")
    thread.join()
    steps = [line.split(",")[0] for line in out.splitlines() if "-- step" in line]
    assert steps == [f"n1/0: -- step {step}" for step in range(1, 7)]
    assert err.startswith("-- pending: jobs of higher priority are before it\n")
    assert "-- running on 1 nodes\n" in err
    assert err.endswith("-- done\n")


class Answers:
    """A platform whose answers are known beforehand; the last one is given again."""

    name = "slurm"

    def __init__(self, *statuses):
        self.left = list(statuses)

    def fetch(self, job):
        pass

    def status(self, jobs):
        told = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return dict.fromkeys(jobs, told)


FORGOTTEN = JobStatus(state=JobState.UNKNOWN, reason=NO_SUCH_JOB)
RUNNING, DONE = JobStatus(state=JobState.RUNNING), JobStatus(state=JobState.DONE, code=0)


@pytest.mark.parametrize(
    ("told", "end"),
    [
        ((RUNNING, FORGOTTEN, FORGOTTEN, RUNNING, FORGOTTEN, DONE), JobState.DONE),
        ((RUNNING, FORGOTTEN), JobState.SAVED),
    ],
    ids=["for-a-moment", "for-good"],
)
def test_a_job_between_two_attempts_has_not_ended(slurm, told, end):
    trains(ends=91)
    [run] = find_runs(Path("runs"))
    watched = watch.Watch(
        run=run, backend=Answers(*told), say=lambda _: None, ask_s=0.0, look_s=0.0
    )
    assert watched.logs(LogReader(run.path, Selection()), lambda _: None).state is end


def test_watch_shows_progress_and_ends_with_the_job(slurm, capsys, quick):
    def act():
        while not Path("runs/two/submitted.json").exists():
            time.sleep(0.05)
        slurm.is_now("RUNNING")
        worker_fails(trains("runs/two"))

    thread = later(act, lambda: slurm.is_now("FAILED", ExitCode="93:0"))
    capsys.readouterr()
    submit("--run-dir", "runs/two", "--watch", code=1)
    thread.join()
    out, err = capsys.readouterr()
    assert out.startswith("slurm job 17: ")
    assert "attempt 17.0: 2 nodes started" in err
    assert "it failed with code 93: it would fail again" in err


def test_cancel_with_save_asks_waits_and_says_what_was_saved(slurm, capsys, quick):
    slurm.is_now("RUNNING")
    log = trains()

    def saves():
        assert stop_request.asked(Path("runs/one"))
        log.emit("trainer.stopping", node="n1", epoch=1, step=4, why="stop")
        log.emit("checkpoint.committed", node="n1", epoch=1, step=4, dir="y")
        log.emit("job.stopped", node="n1", epoch=1, code=91, reason="asked to")

    thread = later(saves, lambda: slurm.is_now("FAILED", ExitCode="91:0"))
    out, err = cli(capsys, "cancel", "one", "--save")
    thread.join()
    assert "one is over: saved, saved: step 4\n" in out
    assert "asking job 17 to save and to end" in err
    assert [line for line in slurm.calls("scancel") if "USR2" not in line] == []
    answer = as_json(capsys, "cancel", "one", "--save")
    assert (answer["was_over"], answer["saved_step"]) == (True, 4)


def test_cancel_with_save_makes_sure_when_the_save_takes_too_long(
    slurm, capsys, quick, monkeypatch
):
    monkeypatch.setattr(cancelling, "_ENDING_S", 0.3)
    script = Path("runs/one/job.sbatch")
    script.write_text(script.read_text().replace("HOLDFAST_LEAD_S=", "HOLDFAST_LEAD_S=0 #"))
    slurm.is_now("RUNNING")
    slurm.says(
        "scancel", then='case "$*" in *USR2*) ;; *) sed -i s/RUNNING/CANCELLED/ squeue.out;; esac'
    )
    trains()
    out, err = cli(capsys, "cancel", "one", "--save", code=1)
    assert "it has not ended in time; it is cancelled" in err
    assert "one is over: cancelled, saved: step 3" in out
    assert slurm.calls("scancel") == ["scancel --batch --signal=USR2 17", "scancel 17"]


def test_cancel_of_a_pending_job_asks_nobody_to_save(slurm, capsys, quick):
    slurm.says("scancel", then="sed -i s/PENDING/CANCELLED/ squeue.out")
    out, _ = cli(capsys, "cancel", "one", "--save", code=1)
    assert "one is over: cancelled, nothing is saved" in out
    assert slurm.calls("scancel") == ["scancel 17"]
    assert stop_request.asked(Path("runs/one"))


def test_a_chain_is_followed_and_cancelled_as_one(slurm, capsys, quick):
    folder = Path("runs/one/attempts/17.0")
    folder.mkdir(parents=True)
    (folder / "next").write_text("18\n")
    row = (slurm.folder / "squeue.out").read_text()
    ended = row.replace("PENDING", "FAILED")
    waits = row.replace("17\x1f17", "18\x1f18").replace(str(SUBMIT), str(SUBMIT + 50))
    slurm.says("squeue", out=ended + waits.rstrip("\n"))
    answer = as_json(capsys, "status", "one")
    assert (answer["job_id"], answer["state"]) == ("18", "pending")
    slurm.says("scancel", then="sed -i s/PENDING/CANCELLED/ squeue.out")
    cli(capsys, "cancel", "one")
    assert slurm.calls("scancel") == ["scancel 18", "scancel 17"]
