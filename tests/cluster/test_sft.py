"""Fine-tuning on packed examples, and validation: the same in every layout, and after kills."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest
from exactness import BOUND, Case, compare, identical, trained
from harness import Run, make_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.worker.heartbeat import Request, Section

STEPS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Sections of a job: examples of 4 to 49 tokens, of which one to all but one count."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(5)
    for name, number in (("train.jsonl", 400), ("held-out.jsonl", 60)):
        lines = []
        for _ in range(number):
            length = rng.randrange(4, 50)
            tokens = [rng.randrange(1, 12) * (1 + i % 3) for i in range(length)]
            first = rng.randrange(1, length)
            lines.append({"input_ids": tokens, "labels": [-100] * first + tokens[first:]})
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return {
        "data": {"path": str(folder / "train.jsonl"), "format": "sft"},
        "validation": {"path": str(folder / "held-out.jsonl"), "every_steps": 4},
    }


def validated(run):
    """Step -> loss of its last validation, and how often each was done."""
    events = run.events("validation.completed")
    steps = [event.step for event in events]
    losses = {event.step: event.fields["loss"] for event in events}
    return losses, {step: steps.count(step) for step in steps}


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("one") / "run", Case(ParallelLayout()), **data)


def test_one_process_learns_and_says_what_counts(one_process):
    losses, (validations, times) = one_process.curve(), validated(one_process)
    assert losses[STEPS] < losses[1] - 0.1
    assert list(validations) == [4, 8, STEPS]
    assert set(times.values()) == {1}
    assert validations[STEPS] < validations[4]
    for event in one_process.events("step.completed"):
        assert 0 < event.fields["loss_tokens"] < event.fields["tokens"] == 480
    counts = {e.fields["loss_tokens"] for e in one_process.events("step.completed")}
    assert len(counts) > 1  # batches differ, so a mean of means would be another loss


LAYOUTS = [
    Case(ParallelLayout(dp=2), micro_batch=2),
    Case(ParallelLayout(tp=2), micro_batch=5),
    Case(ParallelLayout(cp=2), micro_batch=5),
    Case(ParallelLayout(pp=3), micro_batch=2),  # a rank that is neither first nor last
    Case(ParallelLayout(pp=2, cp=2), interleave=2, micro_batch=1),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case(ParallelLayout(dp=3, dp_replicate=3), micro_batch=1),
            Case(ParallelLayout(cp=3), micro_batch=2),
            Case(ParallelLayout(pp=2, tp=2), micro_batch=2),
            Case(ParallelLayout(dp=2, cp=2), micro_batch=2),
            Case(ParallelLayout(cp=2, tp=2), micro_batch=2),
        )
    ),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_layout_agrees_with_one_process(case, data, one_process, tmp_path):
    run = trained(tmp_path / "run", case, **data)
    errors = compare(run, one_process)
    assert errors.loss <= BOUND
    assert errors.grad_norm <= BOUND
    assert errors.gradients <= 5e-6
    (ours, times), (theirs, _) = validated(run), validated(one_process)
    assert set(times.values()) == {1}
    assert ours == pytest.approx(theirs, rel=BOUND)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_is_the_same_bit_for_bit(recompute, data, tmp_path):
    case = Case(ParallelLayout(cp=2), micro_batch=5)
    plain, other = (
        trained(tmp_path / name, case, steps=3, recompute=name, **data)
        for name in ("none", recompute)
    )
    assert identical(other, plain)
    assert validated(other) == validated(plain)


@pytest.mark.parametrize(
    "case",
    [Case(ParallelLayout(dp=2), micro_batch=1), Case(ParallelLayout(pp=2), interleave=2)],
    ids=str,
)
def test_training_is_the_same_bit_for_bit_without_validation(case, data, tmp_path):
    often = {**data, "validation": {**data["validation"], "every_steps": 1, "batches": 1}}
    run = trained(tmp_path / "validated", case, steps=4, **often)
    plain = trained(tmp_path / "plain", case, steps=4, data=data["data"])
    assert identical(run, plain)
    assert list(validated(run)[0]) == [1, 2, 3, 4]


def test_any_format_is_validated(tmp_path):
    """The last windows fill no batch: each counts once."""
    (tmp_path / "held-out.txt").write_text("".join(f"{i} and {i + 1}; " for i in range(70)))
    held_out = {"path": str(tmp_path / "held-out.txt"), "every_steps": 2}
    one, two = (
        trained(tmp_path / str(case), case, steps=2, validation=held_out)
        for case in (Case(ParallelLayout()), Case(ParallelLayout(dp=2), micro_batch=2))
    )
    assert validated(two)[0] == pytest.approx(validated(one)[0], rel=BOUND)
    (event,) = one.events("validation.completed")
    windows = ((tmp_path / "held-out.txt").stat().st_size + 1 - 1) // 48
    assert windows % 10
    assert event.fields["tokens"] == 48 * windows
    assert [e.step for e in one.events("evaluation.started")] == [2]


# --- kills ----------------------------------------------------------------------------------


def job(path, *layouts, data, **checkpoint):
    sizes = {"seq_len": 48, "global_batch": 10, "steps": STEPS, "micro_batch": 1}
    rate = {"lr": 3e-4}
    path.mkdir()
    config = make_config(path, *layouts, optimizer=rate, checkpoint=checkpoint, **sizes, **data)
    return Run(path, config)


def ended_in_validation(run, epoch, num_nodes, step, end):
    """Start an epoch, and call `end` once its ranks validate `step`; return the exit codes."""
    with run.epoch(epoch, num_nodes) as group:
        group.until(
            f"the validation of step {step}",
            lambda: (
                (beat := group.beat(0)).section is Section.EVALUATING
                and beat.step == step
                and beat.place > 0
            ),
        )
        end(group)
        return group.wait()


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    run = job(tmp_path_factory.mktemp("whole") / "run", ParallelLayout(dp=2), data=data)
    run.train(1, 2)
    return run


def kill(group):
    for worker in group.workers:
        worker.kill()


@pytest.mark.parametrize("nodes", [2, 1])
@pytest.mark.parametrize("every_steps", [3, 4], ids=["saved before", "saved there"])
def test_a_kill_in_a_validation_loses_nothing(every_steps, nodes, data, undisturbed, tmp_path):
    layouts = [ParallelLayout(dp=2), ParallelLayout()]
    run = job(tmp_path / "run", *layouts, data=data, every_steps=every_steps)
    ended_in_validation(run, 1, 2, 4, kill)
    assert not run.events("validation.completed")
    run.train(2, nodes)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (STEPS, 0, 0)
    (losses, times), (expected, _) = validated(run), validated(undisturbed)
    assert set(times.values()) == {1}
    if nodes == 2:
        assert run.curve() == undisturbed.curve()
        assert losses == expected
    else:
        assert run.curve() == pytest.approx(undisturbed.curve(), rel=BOUND)
        assert losses == pytest.approx(expected, rel=BOUND)


def test_a_stop_ends_a_validation_and_the_next_epoch_does_it_anew(data, undisturbed, tmp_path):
    run = job(tmp_path / "run", ParallelLayout(dp=2), data=data)
    codes = ended_in_validation(run, 1, 2, 4, lambda group: group.ask(1, Request.STOP))
    assert codes == [91, 91]
    assert not run.events("validation.completed")
    assert [commit.step for commit in run.commits()] == [4]
    run.train(2, 2)
    assert [event.fields["resume_step"] for event in run.events("trainer.started")] == [0, 4]
    assert run.curve() == undisturbed.curve()
    assert validated(run) == validated(undisturbed)


def test_the_last_step_is_saved_before_it_is_validated(data, undisturbed, tmp_path):
    run = job(tmp_path / "run", ParallelLayout(dp=2), data=data)
    ended_in_validation(run, 1, 2, STEPS, kill)
    assert [commit.step for commit in run.commits()] == [STEPS]
    run.train(2, 2)
    assert [commit.step for commit in run.commits()] == [STEPS]
    assert validated(run) == validated(undisturbed)


def test_another_validation_corpus_is_refused(data, tmp_path):
    run = job(tmp_path / "run", ParallelLayout(), data=data)
    run.train(1, 1)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "a", "completion": "b"}\n')
    validation = dataclasses.replace(run.config.validation, path=str(other))
    run.write(dataclasses.replace(run.config, validation=validation))
    run.train(2, 1, code=93)
    message = json.loads(run.error_file(2, 0).read_text())["message"]["message"]
    assert message.startswith("DataError: HF706 validation.path: ")
