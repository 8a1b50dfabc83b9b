"""How a trainer ends and goes on: requests, deaths, the last step, users' mistakes."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from harness import SHAPE, Run, make_config

from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import Mixtral
from elastic_trainer.record.failures import EXIT_DO_NOT_RESTART, EXIT_SAVED
from elastic_trainer.worker.heartbeat import Request, Section

B = 12
MANY = 5000
"""Steps that no test waits for."""


def elastic(path, *, steps=MANY, **more):
    """A job for 1, 2 or 3 workers whose learning rate does not depend on its last step."""
    path.mkdir(exist_ok=True)
    layouts = [ParallelLayout(dp=dp) for dp in (1, 2, 3)]
    adam = {"min_lr_ratio": 1.0}
    return Run(path, make_config(path, *layouts, steps=steps, optimizer=adam, **more))


def with_steps(run, steps):
    return make_config(
        run.path,
        *(ParallelLayout(dp=dp) for dp in (1, 2, 3)),
        steps=steps,
        optimizer={"min_lr_ratio": 1.0},
    )


def stop_after(run, epoch, num_nodes, step, request=Request.STOP):
    """Ask the last rank alone, once `step` is done; return the step the group stopped at."""
    with run.epoch(epoch, num_nodes) as group:
        group.until(f"step {step}", lambda: group.beat(0).step >= step)
        group.ask(num_nodes - 1, request)
        assert group.wait() == [EXIT_SAVED] * num_nodes, group.logs()
        beats = [group.beat(rank) for rank in range(num_nodes)]
    assert {beat.section for beat in beats} == {Section.STOPPED}
    assert len({beat.step for beat in beats}) == 1
    assert beats[0].step >= step
    return beats[0].step


def exact(run, steps, redone=0):
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (steps, 0, 0)
    assert account.steps_redone == redone


@pytest.mark.scenario
def test_a_stopped_job_goes_on_with_the_next_batch_in_any_layout(tmp_path):
    run = elastic(tmp_path / "run")
    stopped = stop_after(run, 1, 2, 2)
    assert [commit.step for commit in run.commits()] == [stopped]
    assert [e.fields["why"] for e in run.events("trainer.stopping")] == ["stop"]
    exact(run, stopped)
    steps = stopped + 10
    alone = tmp_path / "alone"
    shutil.copytree(run.path, alone)
    text = run.config.data.path  # the copy reads the same file: its name is in the cache's key
    other = Run(alone, with_steps(run, steps))
    other.train(2, 1)
    run.write(with_steps(run, steps))
    run.train(2, 3)
    assert run.config.data.path == text
    for each in (run, other):
        exact(each, steps)
        assert each.fed() == {k: list(range((k - 1) * B, k * B)) for k in range(1, steps + 1)}
        assert [e.step for e in each.events("step.completed")] == list(range(1, steps + 1))
    for key in ("loss", "grad_norm"):
        ours, theirs = run.curve(key), other.curve(key)
        for step in range(stopped + 1, steps + 1):
            assert ours[step] == pytest.approx(theirs[step], rel=2e-6), (key, step)
    assert run.curve("lr")[steps] == run.config.train.optimizer.lr


def test_steps_last_as_long_as_the_loop(tmp_path):
    """Snapshots, saves and validation are between two steps, and in the time of the second."""
    run = elastic(tmp_path / "run", steps=40)
    run.train(1, 2)
    first, *others = run.events("step.completed")
    assert len(others) == 39
    wall = others[-1].t_mono - first.t_mono
    assert sum(event.fields["step_s"] for event in others) == pytest.approx(wall, rel=0.01)


def test_experts_go_on_with_another_ep(tmp_path):
    """From ep 2 on two workers to three that all keep every expert, and to one process."""
    shape = Mixtral(**dataclasses.asdict(SHAPE), num_experts=4, experts_per_token=2)
    layouts = (ParallelLayout(), ParallelLayout(dp=2, ep=2), ParallelLayout(dp=3))

    def config(path, steps):
        adam = {"min_lr_ratio": 1.0, "lr": 3e-4}
        return make_config(path, *layouts, model=shape, steps=steps, optimizer=adam)

    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", config(tmp_path / "run", MANY))
    steps = stop_after(run, 1, 2, 2) + 8
    shutil.copytree(run.path, tmp_path / "alone")
    other = Run(tmp_path / "alone", config(tmp_path / "alone", steps))
    other.train(2, 1)
    run.write(config(run.path, steps))
    run.train(2, 3)
    for each in (run, other):
        exact(each, steps)
    for key in ("loss", "grad_norm"):
        ours, theirs = run.curve(key), other.curve(key)
        for step in theirs:
            assert ours[step] == pytest.approx(theirs[step], rel=2e-6), (key, step)
    assert run.tensors().keys() == other.tensors().keys()


def test_growth_is_a_stop_of_another_name_also_while_saves_are_under_way(tmp_path):
    run = elastic(tmp_path, checkpoint={"every_steps": 1})
    stopped = stop_after(run, 1, 2, 3, Request.GROW)
    assert [e.fields["why"] for e in run.events("trainer.stopping")] == ["growth"]
    assert run.commits()[-1].step == stopped
    for failure in run.events("checkpoint.failed"):
        assert "skipped" in failure.fields["reason"]
    exact(run, stopped)


def test_saves_on_request_do_not_disturb(tmp_path):
    run = elastic(tmp_path)
    with run.epoch(1, 2) as group:
        for count in (1, 2):
            group.ask(1, Request.SAVE)
            group.until("save", lambda n=count: len(run.commits()) == n)
        group.ask(0, Request.STOP)
        assert group.wait() == [EXIT_SAVED] * 2
    steps = [commit.step for commit in run.commits()]
    assert len(steps) == 3  # once for each request, and when leaving
    assert steps == sorted(set(steps))
    assert [e.step for e in run.events("checkpoint.committed")] == steps
    assert all(e.fields["save_s"] > 0 for e in run.events("checkpoint.committed"))
    exact(run, steps[-1])


def test_killed_workers_cost_the_steps_since_the_checkpoint_only(tmp_path):
    run = elastic(tmp_path, checkpoint={"every_steps": 4})
    with run.epoch(1, 3) as group:
        group.until("commit", lambda: len(run.commits()) > 0)
        group.workers[2].kill()
        # Without its death notice gloo may wait long: agents kill the rest.
    committed = run.commits()[-1].step
    assert committed % 4 == 0
    done = max(run.curve())
    stopped = stop_after(run, 2, 2, committed + 2)
    account = run.audit()
    assert (account.steps, account.lost, account.repeated) == (stopped, 0, 0)
    assert account.steps_redone in {done - committed, done - committed - 1}
    started = run.events("trainer.started")
    assert [e.fields["resume_step"] for e in started] == [0, committed]
    assert [e.fields["restored_from"] for e in started] == [None, "storage"]


def test_a_finished_job_started_again_has_nothing_to_do(tmp_path):
    run = elastic(tmp_path, steps=3)
    run.train(1, 2)
    commits, tensors = run.commits(), run.tensors()
    run.train(2, 1)
    assert run.commits() == commits
    assert run.tensors().keys() == tensors.keys()
    assert [e.epoch for e in run.events("step.completed")] == [1, 1, 1]
    finished = run.events("trainer.finished")
    assert [e.step for e in finished] == [3, 3]
    assert finished[0].fields["loss"] == run.curve()[3]
    # Nothing draws from the generator, and its state is saved as the seed makes it.
    seeded = torch.Generator().manual_seed(run.config.train.seed).get_state()
    assert torch.equal(tensors["trainer.rng"], seeded)
    exact(run, 3)


def test_a_loss_that_is_no_number_leaves_a_readable_record(tmp_path):
    layout = ParallelLayout()
    config = make_config(tmp_path, layout, steps=3, optimizer={"lr": 1e30, "warmup_steps": 0})
    run = Run(tmp_path, config)
    run.train(1, 1)
    assert {e.fields["grad_norm"] for e in run.events("step.skipped")} <= {"nan", "inf"}
    assert run.events("step.skipped")[-1].step == 3
    for path in (tmp_path / "events").iterdir():
        for line in path.read_text().splitlines():
            json.loads(line, parse_constant=pytest.fail)


def refused(run, num_nodes=1):
    """Return the message of an epoch that must end with exit code 93."""
    run.train(1, num_nodes, code=EXIT_DO_NOT_RESTART)
    message = json.loads(run.error_file(1, 0).read_text())["message"]["message"]
    assert message.split(": ", 1)[1] in (run.path / "logs" / "e1-0").read_text()
    return message


def test_a_missing_corpus_is_not_tried_again(tmp_path):
    path = tmp_path / "nowhere"
    message = refused(
        Run(tmp_path, make_config(tmp_path, ParallelLayout(), data={"path": str(path)}))
    )
    assert message.startswith("DataError: HF701 data.path: ")
    assert str(path) in message


def test_a_token_beyond_the_vocabulary_is_not_tried_again(tmp_path):
    path = tmp_path / "corpus.bin"
    np.full(5000, 256, dtype="<u2").tofile(path)
    data = {"path": str(path), "format": "nanogpt"}
    message = refused(Run(tmp_path, make_config(tmp_path, ParallelLayout(dp=2), data=data)), 2)
    assert message.startswith(f"DataError: HF703 data.path: {path} ")
    assert "256" in message


@pytest.mark.scenario
@pytest.mark.parametrize("layout", [ParallelLayout(dp=2), ParallelLayout(pp=2)], ids=str)
def test_workers_that_were_prepared_train_as_others_do(tmp_path, layout):
    """A step was tried before the first one: no weight, moment or number of it may stay.

    One that is urgent tries none: it does what others do that are not prepared, in their order.
    """
    runs = []
    for prepared in ("", "all", "urgent"):
        path = tmp_path / f"prepared {prepared}"
        path.mkdir()
        config = make_config(path, layout, steps=6, checkpoint={"every_steps": 3})
        run = Run(path, config)
        run.prepared = prepared
        stop_after(run, 1, 2, 3)  # from initial values
        run.train(2, 2)  # from storage
        runs.append(run)
    plain, *others = runs
    for prepared in others:
        for key in ("loss", "grad_norm"):
            assert plain.curve(key) == prepared.curve(key)
        theirs = prepared.tensors()
        for name, tensor in plain.tensors().items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0, equal_nan=True)
