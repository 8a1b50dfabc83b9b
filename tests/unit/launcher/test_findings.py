"""What is wrong with a run that its platform calls running: the rules, without any platform."""

from __future__ import annotations

import dataclasses

import pytest
from synthetic_record import STEP_S, Stream, config_of

from elastic_trainer.plan.ladder import Ladder
from launcher.platforms.base import JobState, JobStatus
from launcher.record.status import TrainingStatus
from launcher.runs.watching.findings import LEAST_BYTES, DiskSpace, FindingKind, findings

NODES = ["n1", "n2", "n3", "n4"]
RUNNING = JobStatus(state=JobState.RUNNING, nodes=tuple(NODES), batch_host="n1")


def training(steps=64):
    """Return the record of a job that has done some steps of 0.1 s each."""
    return Stream().start().form(NODES, resume=0).steps(steps, ranks=1)


def found(stream, *, after=0.0, status=RUNNING, **facts):
    """Return kind -> finding, some seconds after the newest event."""
    training = None if stream is None else TrainingStatus(config_of(steps=900), stream.events)
    now = 2000.0 if stream is None else stream.t + after
    said = findings("one", status, training, now_unix=now, **facts)
    return {finding.kind: finding for finding in said}


def test_nothing_is_wrong_with_a_job_that_trains():
    assert found(training()) == {}
    assert found(training(), after=59.0) == {}


def test_silence_against_the_time_of_a_step():
    finding = found(training(), after=80.0)[FindingKind.NO_PROGRESS]
    for value in ("1 min 20 s", "0.1 s", "64/900"):
        assert value in finding.text
    assert "holdfast stacks one" in finding.how_to_fix


def test_slow_steps_are_given_ten_of_them_but_no_more_than_a_hang_is():
    stream = training(1)
    for _ in range(8):
        stream.t += 12.0 - STEP_S
        stream.steps(stream.step + 1, ranks=1)
    assert found(stream, after=119.0) == {}
    assert FindingKind.NO_PROGRESS in found(stream, after=121.0)
    for _ in range(20):
        stream.t += 200.0 - STEP_S
        stream.steps(stream.step + 1, ranks=1)
    assert found(stream, after=359.0) == {}
    assert FindingKind.NO_PROGRESS in found(stream, after=361.0)


def test_pauses_that_the_run_makes_now_and_then_are_known_once_one_was_seen():
    stream = training(20)
    stream.t += 50.0  # a script's evaluation, of which nobody tells
    stream.steps(40, ranks=1)
    assert found(stream, after=99.0) == {}
    assert FindingKind.NO_PROGRESS in found(stream, after=101.0)


def test_the_second_step_teaches_nothing():
    stream = training(1)
    stream.t += 250.0
    stream.steps(9, ranks=1)
    assert FindingKind.NO_PROGRESS in found(stream, after=61.0)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_start_has_the_ceiling_of_a_start(steps):
    stream = training(steps)
    assert found(stream, after=899.0) == {}
    assert FindingKind.NO_PROGRESS in found(stream, after=901.0)


@pytest.mark.parametrize("ended", ["evaluation.ended", "validation.completed"])
@pytest.mark.parametrize("event", ["checkpoint.started", "evaluation.started"])
def test_pauses_that_are_told_have_a_ceiling_of_their_own(event, ended):
    stream = training()
    stream.add(event, epoch=1, step=64)
    assert found(stream, after=899.0) == {}
    assert FindingKind.NO_PROGRESS in found(stream, after=901.0)
    stream.add(ended, epoch=1)
    assert FindingKind.NO_PROGRESS in found(stream, after=80.0)


def test_a_save_that_is_written_beside_the_steps_excuses_nothing():
    stream = training()
    stream.add("checkpoint.started", epoch=1, step=64)
    stream.t += STEP_S
    stream.steps(66, ranks=1)
    assert FindingKind.NO_PROGRESS in found(stream, after=80.0)


def test_a_recovery_that_forms_no_epoch():
    stream = training().kill_node("n4")
    assert set(found(stream, after=30.0)) == {FindingKind.NODES_LOST}
    finding = found(stream, after=70.0)[FindingKind.NO_PROGRESS]
    assert "recovering" in finding.text
    stream.add("epoch.delayed", epoch=1, seconds=120.0, reason="storage")
    assert FindingKind.NO_PROGRESS not in found(stream, after=170.0)
    assert FindingKind.NO_PROGRESS in found(stream, after=181.0)


def test_a_parked_job_waits_on_purpose():
    stream = training().kill_node("n4")
    stream.add("membership.parked", epoch=1, have=3, need=4)
    assert set(found(stream, after=5000.0)) == {FindingKind.NODES_LOST}


def test_agents_that_never_write_anything():
    early = dataclasses.replace(RUNNING, started=2000.0 - 899.0)
    assert found(Stream(), status=early) == {}
    empty = Stream(t=2000.0)
    late = dataclasses.replace(RUNNING, started=2000.0 - 901.0)
    assert FindingKind.NO_PROGRESS in found(empty, status=late)
    # What the attempt before it wrote does not count.
    old = training()
    again = dataclasses.replace(RUNNING, started=old.t + 500.0)
    assert found(old, after=600.0, status=again) == {}
    assert FindingKind.NO_PROGRESS in found(old, after=500.0 + 901.0, status=again)


def test_a_suspended_job_is_suspended_and_not_slow():
    status = dataclasses.replace(RUNNING, suspended=True, words="go on with: scontrol resume 7")
    assert set(found(training(), after=4000.0, status=status)) == {FindingKind.SUSPENDED}


def test_a_lost_node_by_the_record():
    stream = training().kill_node("n4").form(["n1", "n2", "n3"], resume=64).steps(80, ranks=1)
    finding = found(stream)[FindingKind.NODES_LOST]
    assert ("3 of 4" in finding.text, "n4" in finding.text) == (True, True)
    assert finding.how_to_fix == ""
    # It may come back as long as the platform has it in the job.
    assert found(stream, nodes_return=False)[FindingKind.NODES_LOST].how_to_fix == ""
    stream.add("member.joined", epoch=2, node="n1", member="n4")
    assert found(stream) == {}


def test_a_lost_node_by_the_platform_alone():
    status = dataclasses.replace(RUNNING, nodes=("n1", "n2"), nodes_lost=("n3", "n4"))
    finding = found(training(), status=status)[FindingKind.NODES_LOST]
    assert ("2 of 4 nodes: n3 n4" in finding.text, finding.how_to_fix) == (True, "")
    finding = found(training(), status=status, nodes_return=False)[FindingKind.NODES_LOST]
    assert "holdfast restart one" in finding.how_to_fix
    # Before any agent has written: by the platform's own names.
    finding = found(Stream().start(nodes=4), status=status)[FindingKind.NODES_LOST]
    assert "2 of 4 nodes: n3 n4" in finding.text


def test_a_machine_and_the_pod_on_it_are_one():
    pods = [f"pod-{index}" for index in range(4)]
    stream = Stream().start()
    for pod, host in zip(pods, NODES, strict=True):
        stream.add("agent.started", node=pod, host=host)
    stream.form(pods, resume=0).steps(9, ranks=1)
    status = JobStatus(state=JobState.RUNNING, nodes=tuple(pods), nodes_lost=("n4",))
    before = found(stream, status=status)[FindingKind.NODES_LOST].text
    assert "3 of 4 nodes: pod-3" in before
    stream.add("member.lost", epoch=1, node="pod-0", member="pod-3", host="n4", reason="EOF")
    assert found(stream, status=status)[FindingKind.NODES_LOST].text == before


def test_nodes_that_were_let_go_or_excluded_are_not_lost():
    for event in ("member.left", "member.evicted"):
        stream = training().kill_node("n4")
        stream.add(event, epoch=1, node="n1", member="n4", host="n4", reason="asked")
        assert found(stream) == {}


def test_what_the_platform_did_to_a_node_comes_first_until_a_step_follows():
    words, stream = "pod n2", training()
    status = dataclasses.replace(RUNNING, words=words, reason="OOMKilled", broke=stream.t + 1)
    assert next(iter(found(stream, after=200.0, status=status))) is FindingKind.NODE_BROKE
    finding = found(Stream().start(), status=status)[FindingKind.NODE_BROKE]
    assert finding.text == f"{words} (OOMKilled)"
    stream.t += 2.0
    assert FindingKind.NODE_BROKE not in found(stream.steps(65, ranks=1), status=status)


def runbooks(*args, **more):
    """Return kind -> class of the runbook that a finding ends with."""
    told = found(*args, **more)
    assert all(str(each).endswith(f"; {each.to_json()['runbook']}") for each in told.values())
    return {
        str(kind): each.runbook.removeprefix("holdfast runbook ") for kind, each in told.items()
    }


def test_each_finding_names_the_runbook_of_its_class():
    full = DiskSpace(path="/scratch", free_bytes=0)
    assert runbooks(training(), after=80.0, disks=(full,)) == {
        "no_progress": "hang",
        "disk_full": "disk_full",
    }
    assert runbooks(training(), problem="the pod does not answer") == {"record_away": "storage_io"}
    status = dataclasses.replace(RUNNING, suspended=True)
    assert runbooks(training(), status=status) == {"suspended": "slurm_preempted"}
    stream = training()
    stream.add("checkpoint.failed", epoch=1, step=64, reason="it failed")
    assert runbooks(stream) == {"saves_fail": "storage_io"}
    stream.add("checkpoint.failed", epoch=1, step=64, reason="No space left on device")
    assert runbooks(stream) == {"saves_fail": "disk_full"}
    stream = training().kill_node("n1")
    assert runbooks(stream) == {"batch_host_lost": "slurm_node_fail", "nodes_lost": "node_lost"}
    assert runbooks(stream, lost_kind="pod_lost")["nodes_lost"] == "k8s_pod_lost"
    for words, name in (("Error", "k8s_pod_lost"), ("OOMKilled", "host_oom")):
        status = dataclasses.replace(RUNNING, words=words, broke=9e9)
        assert runbooks(training(), status=status, lost_kind="pod_lost") == {"node_broke": name}


def test_a_coordinator_that_nobody_knew_is_no_node():
    stream = Stream().start()
    stream.add("member.lost", node="n1", member="?", host="?", reason="EOF")
    assert FindingKind.NODES_LOST not in found(stream)


def test_the_batch_host():
    stream = training().kill_node("n1").form(["n2", "n3", "n4"], resume=64).steps(80, ranks=1)
    assert list(found(stream)) == [FindingKind.BATCH_HOST_LOST, FindingKind.NODES_LOST]


def test_saves_that_fail():
    stream = training()
    stream.add("checkpoint.failed", epoch=1, step=20, reason="rank 0: ENOSPC")
    stream.add("checkpoint.failed", epoch=1, step=40, reason="rank 1: ENOSPC")
    finding = found(stream)[FindingKind.SAVES_FAIL]
    assert all(value in finding.text for value in ("twice", "step 40", "rank 1: ENOSPC", "none"))
    stream.add("checkpoint.committed", epoch=1, step=60, dir="x")
    assert found(stream) == {}
    stream.t += 5.0
    stream.add("checkpoint.failed", epoch=1, step=64, reason="rank 0: ENOSPC")
    assert "step 60, 5 s" in found(stream)[FindingKind.SAVES_FAIL].text


def test_a_full_disk():
    disk = DiskSpace(path="/scratch", free_bytes=LEAST_BYTES)
    assert found(training(), disks=(disk,)) == {}
    for full in (
        dataclasses.replace(disk, free_bytes=LEAST_BYTES - 1),
        dataclasses.replace(disk, has_files=False),
    ):
        finding = found(training(), disks=(disk, full))[FindingKind.DISK_FULL]
        assert "/scratch" in finding.text


def test_a_record_that_cannot_be_brought_here_is_no_good_news():
    told = found(training(), after=4000.0, problem="HF753")
    assert set(told) == {FindingKind.RECORD_AWAY}
    assert "HF753" in told[FindingKind.RECORD_AWAY].text


def test_a_save_that_failed_is_left_to_tell_of_a_run_that_has_ended():
    stream = training()
    stream.add("checkpoint.failed", epoch=1, step=64, reason="rank 0: ENOSPC")
    for state in (JobState.SAVED, JobState.STOPPED, JobState.FAILED, JobState.CANCELLED):
        assert set(found(stream, status=JobStatus(state=state))) == {FindingKind.SAVES_FAIL}
    assert found(stream, status=JobStatus(state=JobState.DONE)) == {}


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.RUNNING])
def test_only_what_runs_is_judged(state):
    assert found(training().kill_node("n4"), after=4000.0, status=JobStatus(state=state)) == {}


def slow(stream, tokens_per_s):
    """Return kind -> finding of a run of which so many tokens/s a node were predicted."""
    config = config_of(steps=900, tokens_per_s=tokens_per_s)
    said = findings("one", RUNNING, TrainingStatus(config, stream.events), now_unix=stream.t)
    return {finding.kind: finding for finding in said}


def test_a_slow_cluster_is_seen_without_a_slow_rank():
    # 512 tokens a step of 0.1 s on four nodes: 1,280 a node.
    assert slow(training(), None) == {}
    assert slow(training(), 1280.0) == {}
    assert slow(training(), 1280.0 * 1.25) == {}
    finding = slow(training(), 1280.0 * 2)[FindingKind.SLOW_STEPS]
    for value in ("0.1 s", "0.05 s", "all ranks"):
        assert value in finding.text
    assert "straggler" in finding.runbook


def test_the_part_of_a_step_that_is_slower_is_named():
    config = config_of(steps=900, tokens_per_s=1280.0 * 2)  # a step of 0.05 s takes 0.1 s
    (rung,) = config.ladder.rungs
    rung = dataclasses.replace(rung, shares=(0.6, 0.2, 0.0, 0.0, 0.1, 0.0))
    config = dataclasses.replace(config, ladder=Ladder((rung,)))
    parts = {"compute": 0.03, "tp": 0.06, "dp": 0.005, "pp": 0.0, "data": 0.001}
    for apart, who in (({}, "all ranks, tp"), ({"tp": "n2"}, "n2, tp")):
        stream = training(40)
        stream.add("step.parts", epoch=1, node="n1", stages=[parts], apart=apart)
        status = TrainingStatus(config, stream.steps(64, ranks=1).events)
        (finding,) = findings("one", RUNNING, status, now_unix=stream.t)
        assert who in finding.text
        assert "0.06 s, predicted 0.01 s" in finding.text


def test_a_slow_rank_that_is_known_is_named():
    stream = training(40)
    stream.add("worker.slow", epoch=1, node="n1", member="n3", section="backward", ratio=2.0)
    finding = slow(stream.steps(64, ranks=1), 1280.0 * 2)[FindingKind.SLOW_STEPS]
    assert "n3 (backward)" in finding.text
    # A new epoch may be without it.
    stream.form(NODES, resume=64)
    assert "n3" not in slow(stream.steps(90, ranks=1), 1280.0 * 2)[FindingKind.SLOW_STEPS].text


def test_what_was_predicted_is_that_of_the_epochs_layout():
    config = config_of(steps=900, nodes=(4, 3), tokens_per_s=1000.0)
    stream = training()
    status = TrainingStatus(config, stream.events)
    assert status.predicted_tokens_per_s == 4000.0
    assert any("4,000 predicted" in text for text in status.rate_texts)
    stream.form(NODES[:3], resume=64)
    assert TrainingStatus(config, stream.events).predicted_tokens_per_s == 3000.0
    assert TrainingStatus(config_of(), stream.events).predicted_tokens_per_s is None
