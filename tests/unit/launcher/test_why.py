"""What `why` and the end of `holdfast run` say of runs that have ended: by the record alone."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
from synthetic_record import Stream, config_of

from launcher.doctor.why import explain
from launcher.local.job import AttemptResult, job_code
from launcher.platforms.background import NEVER_STARTED
from launcher.platforms.base import (
    EXIT_INTERRUPTED,
    EXIT_LOST,
    JobId,
    JobRef,
    JobState,
    JobStatus,
    state_of,
)
from launcher.record.status import TrainingStatus
from launcher.runs.runs import StoredRun, find_run
from launcher.runs.watching.run_status import RunStatus, detail_lines, run_statuses
from launcher.spec.errors import UserError


def status_of(tmp_path: Path, stream: Stream, code: int) -> RunStatus:
    stream.add("run.ended", code=code)
    return RunStatus(
        run=StoredRun(path=tmp_path, submission=None, shown="r"),
        target="local",
        job=JobRef(id=JobId("")),
        platform=JobStatus(state=state_of(code), code=code),
        training=TrainingStatus(config_of(), stream.events),
    )


def told(tmp_path: Path, stream: Stream, code: int, output=()):
    return explain(status_of(tmp_path, stream, code), output, now_unix=stream.t)


def stopped(stream: Stream) -> Stream:
    stream.add("job.stopped", code=91, reason="SIGTERM")
    return stream


def before_workers() -> Stream:
    return Stream().start(nodes=2)


def before_a_step() -> Stream:
    stream = Stream().start(nodes=2)
    return stream.form(["node0", "node1"], resume=0)


def failed(kind: str = "crash") -> Stream:
    stream = before_a_step().steps(3)
    stream.add("worker.exit", epoch=1, node="node0", worker_rank=0, kind="collateral", detail="x")
    stream.add(
        "worker.exit", epoch=1, node="node1", worker_rank=1, kind=kind, detail="ValueError: no"
    )
    return stream


def test_a_run_interrupted_before_its_agents_listened_has_not_failed(tmp_path):
    why = told(tmp_path, before_workers(), EXIT_INTERRUPTED)
    assert why.state is JobState.CANCELLED
    assert f"holdfast run --resume {tmp_path}" in why.how_to_fix


@pytest.mark.parametrize("begun", [before_workers, before_a_step])
def test_what_was_stopped_before_it_saved_is_not_called_saved(tmp_path, begun):
    why = told(tmp_path, stopped(begun()), 91)
    assert why.state is JobState.STOPPED
    assert "91" in why.short
    assert "saved" not in why.how_to_fix


def test_what_was_saved_is_named(tmp_path):
    stream = before_a_step().steps(7)
    stream.add("checkpoint.committed", step=7)
    why = told(tmp_path, stopped(stream), 91)
    assert why.state is JobState.SAVED
    assert all(value in why.short for value in ("step 7", "91"))


def test_of_a_script_that_says_it_saved_nothing_else_is_known(tmp_path):
    stream = Stream().start(nodes=2)
    stream.add("epoch.formed", epoch=1, node="node0", members=["node0", "node1"])
    why = told(tmp_path, stopped(stream), 91)
    assert why.state is JobState.SAVED
    assert all(value in why.short for value in ("91", "SIGTERM"))
    assert "step" not in why.short


def test_a_failure_names_rank_evidence_and_how_to_fix_it(tmp_path):
    log = tmp_path / "logs" / "1" / "node1" / "1.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"".join(b"line %d\n" % n for n in range(1000)) + b"\xff\n")
    why = told(tmp_path, failed(), 94)
    assert any("rank 1 on node1, epoch 1: crash: ValueError: no" in line for line in why.more)
    assert (why.log, why.log_lines[-2:]) == (log, ["line 999", "�"])
    assert len(why.log_lines) < 20
    assert (why.failure["node"], why.failure["rank"], why.failure["kind"]) == ("node1", 1, "crash")
    assert "elastic.max_restarts" in why.how_to_fix
    assert f"holdfast run --resume {tmp_path}" in why.how_to_fix


def test_a_failure_that_an_epoch_recovered_from_did_not_end_the_job(tmp_path):
    stream = failed().form(["node0"], resume=0)
    stream.add("job.stopped", code=93, reason="HF517 it began at step 1 again")
    why = told(tmp_path, stream, 93)
    assert "HF517" in why.short
    assert why.failure is None
    assert not any("rank 1" in line for line in why.more)


def test_where_no_worker_failed_an_agents_log_is_the_evidence(tmp_path):
    stream = Stream().start()
    stream.add("agent.exit", node="node0", code=93, reason="job other-7 holds this run")
    (tmp_path / "agent.log").write_text("RuntimeError: no\n")
    why = told(tmp_path, stream, 93, [tmp_path / "agent.log"])
    assert "other-7" in why.short
    assert (why.log, why.log_lines) == (tmp_path / "agent.log", ["RuntimeError: no"])


def test_reasons_of_an_earlier_attempt_do_not_count(tmp_path):
    stream = Stream().start()
    stream.add("job.stopped", code=94, reason="old")
    stream.t += 1
    why = told(tmp_path, stream.start(attempt=2), EXIT_LOST)
    assert "old" not in why.short
    assert f"holdfast run --resume {tmp_path}" in why.how_to_fix


@pytest.mark.parametrize(
    ("codes", "stopped_with", "code"),
    [
        ({"node0": 0, "node1": -9}, None, 0),  # one agent that saw the end is enough
        ({"node0": 92, "node1": 1}, 92, 92),  # the agents' word beats their codes
        ({"node0": 94, "node1": 93}, None, 93),
        ({"node0": -15, "node1": -15}, None, EXIT_LOST),
        ({}, None, EXIT_LOST),
    ],
)
def test_the_code_of_a_local_job(codes, stopped_with, code):
    stream = Stream()
    if stopped_with is not None:
        stream.add("job.stopped", code=stopped_with, reason="2 nodes left")
    assert job_code(codes, stream.events) == code


def refused(code, reason):
    stream = Stream().start()
    stream.add("job.stopped", code=code, reason=reason)
    return stream


@pytest.mark.parametrize(
    ("stream", "code", "is_user_error"),
    [
        (failed("user_error"), 93, True),
        (Stream().start(), 93, True),  # no worker failed: a run that another job holds
        (refused(93, "HF523"), 93, False),
        (failed("crash"), 93, False),
        (failed("user_error"), 94, False),
    ],
)
def test_a_users_mistake(tmp_path, stream, code, is_user_error):
    why = told(tmp_path, stream, code)
    result = AttemptResult(
        run_dir=tmp_path,
        config=config_of(1),
        code=code,
        interrupted=False,
        why=why,
        summary={},
        events=[],
    )
    assert result.is_user_error == is_user_error


@pytest.mark.parametrize(
    ("silent_s", "code", "state"),
    [(1.0, None, "running"), (10_000.0, None, "unknown"), (1.0, 0, "done")],
)
def test_a_run_that_no_launcher_has_started_runs_by_its_record(tmp_path, silent_s, code, state):
    """As a wrapped job does, of which no platform is asked."""
    stream = before_a_step().steps(7)
    if code is not None:
        stream.add("run.ended", code=code)
    ago = time.time() - silent_s - stream.t
    (tmp_path / "job.json").write_text(config_of().to_json())
    (tmp_path / "events").mkdir()
    lines = [dataclasses.replace(one, t_unix=one.t_unix + ago).encode() for one in stream.events]
    (tmp_path / "events" / "agent-node0.jsonl").write_text("".join(lines))
    [found] = run_statuses([find_run(str(tmp_path), tmp_path)])
    assert found.state == state
    assert NEVER_STARTED not in str(detail_lines(found, time.time()))


def test_a_parked_run_says_which_numbers_of_nodes_cannot_run_it(tmp_path):
    stream = before_a_step()
    stream.add("rung.dropped", epoch=1, nodes=1, reason="1 node cannot run it: AssertionError")
    stream.add("membership.parked", have=1, need=2)
    status = TrainingStatus(config_of(), stream.events)
    run = StoredRun(path=tmp_path, submission=None, shown="r")
    platform = JobStatus(state=JobState.RUNNING)
    parked = RunStatus(
        run=run, target="local", job=JobRef(id=JobId("1")), platform=platform, training=status
    )
    why = explain(parked, (), now_unix=stream.t)
    assert any("AssertionError" in line for line in why.more)


def test_a_folder_of_agents_without_a_job_file_is_no_run_but_doctor_reads_it(tmp_path):
    (tmp_path / "events").mkdir()
    with pytest.raises(UserError, match=f"HF613 .*`holdfast doctor {tmp_path}`"):
        find_run(str(tmp_path), Path("runs"))
