"""status, list, logs, why, describe with programs that stand in for Slurm's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from fake_slurm import SUBMIT
from slurm_bench import as_json, cli, fresh, slurm, submit, trains, worker_fails

from elastic_trainer.storage.files import read_json, write_json
from launcher.node.attempt import Attempt
from launcher.node.batch import put_summary
from launcher.platforms.slurm.queries import SlurmPatience
from launcher.record import stop_request
from launcher.record.files import LauncherLog
from launcher.runs.runs import find_runs

__all__ = ["fresh", "slurm"]  # fixtures


def test_status_of_a_pending_run(slurm, capsys):
    slurm.is_now("PENDING", "Resources", nodes="", start=int(time.time()) + 9000)
    out, _ = cli(capsys, "status", "one")
    assert out.startswith(str(Path("runs/one").absolute()))
    assert "state      pending\n" in out
    assert "in 2 h 2" in out
    assert "(Resources)" in out
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
    patience = SlurmPatience(retry_query_s=0.0)
    monkeypatch.setattr("launcher.platforms.slurm.backend.SlurmPatience", lambda: patience)
    trains()
    away = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    slurm.says("squeue", err=away, code=1)
    answer = as_json(capsys, "status", "one")
    assert answer["state"] == "unknown"
    assert answer["platform"]["reason"]
    assert answer["training"]["step"] == 3
    out, err = cli(capsys, "list")
    assert "unknown" in out
    assert answer["platform"]["reason"] in err


def test_without_slurm_here_the_record_still_shows(slurm, capsys, monkeypatch):
    trains()
    monkeypatch.setenv("PATH", "/usr/bin/nowhere")
    answer = as_json(capsys, "status", "one")
    assert answer["state"] == "unknown"
    assert "squeue" in answer["platform"]["reason"]
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
    assert "damaged/submitted.json" in err
    assert len(as_json(capsys, "list")) == 6
    out, _ = cli(capsys, "status")
    assert "run5" in out
    assert "nowhere" in cli(capsys, "list", "--runs", "nowhere")[0]


def test_a_run_that_is_not_there(slurm, capsys):
    _, err = cli(capsys, "status", "two", code=2)
    assert "HF613 two" in err
    slurm.accepts("18")
    submit("--run-dir", "runs/onetwo")
    Path("runs/one").rename("runs/onethree")
    _, err = cli(capsys, "status", "one", code=2)
    assert "HF651" in err
    assert "runs/onethree, runs/onetwo" in err


def test_why_it_waits(slurm, capsys):
    slurm.is_now("PENDING", "QOSMaxNodePerUserLimit", nodes="")
    limited = as_json(capsys, "why", "one")
    assert (limited["state"], "(QOSMaxNodePerUserLimit)" in limited["why"]) == ("pending", True)
    slurm.is_now("PENDING", "Priority", nodes="", start=int(time.time()) + 65)
    answer = as_json(capsys, "why", "one")
    assert (answer["state"], "(Priority)" in answer["why"]) == ("pending", True)
    assert ["in 1 min" in told["more"][0] for told in (limited, answer)] == [False, True]


def test_why_it_failed_names_the_first_rank_and_shows_its_log(slurm, capsys):
    worker_fails(trains())
    log = Path("runs/one/logs/17.0/n2/1.log")
    log.parent.mkdir(parents=True)
    log.write_text("fine\nTraceback\nRuntimeError: boom\n")
    slurm.is_now("FAILED", "NonZeroExitCode", ExitCode="93:0")
    out, _ = cli(capsys, "why", "one")
    assert "code 93" in out.splitlines()[0]
    assert "rank 1 on n2, epoch 1: crash: RuntimeError: boom\n" in out
    assert f"evidence: {log.absolute()}\n" in out
    assert "  | RuntimeError: boom\n" in out
    assert "holdfast submit --resume" in out
    failure = as_json(capsys, "why", "one")["failure"]
    assert (failure["rank"], failure["node"], failure["kind"]) == (1, "n2", "crash")


def test_why_it_failed_before_anything_ran_is_in_the_jobs_own_output(slurm, capsys):
    Path("runs/one/logs/slurm-17.out").write_text("ModuleNotFoundError: No module named 'torch'\n")
    slurm.is_now("FAILED", "NonZeroExitCode", ExitCode="1:0")
    out, _ = cli(capsys, "why", "one")
    assert "user_error: ModuleNotFoundError: " in out
    assert "slurm-17.out" in out


def test_why_it_stands_still(slurm, capsys):
    slurm.is_now("RUNNING", nodes="n[1-2]")
    assert "step" not in cli(capsys, "why", "one")[0]
    log = trains()
    assert "running, step 3/60" in cli(capsys, "why", "one")[0]
    log.emit("member.lost", node="n1", epoch=1, member="n2", reason="no answer")
    log.emit("epoch.aborted", node="n1", epoch=1, reason="n2 is lost", victims=["n2"])
    log.emit("membership.parked", node="n1", have=1, need=2)
    parked = as_json(capsys, "why", "one")
    assert all(value in parked["why"] for value in ("parked", "1 node", "2"))
    assert "n2" in cli(capsys, "why", "one")[0]


def test_machines_that_were_excluded_are_named_with_their_pods(slurm, capsys):
    slurm.is_now("RUNNING", nodes="n[1-2]")
    log = trains()
    log.emit("agent.started", node="p-1", pid=7, host="gpu-17", address="10.0.0.1", port=1)
    failed = {"kind": "killed", "action": "restart", "detail": "SIGKILL", "worker_rank": 1}
    log.emit("worker.exit", node="p-1", epoch=1, local_rank=0, code=-9, **failed)
    where = {"member": "p-1", "host": "gpu-17"}
    log.emit("member.evicted", node="n1", epoch=1, **where, reason="failed 2 times")
    out, _ = cli(capsys, "status", "one")
    assert "excluded   gpu-17 (p-1): failed 2 times\n" in out
    training = as_json(capsys, "status", "one")["training"]
    assert training["excluded"] == [{"host": "gpu-17", "member": "p-1", "reason": "failed 2 times"}]
    out, _ = cli(capsys, "why", "one")
    assert "excluded: gpu-17 (p-1): failed 2 times" in out
    assert "rank 1 on p-1 (gpu-17), epoch 1: killed: SIGKILL" in out
    log.emit("member.lost", node="n1", epoch=1, member="p-2", host="gpu-3", reason="no answer")
    log.emit("membership.parked", node="n1", have=1, need=2)
    out, _ = cli(capsys, "why", "one")
    assert "p-2 (gpu-3)" in out
    assert "excluded: gpu-17 (p-1): failed 2 times" in out


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
    out, _ = cli(capsys, "logs", "one", "--timestamps", "--grep", "step 3|rank 0")
    *known, plain = out.splitlines()
    assert any(" n1/0: -- step 3" in line for line in known)
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d n1", line) for line in known)
    assert plain == " " * 20 + "n1/0: I am rank 0"


def begins(*, t_unix, run="runs/one", attempt="17.0", job="17", nodes="n[1-3]"):
    """Write what `begin` writes at the start of the batch script."""
    folder = Path(run) / "attempts" / attempt
    folder.mkdir(parents=True)
    known = {"t_unix": t_unix, "step": -1, "platform": "slurm", "job": job, "nodes": nodes}
    write_json(folder / "begin.json", known)


def test_nodes_that_slurm_has_taken_from_the_job(slurm, capsys):
    now = time.time()
    begins(t_unix=now - 50)
    slurm.is_now("RUNNING", nodes="n[2-3]", batch_host="n1", start=int(now) - 60)
    trains()
    answer = as_json(capsys, "status", "one")
    assert (answer["platform"]["nodes_lost"], answer["platform"]["batch_host"]) == (["n1"], "n1")
    assert [each["kind"] for each in answer["findings"]] == ["batch_host_lost", "nodes_lost"]
    assert as_json(capsys, "why", "one")["findings"] == answer["findings"]
    assert "holdfast restart one" in cli(capsys, "why", "one")[0]
    out, _ = cli(capsys, "status")
    assert "1 of 2 nodes: n1" in out
    # Put back into the queue and started again, the script has not begun yet.
    slurm.is_now("RUNNING", nodes="n[4-6]", start=int(now))
    assert as_json(capsys, "status", "one")["platform"]["nodes_lost"] == []


def test_a_suspended_job_is_no_job_that_trains(slurm, capsys):
    slurm.is_now("SUSPENDED", nodes="n[1-2]", start=int(time.time()) - 60)
    trains()
    answer = as_json(capsys, "why", "one")
    assert [each["kind"] for each in answer["findings"]] == ["suspended"]
    assert "scontrol resume 17" in answer["why"]


def test_a_script_that_was_submitted_by_hand_is_known_from_its_start_on(slurm, capsys):
    (Path("runs/one") / "submitted.json").unlink()
    slurm.is_now("RUNNING", nodes="n[1-2]", start=int(time.time()) - 60)
    assert as_json(capsys, "status", "one")["target"] == "local"
    begins(t_unix=time.time(), nodes="n[1-2]")
    trains()
    answer = as_json(capsys, "status", "one")
    assert (answer["target"], answer["job_id"], answer["state"]) == ("slurm", "17", "running")


def test_a_script_that_was_submitted_by_hand_once_more(slurm, capsys):
    begins(t_unix=SUBMIT + 10.0)
    begins(t_unix=SUBMIT + 20.0, attempt="18.0", job="18")
    assert as_json(capsys, "status", "one")["job_id"] == "18"


def test_a_successor_was_not_submitted_by_hand(slurm, capsys):
    begins(t_unix=SUBMIT + 10.0)
    (Path("runs/one/attempts/17.0") / "next").write_text("18\n")
    begins(t_unix=SUBMIT + 20.0, attempt="18.0", job="18")
    [found] = find_runs(Path("runs"))
    assert found.submission is not None
    assert found.submission.job.id == "17"


def test_times_of_scontrol_are_times(slurm, capsys):
    slurm.is_now("RUNNING", nodes="n[1-2]", StartTime=SUBMIT)
    fields = as_json(capsys, "describe", "one")["slurm"]
    assert fields["StartTime"] == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(SUBMIT))


def test_a_report_takes_the_name_of_a_run(slurm, capsys):
    trains(ends=0)
    assert as_json(capsys, "report", "one")["steps"] == 3
    out, _ = cli(capsys, "report", "17")
    assert Path(out.strip()) == Path("runs/one/report.html").absolute()


@pytest.mark.parametrize(
    ("code", "env", "stop", "written"),
    [
        (0, {}, False, True),
        (93, {}, False, True),
        (91, {}, False, False),
        (91, {}, True, True),
        (91, {"HOLDFAST_RESTART": "none"}, False, True),
        # Slurm must not end the script meanwhile: it would call the job a failure.
        (0, {"HOLDFAST_SAVE_BY": "10"}, False, False),
    ],
)
def test_the_last_attempt_writes_the_summary(slurm, code, env, stop, written):
    run = Path("runs/one").absolute()
    trains(ends=code)
    if stop:
        stop_request.ask(run, why="test", t_unix=0.0)
    put_summary(Attempt(run, "17", 0), env, code)
    path = run / "summary.json"
    assert path.exists() is written
    assert not written or read_json(path)["steps"] == 3


def test_a_summary_that_cannot_be_written_ends_nothing(slurm, capsys):
    (Path("runs/one") / "job.json").write_text("{")
    capsys.readouterr()
    put_summary(Attempt(Path("runs/one").absolute(), "17", 0), {}, 0)
    assert "runs/one/job.json" in capsys.readouterr().err
    assert not Path("runs/one/summary.json").exists()


def test_a_save_is_known_however_many_steps_follow(slurm, capsys, tmp_path):
    """Readers look at the ends of files, and rank 0 has a file of its own for saves."""
    slurm.is_now("RUNNING", nodes="n[1-2]", start=int(time.time()) - 60)
    log = trains()
    saves = LauncherLog(Path("runs/one"), "checkpoints-worker-n1-0")
    saves.emit("checkpoint.failed", node="n1", rank=0, epoch=1, step=4, reason="no space")
    for step in range(4, 2004):
        log.emit(
            "step.completed", node="n1", rank=0, epoch=1, step=step, loss=2.5, tokens=3072,
            step_s=0.5, padding="x" * 100,
        )  # fmt: skip
    [finding] = as_json(capsys, "status", "one")["findings"]
    assert finding["kind"] == "saves_fail"
