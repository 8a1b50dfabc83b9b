"""preStop: what it asks for, when it is done, and that it never waits for ever."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pod_world import until

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Commit, Ended, update
from elastic_trainer.record.events import Event
from launcher.node.pod import ANSWER_S, PodEnv, Saving, answer, next_act
from launcher.record import stop_request

ENV = {
    "HOLDFAST_KIND": "jobset",
    "HOLDFAST_JOB": "llama",
    "HOLDFAST_ATTEMPT": "0",
    "HOLDFAST_SAVE_WAIT_S": "30",
    "POD_NAME": "llama-node-0-3",
}


def asked(step: int | None, epoch: int | None = 2) -> Event:
    return Event(event="save.asked", t_unix=0.0, t_mono=0.0, step=step, epoch=epoch)


NOW = {
    "asked": asked(7),
    "asked_s": 1.0,
    "newest": (2, 5),
    "seen": (2, 5),
    "epoch": 2,
    "over": False,
}


def acts(**changes) -> str:
    return next_act(**{**NOW, **changes})


def test_what_comes_next():
    assert acts() == "wait"
    assert acts(over=True) == "done"
    assert acts(asked=None) == "wait"
    assert acts(asked=None, asked_s=ANSWER_S) == "ask"
    assert acts(asked=asked(None)) == "nothing", "a spare"
    assert acts(newest=(2, 7)) == "done", "nothing was trained since"
    assert acts(newest=(2, 9)) == "done"
    assert acts(newest=(2, 6)) == "ask", "a save that was under way: the wish was passed over"
    assert acts(newest=(2, 6), seen=(2, 6)) == "wait"
    assert acts(epoch=3) == "ask", "those who were asked are gone"


NUMBER = st.none() | st.integers(0, 9)


@given(
    st.fixed_dictionaries(
        {
            "asked": st.none() | st.builds(asked, NUMBER, NUMBER),
            "asked_s": st.floats(0, 100),
            "newest": st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
            "seen": st.tuples(st.integers(-1, 9), st.integers(-1, 9)),
            "epoch": st.integers(0, 9),
            "over": st.booleans(),
        }
    )
)
def test_it_is_done_only_when_what_was_asked_for_is_safe(now):
    act = next_act(**now)
    assert act in ("done", "nothing", "ask", "wait")
    if act == "done" and not now["over"]:
        assert now["newest"][1] >= now["asked"].step
    if act == "ask":
        assert now["asked_s"] > 0, "never in a tight loop"


def line(t_unix: float, step: int | None, event: str = "save.asked") -> str:
    at = {"t_unix": t_unix, "t_mono": t_unix}
    return json.dumps({"event": event, **at, "step": step, "epoch": 2})


def test_the_newest_answer_counts_and_none_from_before():
    lines = ['rn": 3}', line(1, 4), line(2, 5), line(3, 9, "worker.exit"), '{"event": "save.as']
    for since in (0.5, 2):
        found = answer(lines, since)
        assert (found.step, found.epoch) == (5, 2)
    assert answer(lines, 2.5) is None
    assert answer([], 0) is None
    found = answer(["3", "null", "[]", line(1, None)], 0)
    assert (found.step, found.epoch) == (None, 2)


@given(st.lists(st.text(max_size=40)), st.floats(allow_nan=False))
def test_no_line_breaks_it(lines, since):
    assert answer(lines, since) is None


# --- with a real process in the agent's place -----------------------------------------------------

AGENT = """
import signal, sys, time, pathlib
log = pathlib.Path(sys.argv[2])
def note(number, _):
    with log.open("a") as out: out.write(signal.Signals(number).name + "\\n")
signal.signal(signal.SIGUSR1, note); signal.signal(signal.SIGUSR2, note)
note(signal.SIGCHLD, None)
while True: time.sleep(0.01)
"""


@pytest.fixture
def who(tmp_path):
    return PodEnv.of({**ENV, "POD_UID": f"test-{os.getpid()}-{tmp_path.name}"})


@pytest.fixture
def agent(tmp_path, who):
    log = tmp_path / "heard"
    command = [sys.executable, "-c", AGENT, "elastic_trainer.agent", str(log)]
    process = subprocess.Popen(command)
    until(lambda: log.exists() and log.stat().st_size)
    who.agent_file.write_text(f"{process.pid}\n")
    yield process, log
    process.kill()
    process.wait()
    who.agent_file.unlink()


class Clock:
    """Virtual seconds; `then` happens at its time."""

    def __init__(self) -> None:
        self.now, self.then = 0.0, []

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for due, act in list(self.then):
            if due <= self.now:
                self.then.remove((due, act))
                act()


def saving(tmp_path, who, clock: Clock) -> Saving:
    return Saving(tmp_path, who, mono=lambda: clock.now, wall=lambda: clock.now, sleep=clock.sleep)


def answers(tmp_path, who, clock, step: int | None) -> None:
    path = tmp_path / "events" / f"agent-{who.pod}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(line(clock.now, step) + "\n")


def commits(tmp_path, step: int, epoch: int = 0) -> None:
    commit = Commit(epoch=epoch, step=step, dir="d", manifest_sha256="0" * 64)
    update(
        FileBoard(tmp_path / "board"),
        lambda state: dataclasses.replace(state, commits=(commit,), epoch=epoch),
    )


def heard(log) -> list[str]:
    return log.read_text().split()[1:]


def test_it_waits_for_the_save_that_it_asked_for(tmp_path, who, agent):
    clock = Clock()

    def hears_and_answers() -> None:
        until(lambda: heard(agent[1]) == ["SIGUSR1"])  # two at once would be one signal
        answers(tmp_path, who, clock, 7)

    clock.then += [
        (1.0, hears_and_answers),
        (2.0, lambda: commits(tmp_path, 6)),  # one that was under way
        (3.0, lambda: answers(tmp_path, who, clock, 8)),
        (4.0, lambda: commits(tmp_path, 9)),
    ]
    commits(tmp_path, 3)
    assert saving(tmp_path, who, clock).run() == 0
    assert 4.0 <= clock.now < 6.0
    until(lambda: heard(agent[1]) == ["SIGUSR1", "SIGUSR1"])


def test_it_is_bounded(tmp_path, who, agent, capsys):
    clock = Clock()
    assert saving(tmp_path, who, clock).run() == 1
    assert 30 <= clock.now < 32
    assert "30 s" in capsys.readouterr().err


def test_an_agent_that_is_gone_holds_nobody(tmp_path, who, agent):
    process, _ = agent

    def dies() -> None:
        process.kill()
        process.wait()

    clock = Clock()
    clock.then.append((2.0, dies))
    assert saving(tmp_path, who, clock).run() == 0
    assert clock.now < 4


def test_without_an_agent_there_is_nothing_to_save(tmp_path, who):
    assert saving(tmp_path, who, Clock()).run() == 0
    who.agent_file.write_text(f"{os.getpid()}\n")  # a process id that another one has now
    try:
        assert saving(tmp_path, who, Clock()).run() == 0
    finally:
        who.agent_file.unlink()


def test_after_a_cancel_the_whole_job_is_asked_to_end(tmp_path, who, agent):
    stop_request.ask(tmp_path, why="cancel --save", t_unix=0.0)
    ended = Ended(job="llama-0.0", code=91, reason="saved")
    clock = Clock()
    clock.then.append(
        (
            3.0,
            lambda: update(
                FileBoard(tmp_path / "board"),
                lambda state: dataclasses.replace(state, ended=ended),
            ),
        )
    )
    assert saving(tmp_path, who, clock).run() == 0
    assert clock.now < 5
    until(lambda: heard(agent[1]) == ["SIGUSR2"])


def test_a_board_that_cannot_be_read_is_waited_for(tmp_path, who, agent):
    board = tmp_path / "board"
    commits(tmp_path, 3)
    clock = Clock()
    clock.then += [
        (1.0, lambda: answers(tmp_path, who, clock, 7)),
        (1.5, lambda: board.rename(tmp_path / "away")),
        (1.6, lambda: board.write_text("")),
        (4.0, lambda: (board.unlink(), (tmp_path / "away").rename(board))),
        (5.0, lambda: commits(tmp_path, 7)),
    ]
    assert saving(tmp_path, who, clock).run() == 0
    assert clock.now >= 5.0


def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    from launcher.node.__main__ import main

    monkeypatch.delenv("POD_NAME", raising=False)
    assert main(["save", str(tmp_path)]) == 1
    assert "HF674" in capsys.readouterr().err
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
