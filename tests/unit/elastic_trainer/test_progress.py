from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from elastic_trainer.agent.workers.workers import has_run
from elastic_trainer.record.script_steps import Shown, StepSource, restart
from elastic_trainer.worker.heartbeat import Heartbeat, Request, Section
from elastic_trainer.worker.progress import StepCounter, own_count


@pytest.fixture
def counter(tmp_path: Path):
    heartbeat = Heartbeat(tmp_path / "beat", create=True)
    counter = StepCounter(heartbeat)
    counter.count_optimizer_steps()
    yield counter, heartbeat
    counter.report()  # takes the hook away
    heartbeat.close()


def an_optimizer(kind: str = "SGD", **more) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    return getattr(torch.optim, kind)([parameter], lr=0.1, **more)


def test_the_steps_of_an_optimizer_are_counted(counter) -> None:
    _, heartbeat = counter
    optimizer = an_optimizer()
    assert heartbeat.read().counter == 0  # not watched before it begins
    for _ in range(3):
        optimizer.step()
    beat = heartbeat.read()
    assert (beat.step, beat.section, beat.listens) == (3, Section.STEP, False)


def test_of_several_optimizers_the_busiest_counts_and_all_show_progress(counter) -> None:
    _, heartbeat = counter
    slow, busy = an_optimizer(), an_optimizer()
    for _ in range(2):
        slow.step()
        busy.step()
        busy.step()
    beat = heartbeat.read()
    assert beat.counter == 6
    assert beat.step in (4, 5)


def test_another_optimizer_goes_on_where_the_last_one_ended(counter) -> None:
    _, heartbeat = counter
    first = an_optimizer()
    for _ in range(5):
        first.step()
    del first
    gc.collect()
    an_optimizer().step()
    assert heartbeat.read().step == 6


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Adam", {}),
        ("AdamW", {"fused": True}),
        ("AdamW", {"foreach": True, "amsgrad": True}),
        ("AdamW", {"capturable": False}),
        ("Adagrad", {}),
        ("RMSprop", {}),
    ],
)
def test_an_optimizer_that_was_loaded_tells_where_the_script_resumed(counter, kind, more) -> None:
    first, heartbeat = counter
    before = an_optimizer(kind, **more)
    for _ in range(40):
        before.step()
    beat = heartbeat.read()
    assert (beat.step, beat.from_start) == (40, False)
    loaded, fresh = an_optimizer(kind, **more), an_optimizer()
    loaded.load_state_dict(before.state_dict())
    first.report(0)
    again = StepCounter(heartbeat)  # as in the worker that follows
    again.count_optimizer_steps()
    fresh.step()
    loaded.step()
    again.report()
    assert heartbeat.read().step == 41


def test_an_optimizer_that_does_not_count_says_nothing_of_where_it_resumed(counter) -> None:
    steps, heartbeat = counter
    optimizer = an_optimizer("SGD", momentum=0.9)
    for _ in range(3):
        optimizer.step()
    beat = heartbeat.read()
    assert (beat.step, beat.from_start) == (3, True)
    steps.report(100)
    assert not heartbeat.read().from_start


def test_a_worker_says_with_which_step_it_began_and_how_that_is_known(counter) -> None:
    steps, heartbeat = counter
    fresh = an_optimizer("Adam")
    for _ in range(3):
        fresh.step()
    beat = heartbeat.read()
    assert (beat.first, beat.source) == (1, StepSource.OPTIMIZER)
    loaded = an_optimizer("Adam")
    state = fresh.state_dict()
    state["state"][0]["step"] = torch.tensor(50.0)
    loaded.load_state_dict(state)
    loaded.step()
    beat = heartbeat.read()
    assert (beat.first, beat.source) == (51, StepSource.OPTIMIZER), "another one was not loaded"
    an_optimizer("SGD").step()
    assert heartbeat.read().source is StepSource.OPTIMIZER
    steps.report(0)
    assert heartbeat.read().first == 0, "no step yet"
    steps.report(70)
    steps.report(71)
    beat = heartbeat.read()
    assert (beat.first, beat.source) == (70, StepSource.SCRIPT)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_a_second_training_in_a_worker_tells_nothing_of_where_it_resumed(counter, kind) -> None:
    _, heartbeat = counter
    first = an_optimizer(kind)
    for _ in range(12):
        first.step()
    del first
    gc.collect()
    an_optimizer("Adam").step()
    assert heartbeat.read().source is StepSource.UNSURE


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [  # (newest, origin, from scratch in a row, source), (first, source) -> (redone, from scratch)
        ((76, 1, 0, "optimizer"), (1, "optimizer"), (76, 1)),
        ((76, 1, 1, "script"), (1, "script"), (76, 2)),
        ((76, 1, 1, "optimizer"), (51, "optimizer"), (26, 0)),
        ((76, 1, 0, "optimizer"), (77, "optimizer"), (0, 0)),
        ((70, 10, 0, "output"), (10, "output"), (61, 1)),
        ((5070, 5001, 0, "optimizer"), (5001, "optimizer"), (70, 1)),
        ((4, 1, 0, "optimizer"), (1, "optimizer"), (4, 0)),
        ((76, 1, 1, "unsure"), (1, "unsure"), (None, 0)),
        ((76, 1, 1, "script"), (1, "optimizer"), None),
        ((76, 1, 1, "optimizer"), (1, "script"), None),
    ],
)
def test_a_restart_is_from_scratch_where_it_begins_as_the_run_did(before, now, expected) -> None:
    newest, origin, count, source = before
    was = Shown(
        epoch=1,
        step=newest,
        first=origin,
        origin=origin,
        source=StepSource[source.upper()],
        from_scratch=count,
    )
    first, source = now
    found = restart(
        was,
        Shown(epoch=2, step=first, first=first, origin=first, source=StepSource[source.upper()]),
    )
    assert (found and (found.redone, found.from_scratch)) == expected
    if found is not None and expected[0] is not None and expected[0] >= 5:
        assert found.now.from_scratch == expected[1], "a resume begins the count anew"
    if found is not None:
        assert found.now.origin == origin


def test_a_step_in_the_group_counts_and_other_things_of_that_name_do_not() -> None:
    optimizer = an_optimizer()
    assert own_count(optimizer) is None
    optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] = "third"
    assert own_count(optimizer) is None
    optimizer.param_groups[0]["step"] = 12  # as Apex
    assert own_count(optimizer) == 12


def test_a_reported_step_ends_the_counting(counter) -> None:
    steps, heartbeat = counter
    optimizer = an_optimizer()
    optimizer.step()
    steps.report(100, committed_step=99)
    optimizer.step()
    beat = heartbeat.read()
    assert (beat.step, beat.committed_step, beat.counter) == (100, 99, 2)
    steps.heartbeat.listen()
    heartbeat.ask(Request.GROW | Request.SAVE)
    assert steps.heartbeat.asked() == Request.GROW | Request.SAVE
    steps.heartbeat.save_served()
    assert steps.heartbeat.asked() == Request.GROW
    assert heartbeat.read().listens


@pytest.mark.slow
def test_progress_needs_no_torch_and_no_agent(tmp_path: Path) -> None:
    """In a worker it beats; in a process that the worker forks, and without an agent, nothing."""
    code = (
        "import os, sys\n"
        "from elastic_trainer import api\n"
        "api.progress(7)\n"
        "if os.fork() == 0:\n"
        "    api.progress(9); os._exit(0)\n"
        "os.wait()\n"
        "assert 'torch' not in sys.modules\n"
    )
    path = tmp_path / "beat"
    heartbeat = Heartbeat(path, create=True)
    root = str(Path(__file__).parents[3])
    for more in ({"HOLDFAST_HEARTBEAT": str(path)}, {}):
        env = {**os.environ, "PYTHONPATH": root, **more}
        subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=30)
        assert heartbeat.read().step == 7
        assert heartbeat.read().counter == 1
    heartbeat.close()


def test_an_evaluation_before_the_first_step_is_no_step(counter) -> None:
    """Nor is what comes after it; a later one is among steps."""
    reports, heartbeat = counter
    reports.report(7, Section.FIRST_STEP)
    for section in (Section.EVALUATING, Section.SAVING, Section.STEP):
        reports.report(section=section)
        assert not has_run(heartbeat.read())
    reports.report(8)
    reports.report(section=Section.EVALUATING)
    assert (heartbeat.read().section, has_run(heartbeat.read())) == (Section.EVALUATING, True)
