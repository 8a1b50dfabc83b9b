from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.platforms.base import JobId, JobRef, JobState
from launcher.platforms.slurm import status_text
from launcher.platforms.slurm.parse import SlurmJob

T = 1_767_225_600.0


def ref(**kwargs):
    return JobRef(**{"id": JobId("17"), "submit_time": T, "run_dir": "/s/tiny"} | kwargs)


def job(**kwargs):
    return SlurmJob(**{"id": "17", "raw_id": "17", "state": "RUNNING", "submit": T} | kwargs)


@pytest.mark.parametrize(
    ("told", "state", "code"),
    [
        ({"state": "PENDING"}, JobState.PENDING, None),
        ({"state": "CONFIGURING"}, JobState.PENDING, None),
        ({"state": "RUNNING", "code": 0}, JobState.RUNNING, None),
        ({"state": "COMPLETING"}, JobState.RUNNING, None),
        ({"state": "COMPLETED"}, JobState.DONE, 0),
        ({"state": "FAILED", "code": 91}, JobState.SAVED, 91),
        ({"state": "FAILED", "code": 93}, JobState.FAILED, 93),
        ({"state": "FAILED", "code": 0, "signal": 9}, JobState.FAILED, None),
        ({"state": "FAILED"}, JobState.FAILED, None),
        ({"state": "CANCELLED", "code": 0}, JobState.CANCELLED, None),
        ({"state": "TIMEOUT"}, JobState.FAILED, None),
        ({"state": "NODE_FAIL"}, JobState.FAILED, None),
        ({"state": "BRAND_NEW"}, JobState.UNKNOWN, None),
        ({"state": ""}, JobState.UNKNOWN, None),
    ],
)
def test_states(told, state, code):
    status = status_text.status_of(job(**told))
    assert (status.state, status.code) == (state, code)


def test_times_mean_what_the_state_makes_of_them():
    pending = status_text.status_of(
        job(state="PENDING", start=T + 60, end=T + 90, reason="Resources")
    )
    assert (pending.expected_start, pending.started, pending.ends_by) == (T + 60, None, None)
    assert pending.words
    running = status_text.status_of(job(start=T + 60, end=T + 90, nodes="n[1-2]"))
    assert (running.started, running.ends_by, running.ended) == (T + 60, T + 90, None)
    assert running.nodes == ("n1", "n2")
    ended = status_text.status_of(job(state="TIMEOUT", start=T + 60, end=T + 90))
    assert (ended.started, ended.ends_by, ended.ended) == (T + 60, None, T + 90)
    assert ended.reason == "TIMEOUT"
    assert "slurm.time" in ended.words


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("Priority", "priority"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-3]", "drained"),
        ("QOSMaxGRESPerUser", "(QOSMaxGRESPerUser)"),
        ("AssocGrpNodeLimit", "(AssocGrpNodeLimit)"),
        ("MaxJobsPerAccount", "(MaxJobsPerAccount)"),
        ("JobHeldUser", "scontrol release 17"),
        ("SomethingNew", "SomethingNew"),
        ("", ""),
    ],
)
def test_reasons_in_plain_words(reason, said):
    assert said in status_text.reason_text(reason, "17")


@pytest.mark.parametrize(
    ("complaint", "key"),
    [
        ("sbatch: error: invalid partition specified: moon", "slurm.partition"),
        ("Batch job submission failed: Invalid partition name specified", "slurm.partition"),
        (
            (
                "Batch job submission failed: Invalid account or account/partition combination "
                "specified"
            ),
            "slurm.account",
        ),
        ("Batch job submission failed: Invalid qos specification", "slurm.qos"),
        (
            (
                "Batch job submission failed: Requested time limit is invalid (missing or exceeds "
                "some limit)"
            ),
            "slurm.time",
        ),
        (
            "Batch job submission failed: Invalid generic resource (gres) specification",
            "cluster.gpus_per_node",
        ),
        ("Batch job submission failed: Invalid feature specification", "slurm.constraint"),
        ("Batch job submission failed: Requested reservation is invalid", "slurm.reservation"),
        ("Batch job submission failed: Job dependency problem", "slurm.dependency"),
        ("Batch job submission failed: Invalid node name specified", "slurm.exclude"),
        ("Batch job submission failed: Requested node configuration is not available", ""),
        ("Batch job submission failed: Node count specification invalid", ""),
        (
            (
                "Batch job submission failed: Job violates accounting/QOS policy (job submit "
                "limit, user's size and/or time limits)"
            ),
            "",
        ),
        ("Batch job submission failed: User's group not permitted to use this partition", ""),
        ("sbatch: unrecognized option '--segment=16'", "slurm.extra"),
        ("who knows", ""),
    ],
)
def test_refusals_name_the_key_and_a_way_out(complaint, key):
    found, way_out = status_text.refusal(complaint)
    assert found == key
    assert len(way_out) > 10
    assert not status_text.is_temporary(complaint)


@pytest.mark.parametrize(
    ("complaint", "not_sent"),
    [
        ("Unable to contact slurm controller (connect failure)", True),
        ("Batch job submission failed: Socket timed out on send/recv operation", False),
        ("Batch job submission failed: Zero Bytes were transmitted or received", False),
        ("Batch job submission failed: Slurm backup controller in standby mode", True),
    ],
)
def test_temporary_complaints_and_whether_a_job_may_have_been_taken(complaint, not_sent):
    assert status_text.is_temporary(complaint)
    assert status_text.was_not_sent(complaint) is not_sent


def test_the_same_number_used_again_is_another_job():
    script = "/s/tiny/job.sbatch"
    assert status_text.same_job(job(script=script, source="squeue"), ref())
    # Requeued: a later time of submission, the same script.
    assert status_text.same_job(job(script=script, submit=T + 86400), ref())
    # Another run got the number later, or had it before.
    assert not status_text.same_job(job(script="/s/other/job.sbatch", submit=T + 86400), ref())
    assert not status_text.same_job(job(script=script, submit=T - 86400), ref())
    assert not status_text.same_job(job(submit=T - 86400, source="sacct"), ref())
    assert not status_text.same_job(job(id="18", raw_id="18"), ref())
    # The run directory was moved: the time alone is proof.
    assert status_text.same_job(job(script="/old/tiny/job.sbatch"), ref())
    # A task's script is its array's.
    task = ref(id=JobId("17_3"), run_dir="/s/tiny/3")
    assert status_text.same_job(job(id="17_3", raw_id="20", script=script, submit=T + 9000), task)
    # The record of completed jobs has no more than the end.
    assert status_text.same_job(job(submit=None, end=T + 5, state="COMPLETED"), ref())
    assert not status_text.same_job(job(submit=None, end=T - 5000, state="COMPLETED"), ref())


def test_of_accounts_the_rows_of_our_name_count_and_the_newest_of_them():
    ours = job(name="tiny", state="REQUEUED", source="sacct")
    again = job(name="tiny", submit=T + 5000, state="COMPLETED", source="sacct")
    other = job(name="moon", submit=T + 90000, state="FAILED", source="sacct")
    assert status_text.choose([ours, again, other], ref()) is again
    assert status_text.choose([other], ref(submit_time=None)) is other
    assert status_text.choose([], ref()) is None


@given(st.text(), st.text(), st.text())
def test_no_words_break_it(state, reason, complaint):
    status_text.status_of(job(state=state, reason=reason))
    status_text.refusal(complaint)
    status_text.reason_text(reason)
