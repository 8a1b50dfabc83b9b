"""Wrong numbers in real workers: skipped, rolled back, stopped, and replicas that differ."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import number_faults
import pytest
from harness import TEXT, Run, make_config

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import BoardState
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART, EXIT_SAVED, Action, Kind, classify

ROOT = Path(__file__).parents[2]
STEPS = 24
FLAT = {"min_lr_ratio": 1.0, "warmup_steps": 0}


def job(path, *layouts, faults="", steps=STEPS, numbers=None, every=4, **more):
    path.mkdir(exist_ok=True)
    layouts = layouts or (ParallelLayout(dp=2), ParallelLayout())
    config = make_config(
        path,
        *layouts,
        steps=steps,
        optimizer=FLAT,
        numbers={"window": 8, **(numbers or {})},
        checkpoint={"every_steps": every, "keep": 20},
        **more,
    )
    run = Run(path, config)
    run.number_faults = faults
    return run


def record(run):
    return BoardState.decode(FileBoard(run.path / "board").get_state()[0]).numbers


def skipped(run):
    return [event.step for event in run.events("step.skipped")]


def ledger_skips(run, epoch):
    """Return the steps that each rank's ledger of `epoch` has as skipped."""
    found = []
    for path in sorted((run.path / "ledger").glob(f"e{epoch:06d}-*")):
        lines = map(json.loads, path.read_text().splitlines()[1:])
        found.append([line["step"] for line in lines if line.get("skipped")])
    return found


def exact(run, steps=STEPS):
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (steps, 0, 0)


@pytest.mark.scenario
def test_a_batch_that_makes_no_number_is_skipped_and_again_after_a_recovery(tmp_path):
    run = job(tmp_path, faults="nan@6")
    with run.epoch(1, 2) as group:
        group.until("step 9", lambda: group.beat(0).step >= 9)
        group.workers[1].kill()  # the newest checkpoint may be of step 4: before the skip
    run.number_faults = ""  # it would be fine now, but the decision stands
    run.train(2, 2)
    assert ledger_skips(run, 1) == [[6], [6]]
    [anomaly] = run.events("numbers.anomaly")
    assert (anomaly.step, anomaly.rank) == (6, 0)
    assert anomaly.fields["kind"] == "non_finite"
    assert (anomaly.fields["action"], anomaly.fields["recorded"]) == ("skip", True)
    assert record(run).passes_over(6)
    exact(run)
    assert all(isinstance(value, float) for value in run.curve().values()), "no NaN got through"
    resumed = run.events("trainer.started")[1].fields["resume_step"]
    assert skipped(run) == [6] * (1 if resumed >= 6 else 2)
    assert ledger_skips(run, 2) == ([[], []] if resumed >= 6 else [[6], [6]])


def test_a_skipped_step_leaves_parameters_and_moments_as_they_were(tmp_path):
    spoilt = job(tmp_path / "spoilt", ParallelLayout(dp=2), faults="nan@4", steps=4)
    shorter = job(tmp_path / "shorter", ParallelLayout(dp=2), steps=3)
    for run in (spoilt, shorter):
        run.train(1, 2)
    ours, theirs = spoilt.tensors(), shorter.tensors()
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name.startswith(("model.", "optim.")):
            assert ours[name].equal(theirs[name]), name
    assert (ours["trainer.step"], theirs["trainer.step"]) == (4, 3)
    exact(spoilt, 4)


def test_a_spike_rolls_back_and_the_batches_are_passed_over_for_good(tmp_path):
    numbers = {"loss_spike": "rollback", "rollback_steps": 3}
    run = job(tmp_path, faults="spike@14", numbers=numbers)
    run.train(1, 2, code=EXIT_SAVED)
    [rollback] = run.events("numbers.rollback")
    assert rollback.fields["back_to"] == 11
    assert rollback.fields["skipped"] == [12, 14]
    [anomaly] = run.events("numbers.anomaly")
    assert (anomaly.step, anomaly.fields["kind"]) == (14, "loss_spike")
    assert [e.fields["why"] for e in run.events("trainer.stopping")] == ["rollback"]
    assert max(commit.step for commit in run.commits()) == 8, "12 is void"
    run.train(2, 1)  # in another layout; the spike is still in the data, but is not fed
    assert run.events("trainer.started")[1].fields["resume_step"] == 8
    assert skipped(run) == [12, 13, 14]
    assert ledger_skips(run, 2) == [[12, 13, 14]]
    exact(run)
    assert max(run.curve().values()) < 10
    assert len(run.events("numbers.anomaly")) == 1


@pytest.mark.slow
def test_the_baseline_comes_back_with_the_state(tmp_path):
    """A spike right after a recovery is found: the steps before it have not been forgotten."""
    run = job(tmp_path, faults="spike@14", numbers={"loss_spike": "skip"}, every=12)
    with run.epoch(1, 2) as group:
        group.until("commit", lambda: any(c.step == 12 for c in run.commits()))
        group.workers[0].kill()
    run.train(2, 1)
    assert run.events("trainer.started")[1].fields["resume_step"] == 12
    last = run.events("numbers.anomaly")[-1]
    assert (last.epoch, last.step, last.fields["kind"]) == (2, 14, "loss_spike")
    exact(run)


@pytest.mark.slow
def test_without_a_checkpoint_a_rollback_becomes_a_skip(tmp_path):
    numbers = {"non_finite": "rollback", "rollback_steps": 3}
    run = job(tmp_path, faults="nan@8", numbers=numbers, every=1000)
    run.train(1, 2)
    assert skipped(run) == [8]
    assert "no checkpoint" in run.events("step.skipped")[0].fields["reason"]
    exact(run)


def test_a_stop_ends_with_93_the_reason_and_the_state_before_the_step(tmp_path):
    run = job(tmp_path, faults="nan@6", numbers={"non_finite": "stop"})
    run.train(1, 2, code=EXIT_DO_NOT_RESTART)
    assert run.commits()[-1].step == 5
    error = json.loads(run.error_file(1, 0).read_text())
    failure = classify(code=EXIT_DO_NOT_RESTART, signal=None, record=error)
    assert failure.action is Action.STOP
    assert failure.detail.startswith("NumbersError: HF711 step 6: ")


@pytest.mark.slow
def test_nothing_but_wrong_numbers_ends_the_job(tmp_path):
    faults = ",".join(f"nan@{step}" for step in range(3, 12))
    run = job(tmp_path, faults=faults, numbers={"max_skips": 3})
    run.train(1, 2, code=EXIT_DO_NOT_RESTART)
    assert skipped(run) == [3, 4, 5]
    message = json.loads(run.error_file(1, 0).read_text())["message"]["message"]
    assert "HF711 step 6" in message
    assert re.search(r"\bnumbers\.max_skips\b.* 3\b", message)


@pytest.mark.slow
def test_training_noise_alarms_nobody(tmp_path):
    """Real curves of tiny batches, which scatter more than any real job's."""
    numbers = {"loss_spike": "stop", "grad_spike": "stop", "window": 64}
    for name, lr in (("usual", 1e-3), ("high", 1e-2)):
        path = tmp_path / name
        path.mkdir()
        more = {"global_batch": 2, "seq_len": 8, "steps": 150}
        config = make_config(
            path, ParallelLayout(), optimizer={**FLAT, "lr": lr}, numbers=numbers, **more
        )
        run = Run(path, config)
        run.train(1, 1)
        assert not run.events("numbers.anomaly")
        assert len(run.curve()) == 150


# --- replicas ---------------------------------------------------------------------------------

REPLICATED = {
    "3 replicas": ParallelLayout(dp=3, dp_replicate=3),
    "3 replicas of 2 shards": ParallelLayout(dp=6, dp_replicate=3),
    "3 replicas, tp": ParallelLayout(dp=3, dp_replicate=3, tp=2),
}


@pytest.mark.parametrize(
    "name",
    [
        "3 replicas of 2 shards",
        pytest.param("3 replicas", marks=pytest.mark.slow),
        pytest.param("3 replicas, tp", marks=pytest.mark.slow),
    ],
)
def test_replicas_stay_bitwise_equal(tmp_path, name):
    layout = REPLICATED[name]
    run = job(
        tmp_path, layout, steps=6, numbers={"replica_check_steps": 2}, global_batch=6, every=3
    )
    run.train(1, layout.world_size)
    assert [e.step for e in run.events("replica.checked")] == [0, 2, 3, 4, 6]
    assert not run.events("replica.mismatch")


def test_a_flipped_bit_is_found_its_rank_named_and_the_states_since_are_void(tmp_path):
    layout = ParallelLayout(dp=3, dp_replicate=3)
    numbers = {"replica_check_steps": 5}
    run = job(
        tmp_path, layout, ParallelLayout(dp=2, dp_replicate=2), faults="bitflip@7:1",
        numbers=numbers, every=5,
    )  # fmt: skip
    with run.epoch(1, 3) as group:
        group.workers[1].join(timeout=50)
        assert group.workers[1].exitcode == 1, group.logs()
    [mismatch] = run.events("replica.mismatch")
    assert (mismatch.step, mismatch.rank) == (10, 0)
    assert mismatch.fields["ranks"] == [1]
    assert mismatch.fields["group"] == [0, 1, 2]
    assert mismatch.fields["named"] is True
    assert mismatch.fields["back_to"] == 5
    assert mismatch.fields["tensor"].startswith("model.")
    error = json.loads(run.error_file(1, 1).read_text())
    failure = classify(code=1, signal=None, record=error)
    assert (failure.kind, failure.action) == (Kind.CORRUPTION, Action.EVICT)
    assert re.search(r"\brank 1\b.*\b0, 1, 2\b", failure.detail)
    assert [commit.step for commit in run.commits()] == [5], "10 was checked before its save"
    assert not record(run).allows(1, 6)
    run.train(2, 2)
    assert run.events("trainer.started")[1].fields["resume_step"] == 5
    assert len(run.events("replica.mismatch")) == 1
    exact(run)


@pytest.mark.slow
def test_of_two_replicas_both_are_suspects(tmp_path):
    layout = ParallelLayout(dp=2, dp_replicate=2)
    run = job(tmp_path, layout, faults="bitflip@3:1", numbers={"replica_check_steps": 4})
    run.train(1, 2, code=1)
    [mismatch] = run.events("replica.mismatch")
    assert (mismatch.fields["ranks"], mismatch.fields["named"]) == ([0, 1], False)
    assert mismatch.fields["back_to"] == 0
    for rank in (0, 1):
        error = json.loads(run.error_file(1, rank).read_text())
        failure = classify(code=1, signal=None, record=error)
        assert (failure.kind, failure.action) == (Kind.CORRUPTION, Action.RESTART)
        assert "0, 1" in failure.detail
    run.train(2, 2)
    exact(run)


# --- with agents ------------------------------------------------------------------------------

JOB = """\
name: numbers
model: {num_layers: 2, dim: 32, num_heads: 2, num_kv_heads: 1, ffn_dim: 64, vocab_size: 256}
layout: {dp: auto, dp_replicate: 4}
cluster: {nodes: 4, gpus_per_node: 1, gpu: cpu}
train: {seq_len: 32, global_batch: 12, steps: 24, precision: fp32, recompute: none}
data: {path: text.txt, format: text, tokenizer: bytes}
checkpoint: {every_s: null, every_steps: 4, keep: 20}
elastic: {min_nodes: 1, hang_ceiling_s: 40, start_ceiling_s: 80, join_timeout_s: 60}
"""


def run_with(tmp_path, monkeypatch, faults, *sets):
    """Run the job on emulated nodes whose zygotes have the faults; return its record."""
    (tmp_path / "path").mkdir()
    folder = str(Path(__file__).parent)
    (tmp_path / "path" / "sitecustomize.py").write_text(
        number_faults.SITECUSTOMIZE.format(folder=folder)
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'path'}{os.pathsep}{ROOT}")
    monkeypatch.setenv(number_faults.VARIABLE, faults)
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "job.yaml").write_text(JOB)
    run_dir = tmp_path / "run"
    options = [word for text in sets for word in ("--set", text)]
    done = subprocess.run(
        [sys.executable, "-m", "launcher.cli.main", "run", str(tmp_path / "job.yaml"),
         "--run-dir", str(run_dir), "--json", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["samples_lost"], summary["samples_repeated"]) == (0, 0)
    run = Run.__new__(Run)
    run.path = run_dir
    return run, summary


@pytest.mark.timeout(150)
def test_the_node_that_computes_wrong_is_excluded_and_the_job_goes_on(tmp_path, monkeypatch):
    run, _ = run_with(tmp_path, monkeypatch, "bitflip@9:2", "numbers.replica_check_steps=6")
    [mismatch] = run.events("replica.mismatch")
    # 12 is both a check and a save; the last that passed was before the save of 8.
    assert (mismatch.step, mismatch.fields["back_to"]) == (12, 8)
    formed = run.events("epoch.formed")
    culprit = formed[0].fields["members"][2]
    [evicted] = run.events("member.evicted")
    assert evicted.fields["member"] == culprit
    assert mismatch.fields["tensor"] in evicted.fields["reason"]
    assert set(formed[-1].fields["members"]) == set(formed[0].fields["members"]) - {culprit}
    kinds = {(e.node, e.fields["kind"]) for e in run.events("worker.exit") if e.fields["kind"]}
    assert (culprit, "corruption") in kinds
    started = run.events("trainer.started")[-1]
    assert started.fields["resume_step"] == 8, "snapshots of 9 to 12 were at hand, but void"
    assert len(run.events("replica.mismatch")) == 1


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_agents_carry_a_rollback(tmp_path, monkeypatch):
    sets = ("numbers.non_finite=rollback", "numbers.rollback_steps=2", "layout.dp_replicate=1")
    run, summary = run_with(tmp_path, monkeypatch, "nan@11", *sets, "cluster.nodes=2")
    assert (summary["steps"], summary["steps_skipped"]) == (24, 2)
    [rollback] = run.events("numbers.rollback")
    assert (rollback.fields["back_to"], rollback.fields["skipped"]) == (9, [10, 11])
    assert [e.fields["reason"] for e in run.events("epoch.formed")][1:] == ["workers left"]
    started = run.events("trainer.started")[-1]
    # From storage, or from memory where the snapshot before the last is whole; 10 is void.
    assert started.fields["resume_step"] in (8, 9)
    assert skipped(run) == [10, 11]
    assert not run.events("worker.exit") or all(
        e.fields["kind"] in (None, "") for e in run.events("worker.exit")
    )
