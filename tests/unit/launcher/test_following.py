"""Commands that follow a job, and end it: logs -f, --watch, cancel."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest
from fake_slurm import SUBMIT
from slurm_bench import as_json, asked, cli, fresh, slurm, submit, trains, worker_fails

from launcher.platforms.base import NO_SUCH_JOB, JobState, JobStatus
from launcher.record import stop_request
from launcher.runs import run_dir as run_dirs
from launcher.runs.runs import find_runs
from launcher.runs.submitting import cancelling
from launcher.runs.watching import watch
from launcher.runs.watching.follow_logs import LogReader, Selection

__all__ = ["fresh", "slurm"]  # fixtures


def later(slurm, *acts):
    """Do things while a command runs, each once the command has seen what the one before did."""

    def run():
        for act in acts:
            seen, deadline = len(slurm.calls("squeue")), time.monotonic() + 60
            # Of three more questions one has begun and ended since.
            while len(slurm.calls("squeue")) < seen + 3:
                assert time.monotonic() < deadline, "the command asks no more"
                time.sleep(0.02)
            act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.fixture
def quick(monkeypatch):
    for module in ("launcher.runs.watching.watch", "launcher.cli.submit"):
        monkeypatch.setattr(f"{module}.Watch", partial(watch.Watch, ask_s=0.1, look_s=0.05))
    monkeypatch.setattr(cancelling, "_POLL_S", 0.05)


def test_logs_follow_over_a_requeue_until_the_job_ends(slurm, capsys, quick):
    def first():
        slurm.is_now("RUNNING")
        trains(ends=91)

    def second():
        slurm.is_now("RUNNING")
        trains(attempt="17.1", first=4, ends=0)

    thread = later(
        slurm,
        first,
        lambda: slurm.is_now("PENDING", "BeginTime", nodes=""),
        second,
        lambda: slurm.is_now("COMPLETED"),
    )
    out, err = cli(capsys, "logs", "one", "-f")
    thread.join()
    steps = [line.split(",")[0] for line in out.splitlines() if "-- step" in line]
    assert steps == [f"n1/0: -- step {step}" for step in range(1, 7)]
    assert err.startswith("-- pending: ")
    assert "-- running on 1 node\n" in err
    assert err.endswith("-- done\n")


class Answers:
    """A platform whose answers are known beforehand; the last one is given again."""

    def __init__(self, *statuses):
        self.left, self.asked_to_save, self.cancelled = list(statuses), 0, 0

    def fetch(self, job):
        pass

    def ask_to_save(self, job):
        self.asked_to_save += 1
        return True

    def cancel(self, job):
        self.cancelled, self.left = self.cancelled + 1, [FORGOTTEN]

    def status(self, jobs):
        told = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return dict.fromkeys(jobs, told)


FORGOTTEN = JobStatus(state=JobState.UNKNOWN, reason=NO_SUCH_JOB)
DELETED = JobStatus(state=JobState.CANCELLED, reason=NO_SUCH_JOB, words="it is gone")
RUNNING, DONE = JobStatus(state=JobState.RUNNING), JobStatus(state=JobState.DONE, code=0)


@pytest.mark.parametrize(
    ("told", "end"),
    [
        ((RUNNING, FORGOTTEN, FORGOTTEN, RUNNING, FORGOTTEN, DONE), "done"),
        ((RUNNING, FORGOTTEN), "saved"),
        ((RUNNING, DELETED), "saved"),
    ],
    ids=["for-a-moment", "for-good", "deleted"],
)
def test_a_job_between_two_attempts_has_not_ended(slurm, told, end):
    trains(ends=91)
    [run] = find_runs(Path("runs"))
    said = []
    watched = watch.Watch(run=run, backend=Answers(*told), say=said.append, ask_s=0.0, look_s=0.0)
    list(watched.logs(LogReader(run.path, Selection())))
    assert (said[0], said[-1].split(":")[0]) == ("running", end)


def start(n, *nodes, state=JobState.PENDING):
    starts = {node: f"{node}-{n}" for node in nodes}
    return JobStatus(state=state, reason="StartError: no", failed_starts=starts, num_nodes=2)


BOTH, ONE = ("a", "b"), ("a",)


@pytest.mark.parametrize(
    ("told", "ends"),
    [
        ([start(n, *BOTH) for n in range(10)], True),
        ([start(n, *BOTH) for n in range(9)], False),
        ([start(0, *BOTH)] * 20, False),
        ([start(n, *ONE) for n in range(20)], False),
        ([*(start(n, *BOTH) for n in range(9)), RUNNING, start(10, *BOTH)], False),
        ([start(n, *(BOTH if n % 2 else ("b",))) for n in range(20)], True),
    ],
    ids=["ten-each", "nine-each", "seen-again", "one-of-two", "ran-since", "now-and-then"],
)
def test_a_job_whose_containers_never_start_is_cancelled(slurm, told, ends):
    [run] = find_runs(Path("runs"))
    answers, said = Answers(*told, DONE), []
    watched = watch.Watch(run=run, backend=answers, say=said.append, ask_s=0.0, look_s=0.0)
    watched.wait()
    assert (answers.cancelled, said[-1].split(":")[0]) == ((1, "failed") if ends else (0, "done"))
    assert run_dirs.read_training(run.path).code == (93 if ends else None)


def test_watch_shows_progress_and_ends_with_the_job(slurm, capsys, quick):
    def act():
        while not Path("runs/two/submitted.json").exists():
            time.sleep(0.05)
        slurm.is_now("RUNNING")
        worker_fails(trains("runs/two"))

    thread = later(slurm, act, lambda: slurm.is_now("FAILED", ExitCode="93:0"))
    capsys.readouterr()
    submit("--run-dir", "runs/two", "--watch", code=1)
    thread.join()
    out, err = capsys.readouterr()
    assert out.startswith("slurm job 17: ")
    assert "17.0: 2 nodes" in err
    assert "code 93" in err


def test_cancel_with_save_asks_waits_and_says_what_was_saved(slurm, capsys, quick):
    slurm.is_now("RUNNING")
    log = trains()

    def saves():
        assert stop_request.asked(Path("runs/one"))
        log.emit("trainer.stopping", node="n1", epoch=1, step=4, why="stop")
        log.emit("checkpoint.committed", node="n1", epoch=1, step=4, dir="y")
        log.emit("job.stopped", node="n1", epoch=1, code=91, reason="asked to")

    thread = later(slurm, saves, lambda: slurm.is_now("FAILED", ExitCode="91:0"))
    out, err = cli(capsys, "cancel", "one", "--save")
    thread.join()
    assert "saved: step 4\n" in out
    assert "job 17" in err
    assert [line for line in slurm.calls("scancel") if "USR2" not in line] == []
    answer = as_json(capsys, "cancel", "one", "--save")
    assert (answer["was_over"], answer["saved_step"]) == (True, 4)


def test_cancel_with_save_believes_no_code_when_the_save_failed(slurm, capsys, quick):
    slurm.is_now("RUNNING")
    log = trains()

    def cannot_save():
        assert stop_request.asked(Path("runs/one"))
        log.emit("checkpoint.failed", node="n1", epoch=1, step=4, reason="ENOSPC")
        log.emit("job.stopped", node="n1", epoch=1, code=91, reason="asked to")

    thread = later(slurm, cannot_save, lambda: slurm.is_now("FAILED", ExitCode="91:0"))
    out, _ = cli(capsys, "cancel", "one", "--save", code=1)
    thread.join()
    assert "step 4: ENOSPC" in out
    assert "ENOSPC" in cli(capsys, "why", "one")[0]


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
    answer = as_json(capsys, "cancel", "one", "--save", code=1)
    assert (answer["state"], answer["saved_step"]) == ("cancelled", 3)
    asked = ["scancel --signal=USR2 17", "scancel --batch --signal=USR2 17"]
    assert slurm.calls("scancel") == [*asked, "scancel 17"]


def test_cancel_reads_in_the_record_how_a_job_ended_that_is_gone(slurm):
    trains(ends=91)
    [run] = find_runs(Path("runs"))
    backend, said = Answers(RUNNING, DELETED), []
    canceller = cancelling.Canceller(run, backend, said.append, sleep=lambda _: None)
    found = canceller.cancel(save=True)
    assert (found.status.state, found.saved, found.saved_step) == (JobState.SAVED, True, 3)
    assert backend.asked_to_save == 1
    assert "91" in said[-1]


def test_cancel_of_a_pending_job_asks_nobody_to_save(slurm, capsys, quick):
    slurm.says("scancel", then="sed -i s/PENDING/CANCELLED/ squeue.out")
    answer = as_json(capsys, "cancel", "one", "--save", code=1)
    assert (answer["state"], answer["saved_step"]) == ("cancelled", None)
    assert slurm.calls("scancel") == ["scancel 17"]
    assert stop_request.asked(Path("runs/one"))


def test_a_chain_is_followed_and_cancelled_as_one(slurm, capsys, quick):
    folder = Path("runs/one/attempts/17.0")
    folder.mkdir(parents=True)
    (folder / "next").write_text("18\n")
    slurm.is_now("RUNNING")
    assert as_json(capsys, "status", "one")["job_id"] == "17"
    slurm.is_now("PENDING", "Priority", nodes="")
    (folder / "end.json").write_text('{"code": 91}')
    row = (slurm.folder / "squeue.out").read_text()
    ended = row.replace("PENDING", "FAILED")
    waits = row.replace("17\x1f17", "18\x1f18").replace(str(SUBMIT), str(SUBMIT + 50))
    slurm.says("squeue", out=ended + waits.rstrip("\n"))
    answer = as_json(capsys, "status", "one")
    assert (answer["job_id"], answer["state"]) == ("18", "pending")
    slurm.says("scancel", then="sed -i s/PENDING/CANCELLED/ squeue.out")
    cli(capsys, "cancel", "one")
    assert slurm.calls("scancel") == ["scancel 18", "scancel 17"]


def test_restart_lets_the_job_put_itself_back(slurm, capsys, quick):
    slurm.is_now("RUNNING", start=SUBMIT)
    log = trains()

    def saves():
        log.emit("checkpoint.committed", node="n1", epoch=1, step=4, dir="y")
        log.emit("job.stopped", node="n1", epoch=1, code=91, reason="asked to")

    thread = later(slurm, saves, lambda: slurm.is_now("PENDING", "BeginTime", nodes=""))
    answer = as_json(capsys, "restart", "one")
    thread.join()
    assert (answer["job_id"], answer["requeued"], answer["saved_step"]) == ("17", True, 4)
    assert not stop_request.asked(Path("runs/one")), "it would not be put back"
    assert len(slurm.calls("sbatch")) == 1


def test_restart_sees_a_job_that_runs_again_already(slurm, capsys, quick):
    slurm.is_now("RUNNING", start=SUBMIT)
    trains()
    thread = later(slurm, lambda: slurm.is_now("RUNNING", start=SUBMIT + 60))
    assert as_json(capsys, "restart", "one")["requeued"]
    thread.join()


def test_restart_submits_again_what_does_not_put_itself_back(slurm, capsys, quick):
    script = Path("runs/one/job.sbatch")
    script.write_text(
        script.read_text().replace("HOLDFAST_RESTART=requeue", "HOLDFAST_RESTART=none")
    )
    slurm.is_now("RUNNING", start=SUBMIT)
    log = trains()

    def saves():
        log.emit("checkpoint.committed", node="n1", epoch=1, step=4, dir="y")
        log.emit("job.stopped", node="n1", epoch=1, code=91, reason="asked to")
        slurm.accepts("18")
        slurm.is_now("FAILED", ExitCode="91:0")

    thread = later(slurm, saves)
    answer = as_json(capsys, "restart", "one")
    thread.join()
    assert (answer["job_id"], answer["requeued"], answer["saved_step"]) == ("18", False, 4)
    assert not stop_request.asked(Path("runs/one"))


def test_restart_does_not_leave_a_run_down_for_what_slurm_says_of_itself(slurm, capsys, quick):
    """It ran until restart cancelled it: what is found now is shown, and it is submitted."""
    script = Path("runs/one/job.sbatch")
    script.write_text(
        script.read_text().replace("HOLDFAST_RESTART=requeue", "HOLDFAST_RESTART=none")
    )
    slurm.is_now("RUNNING", start=SUBMIT)
    log = trains()

    def saves():
        log.emit("job.stopped", node="n1", epoch=1, code=91, reason="asked to")
        slurm.accepts("18")
        slurm.is_now("FAILED", ExitCode="91:0")
        asked(slurm)

    thread = later(slurm, saves)
    out, err = cli(capsys, "restart", "one")
    thread.join()
    assert "slurm job 18" in out
    assert "warning: HF680 cluster.nodes: " in err


def test_restart_leaves_a_job_that_cannot_save_in_time_running(slurm, capsys, quick, monkeypatch):
    monkeypatch.setattr(cancelling, "_ENDING_S", 0.3)
    script = Path("runs/one/job.sbatch")
    script.write_text(script.read_text().replace("HOLDFAST_LEAD_S=", "HOLDFAST_LEAD_S=0 #"))
    slurm.is_now("RUNNING", start=SUBMIT)
    trains()
    _, err = cli(capsys, "restart", "one", code=1)
    assert "step 3" in err
    assert [line for line in slurm.calls("scancel") if "USR2" not in line] == []


def test_restart_is_for_what_runs(slurm, capsys):
    assert "HF662" in cli(capsys, "restart", "one", code=2)[1]
    slurm.is_now("SUSPENDED", start=SUBMIT)
    assert "HF662" in cli(capsys, "restart", "one", code=2)[1]
    assert slurm.calls("scancel") == []


def test_a_task_that_slurm_forgets_once_it_is_cancelled(slurm, capsys, quick):
    slurm.says("scancel", then=": >squeue.out; echo 1 >squeue.code")
    (slurm.folder / "squeue.err").write_text("slurm_load_jobs error: Invalid job id specified")
    (slurm.folder / "squeue.code").write_text("0")
    answer = as_json(capsys, "cancel", "one")
    assert (answer["state"], answer["saved_step"]) == ("cancelled", None)
    assert as_json(capsys, "status", "one")["state"] == "cancelled"
