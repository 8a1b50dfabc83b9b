"""A job scaled down to one machine, and what is said of each failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from elastic_trainer.plan.models import PRESETS
from elastic_trainer.record.events import Event
from launcher.cli.rehearse import FAILURES
from launcher.local.faults import parse_faults
from launcher.local.rehearse import MOST_NODES, MOST_WORKERS, scaled
from launcher.local.verdicts import (
    Attempts,
    Failing,
    Level,
    Rehearsed,
    RowVerdict,
    clocked,
    faults_of,
    passed,
    sets_of,
    verdict,
)
from launcher.plan.clock import Clock
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.spec.errors import UserError

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
CORPUS = Path("/nowhere/corpus.txt")


def small(spec):
    return load_spec(spec, scaled(spec, CORPUS))


@pytest.mark.parametrize("job", EXAMPLES, ids=lambda path: path.stem)
def test_examples_fit_one_machine_and_keep_their_parallelism(job):
    spec = load_spec(job)
    found = small(spec)
    assert found.device == "cpu"
    assert found.cluster.nodes <= MOST_NODES
    assert found.cluster.nodes * found.cluster.gpus_per_node <= MOST_WORKERS
    assert found.command == spec.command
    for axis in ("tp", "pp"):
        assert (getattr(found.layout, axis) > 1) == (getattr(spec.layout, axis) > 1)
    before, after = plan(spec).ladder, plan(found).ladder
    assert (after.min_nodes < after.max_nodes) == (before.min_nodes < before.max_nodes)


def test_what_is_small_is_neither_compiled_nor_in_float8():
    job = next(path for path in EXAMPLES if path.stem == "llama3-8b")
    found = small(load_spec(job, ["train.float8=true", "train.compile=true"]))
    assert (found.train.compile, found.train.float8) == (False, False)


def test_the_jobs_own_checkpoints_and_corpus_are_left_alone():
    spec = load_spec(next(path for path in EXAMPLES if path.stem == "llama3-8b"))
    found = small(spec)
    assert found.checkpoint.dir is None
    assert found.data.path == str(CORPUS)
    assert found.data_paths.keys() == {"data.path"}


@given(
    degrees=st.fixed_dictionaries({
        "tp": st.sampled_from([1, 2, 8]),
        "pp": st.sampled_from([1, 2, 4]),
        "cp": st.sampled_from([1, 2, 4]),
    }),
    replicas=st.sampled_from([1, 2, 6]),
    model=st.sampled_from(sorted(set(PRESETS) - {"tiny"})),
    interleave=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)  # fmt: skip
def test_whatever_is_planned_can_be_scaled_down(degrees, replicas, model, interleave, recompute):
    pp = degrees["pp"]
    layout = {**degrees, "dp": "auto"}
    if pp > 1 and interleave > 1:
        layout |= {"schedule": "interleaved", "interleave": interleave}
    job = {
        "name": "any",
        "model": model,
        "layout": layout,
        "cluster": {
            "nodes": replicas * degrees["tp"] * pp * degrees["cp"],
            "gpus_per_node": 8,
            "gpu": "H200-141GB-SXM",
        },
        "train": {
            "seq_len": 8192,
            "global_batch": 4096,
            "micro_batch": 1,
            "steps": 10,
            "recompute": recompute,
            "optimizer": {"lr": 1e-4},
        },
        "data": {"path": "corpus"},
    }
    try:
        spec = load_spec(job)
    except UserError:
        reject()  # what the rules refuse is no job
    found = small(spec)
    assert found.full_layout.world_size <= MOST_WORKERS
    assert plan(found).ladder.max_nodes == found.cluster.nodes


# -- verdicts --------------------------------------------------------------------------------

SUMMARY = {
    "steps": 60,
    "steps_asked": 60,
    "startup_s": 2.0,
    "final_loss": 2.0,
    "checkpoints_committed": [20, 40, 60],
    "checkpoints_failed": 0,
    "samples_lost": 0,
    "samples_repeated": 0,
    "committed_steps_redone": 0,
    "steps_redone": 0,
    "nodes_at_end": ["node0", "node1"],
    "failures": [{"kind": "hang", "recovered_s": 1.5}],
}
STAGE = Rehearsed(summary=SUMMARY, nodes=3, smallest=1, is_script=False)
INJECTED = Event(event="fault.injected", t_unix=10.0, t_mono=0.0, step=20, node="node1")
ENDED = Event(event="run.ended", t_unix=13.5, t_mono=0.0, fields={"code": 91})


def judged(failing, *events, codes=(0,), stage=STAGE, **changes):
    found = Attempts(codes=codes, summary={**SUMMARY, **changes}, events=[INJECTED, *events])
    return verdict(failing, stage, found, ())


def test_the_command_knows_the_same_failures():
    assert tuple(Failing) == FAILURES


@pytest.mark.parametrize("failing", Failing)
@pytest.mark.parametrize("is_script", [False, True])
@pytest.mark.parametrize("smallest", [1, 3])
def test_faults_are_such_as_a_run_takes(failing, is_script, smallest):
    stage = replace(STAGE, is_script=is_script, smallest=smallest)
    texts = faults_of(failing, stage)
    parsed = parse_faults(texts, num_nodes=3, num_workers=3, steps=60)
    assert [str(fault) for fault in parsed] == list(texts)
    comes_back = any(fault.action == "return-node" for fault in parsed)
    assert comes_back == (smallest == 3 and failing in {Failing.NODE, Failing.COORDINATOR})


def test_the_disk_is_full_while_a_save_falls_due_and_free_before_the_next():
    assert faults_of(Failing.DISK, STAGE) == ("fill-disk:128@20", "free-disk@50")


@pytest.mark.parametrize(
    ("failing", "changes", "level"),
    [
        (Failing.RANK, {}, Level.OK),
        (Failing.RANK, {"codes": (93,)}, Level.FAIL),
        (Failing.RANK, {"failures": []}, Level.FAIL),
        (Failing.RANK, {"samples_lost": 1}, Level.FAIL),
        (Failing.RANK, {"samples_repeated": 2}, Level.FAIL),
        (Failing.RANK, {"committed_steps_redone": 1}, Level.FAIL),
        (Failing.RANK, {"final_loss": 2.01}, Level.FAIL),
        (Failing.RANK, {"final_loss": 2.0001}, Level.OK),
        (Failing.RANK, {"steps": 59}, Level.FAIL),
        (Failing.HANG, {}, Level.OK),
        (Failing.HANG, {"failures": [{"kind": "killed", "recovered_s": 1.0}]}, Level.FAIL),
        (Failing.DISK, {"checkpoints_failed": 1}, Level.OK),
        (Failing.DISK, {}, Level.WARN),
        (Failing.DISK, {"checkpoints_committed": [20]}, Level.FAIL),
        (Failing.SLOW, {}, Level.FAIL),
    ],
)
def test_what_must_hold_afterwards(failing, changes, level):
    assert judged(failing, **changes).level is level


@pytest.mark.parametrize(
    ("number", "level"), [(9, Level.OK), (None, Level.OK), (6, Level.WARN), (11, Level.WARN)]
)
def test_a_crash_that_nobody_injected_is_said(number, level):
    fields = {"signal": number}
    left = Event(event="worker.exit", t_unix=9.0, t_mono=0.0, step=10, node="n2", fields=fields)
    found = judged(Failing.NODE, left)
    assert found.level is level
    assert ("n2" in found.text) == (level is Level.WARN)


def test_a_slow_rank_must_be_named():
    def named(node):
        return Event(
            event="worker.slow", t_unix=11.0, t_mono=0.0, fields={"member": node, "ratio": 3.0}
        )

    assert judged(Failing.SLOW, named("node1")).level is Level.OK
    assert judged(Failing.SLOW, named("node1"), named("node2")).level is Level.FAIL
    assert judged(Failing.SLOW, named("node2")).level is Level.FAIL


def test_a_slow_rank_has_a_minute_to_be_named():
    [text] = sets_of(Failing.SLOW, replace(STAGE, summary={**SUMMARY, "wall_s": 14.0}))
    assert text == "train.steps=154"  # 20, and 60 s of 0.25 + 0.2 s
    slow = replace(STAGE, summary={**SUMMARY, "wall_s": 602.0})
    assert sets_of(Failing.SLOW, slow) == ("train.steps=60",)
    assert sets_of(Failing.RANK, slow) == ()


def test_a_fault_that_never_struck_proves_nothing():
    found = Attempts(codes=(0,), summary=SUMMARY, events=[])
    assert verdict(Failing.RANK, STAGE, found, ()).level is Level.FAIL


@pytest.mark.parametrize(
    ("number", "after_s", "codes", "level"),
    [
        (None, 2.0, (91, 0), Level.OK),
        (9, 0.1, (91, 0), Level.OK),  # no handler: it saves by itself, now and then
        (9, 3.0, (91, 0), Level.FAIL),
        (None, 2.0, (1, 0), Level.FAIL),
        (None, 2.0, (91, 93), Level.FAIL),
    ],
)
def test_a_preempted_job_saves_in_time_and_goes_on(number, after_s, codes, level):
    about = {"t_unix": 12.0, "node": "node0"}
    asked = {"pid": 7, "grace_s": 3.0}
    signalled = Event(event="worker.signalled", t_mono=50.0, fields=asked, **about)
    ended = {"pid": 7, "signal": number}
    left = Event(event="worker.exit", t_mono=50.0 + after_s, fields=ended, **about)
    events = (signalled, left, ENDED)
    row = judged(Failing.PREEMPTION, *events, codes=codes)
    assert row.level is level


CLOCK = Clock(save_s=30, shutdown_s=60, lead_s=150, limit_s=None)
ROW = RowVerdict(failing=Failing.PREEMPTION, level=Level.OK, text="ended")


@pytest.mark.parametrize(
    ("predicted_s", "is_script", "level"),
    [(30.0, False, Level.OK), (31.0, False, Level.WARN), (31.0, True, Level.OK)],
)
def test_the_jobs_own_size_counts(predicted_s, is_script, level):
    assert clocked(ROW, CLOCK, predicted_s, is_script=is_script).level is level
    failed = replace(ROW, level=Level.FAIL)
    assert clocked(failed, CLOCK, predicted_s, is_script=is_script).level is Level.FAIL


def test_a_rehearsal_of_nothing_is_not_passed():
    assert passed([ROW])
    assert passed([ROW, replace(ROW, level=Level.NOT_HERE)])
    assert not passed([replace(ROW, level=Level.NOT_HERE)])
    assert not passed([ROW, replace(ROW, level=Level.FAIL)])
    assert not passed([])
