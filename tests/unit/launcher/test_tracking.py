"""A run's points for trackers: each step once, in order, by one writer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.record.events import Event
from launcher.record.tracked import TrackedSteps
from launcher.runs.reports.tracking import LEASE_S, TrackedRun

FOR_EVER = 1e12


def event(name, step=None, *, epoch=1, rank=0, t=0.0, **fields):
    return Event(
        event=name, t_unix=t, t_mono=t, epoch=epoch, step=step, rank=rank, node="n", fields=fields
    )


def started(epoch, resume):
    return event("trainer.started", resume, epoch=epoch, resume_step=resume)


def done(step, loss=1.0, **about):
    return event("step.completed", step, loss=loss, **about)


def taken(events, until=FOR_EVER):
    steps = TrackedSteps()
    for each in events:
        steps.add(each)
    return [(point.step, point.values["train/loss"]) for point in steps.take(until)]


def test_a_step_is_a_point_once_it_is_committed_and_over():
    events = [started(1, 0), done(1), done(2), event("step.committed", 2)]
    assert taken(events) == [(1, 1.0)]  # the second's validation may still come
    assert taken([*events, done(3)]) == [(1, 1.0), (2, 1.0)]


def test_a_step_that_is_redone_counts_as_it_was_redone():
    first = [started(1, 0), done(1), done(2, 2.0), done(3, 3.0), event("step.committed", 1)]
    again = [started(2, 1), done(2, 2.5, epoch=2), done(3, 3.5, epoch=2)]
    end = [event("run.ended", code=0)]
    assert taken([*first, *again, *end]) == [(1, 1.0), (2, 2.5), (3, 3.5)]


def test_what_an_earlier_epoch_says_late_counts_if_the_next_one_started_from_it():
    events = [started(1, 0), done(1), started(2, 2), done(2, 2.0), done(3, 9.0)]
    events += [done(3, 3.0, epoch=2), done(4, epoch=2), event("step.committed", 3, epoch=2)]
    assert taken(events) == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_the_lowest_rank_that_reports_a_step_counts():
    events = [done(1, 5.0, rank=3), done(1, 4.0, rank=2), done(1, 6.0, rank=4), done(2)]
    assert taken([started(1, 0), *events, event("step.committed", 1)]) == [(1, 4.0)]


def test_a_validation_belongs_to_its_step():
    steps = TrackedSteps()
    events = [started(1, 0), done(1, t=1.0, tokens=30, step_s=2.0)]
    validated = event("validation.completed", 1, loss=0.5, t=2.0)
    for each in (*events, event("step.committed", 1), validated, done(2, t=3.0)):
        steps.add(each)
    [point] = steps.take(2.5)
    assert point.values == {
        "train/loss": 1.0, "train/step_s": 2.0, "train/tokens_per_s": 15.0, "validation/loss": 0.5
    }  # fmt: skip


def test_steps_that_may_not_have_arrived_are_waited_for():
    events = [started(1, 0), done(1, t=1.0), done(2, t=9.0), done(3, t=9.5)]
    assert taken([*events, event("step.committed", 3)], until=5.0) == [(1, 1.0)]


@given(st.data())
def test_points_go_forward_whatever_happens(data):
    """Epochs that resume anywhere, steps redone, events late: strictly increasing, each once."""
    steps, found, newest, committed = TrackedSteps(), [], 0, 0
    for epoch in range(1, 1 + data.draw(st.integers(1, 6))):
        resume = data.draw(st.integers(committed if data.draw(st.booleans()) else 0, newest))
        steps.add(started(epoch, resume))
        newest, committed = resume, min(committed, resume)
        for step in range(resume + 1, resume + 1 + data.draw(st.integers(0, 5))):
            steps.add(done(step, float(epoch), epoch=epoch, rank=data.draw(st.integers(0, 2))))
            newest = step
            if data.draw(st.booleans()):
                committed = step
                steps.add(event("step.committed", step, epoch=epoch))
            if data.draw(st.booleans()):
                found += steps.take(FOR_EVER)
    steps.add(event("job.stopped", code=0))
    found += steps.take(FOR_EVER)
    numbers = [point.step for point in found]
    assert numbers == sorted(set(numbers))
    assert set(range(1, newest + 1)) <= set(numbers)


# -- one run and its trackers ------------------------------------------------------------------


class Tracker:
    def __init__(self, step=0):
        self.step, self.points, self.closed, self.fails = step, [], None, 0

    def write(self, points):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("down")
        self.points += [point.step for point in points]
        self.step = self.points[-1]

    def close(self, *, finished):
        self.closed = finished


class Run:
    def __init__(self, folder, names=("mlflow",)):
        self.folder, self.names, self.now, self.said = folder, names, 1000.0, []
        self.trackers = {}
        (folder / "events").mkdir(exist_ok=True)

    def write(self, *events):
        with (self.folder / "events" / "worker-n-0.jsonl").open("a") as file:
            file.writelines(each.encode() for each in events)

    def follower(self, writer):
        def opened(name, _run_dir, run_id, step):
            assert run_id == "r"
            return self.trackers.setdefault(name, Tracker(step))

        return TrackedRun(
            self.folder, run_id="r", trackers=self.names, writer=writer,
            wall=lambda: self.now, say=self.said.append, settle_s=5.0, opened=opened,
        )  # fmt: skip

    def board(self):
        content, _ = FileBoard(self.folder / "tracking").get_state()
        return json.loads(content)


def trained(upto, after=0):
    steps = [done(step, t=900.0) for step in range(after + 1, upto + 1)]
    return [*steps, event("step.committed", upto, t=900.0)]


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path)
    run.write(started(1, 0), *trained(4))
    return run


def test_another_process_goes_on_where_one_has_stopped(run):
    first = run.follower("a")
    first.poll()
    assert run.trackers["mlflow"].points == [1, 2, 3]
    first.close()
    assert run.trackers["mlflow"].closed is False
    run.write(*trained(6, after=4))
    run.trackers["mlflow"] = Tracker()  # another process knows the board alone
    run.follower("b").poll()
    assert run.trackers["mlflow"].points == [4, 5]
    assert run.board()["steps"] == {"mlflow": 5}


def test_of_two_processes_one_writes_until_it_is_silent(run):
    first, second = run.follower("a"), run.follower("b")
    first.poll()
    second.poll()
    assert run.trackers["mlflow"].points == [1, 2, 3]
    assert run.board()["writer"] == "a"
    run.write(*trained(6, after=4))
    run.now += LEASE_S + 1
    second.poll()
    assert run.trackers["mlflow"].points == [1, 2, 3, 4, 5]
    assert run.board()["writer"] == "b"


def test_a_tracker_knows_more_than_the_board_when_a_process_died_between(run):
    run.trackers["mlflow"] = Tracker(step=2)
    run.follower("a").poll()
    assert run.trackers["mlflow"].points == [3]


def test_a_tracker_that_is_down_catches_up_and_holds_no_other_up(tmp_path):
    run = Run(tmp_path, names=("mlflow", "wandb"))
    run.write(started(1, 0), *trained(4))
    run.trackers["wandb"] = Tracker()
    run.trackers["wandb"].fails = 1
    follower = run.follower("a")
    follower.poll()
    assert run.board()["steps"] == {"mlflow": 3, "wandb": 0}
    assert "wandb: ConnectionError: down" in run.said[-1]
    follower.poll()
    assert run.trackers["wandb"].points == run.trackers["mlflow"].points == [1, 2, 3]


def test_the_end_is_written_and_the_run_let_go(run):
    run.write(event("run.ended", code=0, t=999.0))
    follower = run.follower("a")
    follower.poll()
    assert not follower.is_over  # its last events may be on their way
    run.now += 10
    follower.poll()
    assert follower.is_over
    assert run.trackers["mlflow"].points == [1, 2, 3, 4]
    assert (run.trackers["mlflow"].closed, run.board()["writer"]) == (True, "")


def test_an_end_that_is_no_success_leaves_the_run_open(run):
    run.write(event("run.ended", code=91, t=900.0))
    follower = run.follower("a")
    follower.poll()
    assert not follower.is_over
