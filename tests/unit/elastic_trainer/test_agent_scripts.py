"""Requests to scripts of others: real agents and processes, a membership that is played."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import agent_bench as a
import pytest
import test_zygote as t
from tiny_run import event_files
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import Std

from elastic_trainer.agent.agent import HoldfastAgent
from elastic_trainer.agent.flags import Streams
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    StopAsked,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
)
from elastic_trainer.agent.membership.tasks import Launch, Task
from elastic_trainer.agent.settings import AgentConfig
from elastic_trainer.agent.stop_signals import Waker
from elastic_trainer.agent.workers.scripts import Scripts
from elastic_trainer.agent.workers.tail import LogFollower
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import Event
from elastic_trainer.record.failures import Action, Kind
from elastic_trainer.record.script_steps import WRITER, StepSource, newest_shown, newest_step
from elastic_trainer.worker.heartbeat import Beat, Request, Section

HANDLER = """
import signal, sys, time
from pathlib import Path
def leave(*_):
    if sys.argv[2] == "finish":  # as api.Run.finish does
        sys.path.insert(0, sys.argv[3])
        from elastic_trainer.worker.heartbeat import Section
        from elastic_trainer.worker.progress import step_counter
        step_counter().report(section=Section.FINISHED)
        sys.exit(0)
    sys.exit(int(sys.argv[2]))
if sys.argv[2] != "none":
    signal.signal(signal.SIGTERM, leave if sys.argv[2] != "stay" else lambda *_: None)
Path(sys.argv[1]).touch()
while True:
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("fresh", "leaves", "request_", "ended"),
    [
        (True, "91", Request.STOP, {"finished": False, "saved": True}),
        (True, "none", Request.STOP, {"finished": False, "saved": False}),
        (False, "91", Request.GROW, {"finished": False, "saved": True}),
        *(
            pytest.param(fresh, leaves, asked, ended, marks=pytest.mark.slow)
            for fresh, leaves, asked, ended in [
                (True, "finish", Request.STOP, {"finished": True, "saved": False}),
                (True, "5", Request.STOP, {"finished": False, "saved": False}),
                (False, "0", Request.STOP, {"finished": False, "saved": False}),
                (False, "stay", Request.STOP, {"finished": False, "saved": False}),
                (False, "none", Request.GROW, {"finished": False, "saved": False}),
            ]
        ),
    ],
)
def test_a_script_is_asked_by_sigterm(
    tmp_path: Path, fresh: bool, leaves: str, request_: Request, ended: dict[str, bool]
) -> None:
    (tmp_path / "script.py").write_text(HANDLER)
    args = (str(tmp_path / "up.{dp}.${local_rank}"), leaves, str(Path(__file__).parents[3]))
    # No preloading: what is tested is the same, and a second faster.
    target = str(tmp_path / "script.py")
    task = Task(kind="script", target=target, args=args, fresh=fresh, count_steps=False)

    def play(m: a.ScriptedMembership) -> None:
        m.say(a.formed(1, a.ME))
        t.until(lambda: len(list(tmp_path.glob("up.2.*"))) == 2, "workers never came up")
        m.expect(WorkersRunning)
        m.say(AskWorkers(epoch=1, request=request_))
        report = m.expect(WorkersEnded)
        assert {"finished": report.finished, "saved": report.saved} == ended

    events = run(tmp_path, task, play, grace_s=1.0 if leaves == "stay" else 30.0)
    assert sorted(path.name for path in tmp_path.glob("up.*")) == ["up.2.0", "up.2.1"]
    signalled = [event.fields for event in events if event.event == "worker.signalled"]
    assert [fields["request"] for fields in signalled] == (
        ["stop" if request_ is Request.STOP else "growth"] * 2
    )


@pytest.mark.process
def test_exit_code_91_that_nobody_has_asked_for_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nsys.exit(91)\n")
    task = Task(kind="script", target=str(tmp_path / "script.py"), count_steps=False)

    def play(m: a.ScriptedMembership) -> None:
        m.begin(1, a.ME)
        report = m.expect(WorkersFailed)
        assert (report.failure.kind, report.failure.action) == (Kind.CRASH, Action.RESTART)

    run(tmp_path, task, play)


OTHER_SIGNAL = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(91))
Path(sys.argv[1]).touch()
while True:
    time.sleep(0.02)
"""


@pytest.mark.process
def test_a_script_is_asked_by_the_signal_that_it_handles(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(OTHER_SIGNAL)
    args = (str(tmp_path / "up.${local_rank}"),)
    target = str(tmp_path / "script.py")
    task = Task(kind="script", target=target, args=args, fresh=False, count_steps=False)

    def play(m: a.ScriptedMembership) -> None:
        m.say(a.formed(1, a.ME))
        t.until(lambda: len(list(tmp_path.glob("up.*"))) == 2, "workers never came up")
        m.expect(WorkersRunning)
        m.say(AskWorkers(epoch=1, request=Request.STOP))
        report = m.expect(WorkersEnded)
        assert report.saved

    events = run(tmp_path, task, play, stop_signal=signal.SIGUSR1)
    signalled = [event.fields for event in events if event.event == "worker.signalled"]
    assert [fields["signal"] for fields in signalled] == ["SIGUSR1"] * 2


BY_NAME = """
import os, signal, sys
from pathlib import Path
def leave(number, _):
    Path(sys.argv[1] + os.environ["LOCAL_RANK"]).write_text(signal.Signals(number).name)
    sys.exit(91)
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"):
    signal.signal(signal.Signals[name], leave)
Path(sys.argv[1] + os.environ["LOCAL_RANK"]).touch()
while True:
    signal.pause()
"""


@pytest.mark.process
@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1"])
def test_a_script_is_asked_by_the_signal_that_an_agent_got(tmp_path: Path, name: str) -> None:
    (tmp_path / "script.py").write_text(BY_NAME)
    target = str(tmp_path / "script.py")
    task = Task(kind="script", target=target, args=(str(tmp_path / "up."),), count_steps=False)

    def play(m: a.ScriptedMembership) -> None:
        m.say(a.formed(1, a.ME))
        t.until(lambda: len(list(tmp_path.glob("up.*"))) == 2, "workers never came up")
        m.expect(WorkersRunning)
        m.say(AskWorkers(epoch=1, request=Request.STOP, signal=name))
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=1, finished=False, step=0, saved=True)

    events = run(tmp_path, task, play)
    assert {path.read_text() for path in tmp_path.glob("up.*")} == {name}
    signalled = [event.fields for event in events if event.event == "worker.signalled"]
    assert [fields["signal"] for fields in signalled] == [name] * 2


PEER_LEFT = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(91))
Path(sys.argv[1] + os.environ["LOCAL_RANK"]).write_text(str(os.getpid()))
if os.environ["LOCAL_RANK"] == "0":
    raise RuntimeError("Connection closed by peer")
while True:
    time.sleep(0.02)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [False, True])
def test_a_failure_that_peers_caused_by_leaving_on_request_is_taken_back(
    tmp_path: Path, signalled: bool
) -> None:
    """Its node's own request comes a moment later, or its agent had a signal of its own."""
    (tmp_path / "script.py").write_text(PEER_LEFT)
    target, up = str(tmp_path / "script.py"), tmp_path / "up."
    task = Task(kind="script", target=target, args=(str(up),), count_steps=False)

    def play(m: a.ScriptedMembership) -> None:
        if signalled:
            os.kill(os.getpid(), signal.SIGTERM)
            m.expect(StopAsked)
        m.say(a.formed(1, a.ME))
        pids = [Path(f"{up}{rank}") for rank in (0, 1)]
        t.until(lambda: all(p.exists() and p.read_text() for p in pids), "never came up")
        m.expect(WorkersRunning)
        t.until(lambda: not Path(f"/proc/{pids[0].read_text()}").exists(), "rank 0 stays")
        m.say(AskWorkers(epoch=1, request=Request.STOP))
        ended = m.expect(WorkersEnded)
        assert ended == WorkersEnded(epoch=1, finished=False, step=0, saved=False)

    events = run(tmp_path, task, play, settle_s=30.0)
    assert [e for e in events if e.event == "worker.exit"] == [], "none has failed by itself"


STEPS = """
import sys, time
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.ones(1)
optimizer = getattr(torch.optim, sys.argv[1])([parameter], lr=0.1)
for step in range(5):
    optimizer.step()
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "steps"), [("SGD", [105, 110]), ("Adam", [5, 5])])
def test_steps_count_from_the_beginning_of_the_training(
    tmp_path: Path, optimizer: str, steps: list[int]
) -> None:
    """SGD does not count: they go on where the record, then the epoch before, has ended."""
    (tmp_path / "script.py").write_text(STEPS)
    earlier = EventLog(tmp_path, f"{WRITER}n7", node="n7", epoch=3)
    for step in (99, 100):
        earlier.emit("script.progress", step=step)
    earlier.emit("storage.stalled", seconds=3.0, held_back=1)
    earlier.close()
    with (tmp_path / "events" / f"{WRITER}n7.jsonl").open("a") as file:
        file.write('{"event": "script.progress", "step": 10')  # torn by a crash
    task = Task(kind="script", target=str(tmp_path / "script.py"), args=(optimizer,))
    shown = EventLog(tmp_path, f"{WRITER}n1", node="n1")

    def play(m: a.ScriptedMembership) -> None:
        for epoch, step in zip((4, 5), steps, strict=True):
            m.begin(epoch, a.ME)
            t.until(lambda step=step: newest_step(tmp_path) == step, f"no step {step}")

    run(tmp_path, task, play, shown=shown, record_dir=tmp_path)


BEGINS_ANEW = """
import time
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
parameter.grad = torch.ones(1)
optimizer = torch.optim.Adam([parameter])
for step in range(8):
    optimizer.step()
    time.sleep(0.05)
time.sleep(60)
"""


def shown_before(folder: Path, *, node: str, epoch: int, from_scratch: int = 0) -> None:
    """Have a node of an earlier epoch, or attempt, show 50 steps of a script."""
    log = EventLog(folder, f"{WRITER}{node}", node=node, epoch=epoch)
    what = {"first": 1, "origin": 1, "by": "optimizer", "from_scratch": from_scratch}
    log.emit("script.progress", step=50, **what)
    log.close()


def of_script(folder: Path, name: str, *, epoch: int) -> list[dict[str, Any]]:
    """Return what this node has put on record of the script in an epoch."""
    path = folder / "events" / f"{WRITER}n1.jsonl"
    events = map(Event.decode, path.read_text().splitlines() if path.exists() else [])
    return [each.fields for each in events if each and (each.event, each.epoch) == (name, epoch)]


@pytest.mark.process
def test_of_two_nodes_the_one_with_rank_0_sees_a_restart_from_scratch(tmp_path: Path) -> None:
    """Also the first time that it speaks: the node that did so before has left its record."""
    (tmp_path / "script.py").write_text(BEGINS_ANEW)
    task = Task(kind="script", target=str(tmp_path / "script.py"))
    shown_before(tmp_path, node="n0", epoch=1)

    def play(m: a.ScriptedMembership) -> None:
        m.begin(1, a.OTHER, a.ME)
        m.begin(2, a.ME, a.OTHER)
        t.until(lambda: of_script(tmp_path, "script.restarted", epoch=2), "no restart is seen")
        m.begin(3, a.OTHER, a.ME)
        shown_before(tmp_path, node="n0", epoch=3, from_scratch=1)
        m.begin(4, a.ME, a.OTHER)
        report = m.expect(WorkersFailed)
        assert "HF517" in report.failure.detail
        assert report.failure.action is Action.STOP

    shown = EventLog(tmp_path, f"{WRITER}n1", node="n1")
    run(tmp_path, task, play, shown=shown, record_dir=tmp_path)
    (seen,) = of_script(tmp_path, "script.restarted", epoch=2)
    assert (seen["first"], seen["newest"], seen["from_scratch"], seen["stops"]) == (1, 50, 1, False)
    assert not of_script(tmp_path, "script.restarted", epoch=3), "rank 0 is on another node"
    (seen,) = of_script(tmp_path, "script.restarted", epoch=4)
    assert (seen["from_scratch"], seen["stops"]) == (2, True)


def test_steps_that_only_this_node_has_seen_count_where_the_one_that_spoke_is_gone(
    tmp_path: Path,
) -> None:
    """It puts them on record once a second, so those of its last moments are not there."""
    log = EventLog(tmp_path, f"{WRITER}n0", node="n0", epoch=1)
    log.emit("script.progress", step=5, first=1, origin=1, by="optimizer")
    log.close()
    shown = EventLog(tmp_path, f"{WRITER}n1", node="n1")
    said: list[str] = []
    task = Task(kind="script", target="script.py")
    scripts = Scripts(task, shown, say=said.append, shown=shown, record_dir=tmp_path)

    def begin(epoch: int, rank: int, step: int) -> None:
        files = {name: tmp_path / name for name in ("log", "heartbeat", "error_file")}
        scripts.begin(
            a.formed(epoch, a.OTHER, a.ME), [Launch(local_rank=0, rank=rank, env={}, **files)]
        )
        beat = Beat(
            step=step, section=Section.STEP, counter=step, committed_step=-1, first=1,
            source=StepSource.OPTIMIZER,
        )  # fmt: skip
        scripts.look_back(scripts.beats(epoch, {0: beat}))

    begin(1, rank=1, step=18)
    begin(2, rank=0, step=6)
    shown.close()
    (seen,) = of_script(tmp_path, "script.restarted", epoch=2)
    assert (seen["newest"], seen["redone"], seen["from_scratch"]) == (18, 18, 1)
    assert len(said) == 1


@pytest.mark.process
@pytest.mark.parametrize(
    ("before", "allowed", "count", "stops"),
    [(0, False, 1, False), (1, False, 2, True), (1, True, 2, False)],
)
def test_restarts_from_scratch_count_on_from_one_attempt_to_the_next(
    tmp_path: Path, before: int, allowed: bool, count: int, stops: bool
) -> None:
    (tmp_path / "script.py").write_text(BEGINS_ANEW)
    task = Task(kind="script", target=str(tmp_path / "script.py"))
    shown_before(tmp_path, node="n7", epoch=3, from_scratch=before)

    def play(m: a.ScriptedMembership) -> None:
        m.begin(4, a.ME)
        if stops:
            m.expect(WorkersFailed)
        t.until(lambda: of_script(tmp_path, "script.restarted", epoch=4), "no restart is seen")

    shown = EventLog(tmp_path, f"{WRITER}n1", node="n1")
    run(tmp_path, task, play, shown=shown, record_dir=tmp_path, from_scratch=allowed)
    (seen,) = of_script(tmp_path, "script.restarted", epoch=4)
    assert (seen["from_scratch"], seen["stops"], seen["redone"]) == (count, stops, 50)
    if stops:  # who starts it once more has the same two tries
        newest = newest_shown(tmp_path)
        assert newest is not None
        assert (newest.epoch, newest.from_scratch) == (4, 0)


@pytest.mark.process
@pytest.mark.parametrize("newest", [None, 50])
def test_a_script_that_ends_well_without_any_step_is_on_record(
    tmp_path: Path, newest: int | None
) -> None:
    (tmp_path / "script.py").write_text("pass")
    task = Task(kind="script", target=str(tmp_path / "script.py"), count_steps=False)
    if newest:
        shown_before(tmp_path, node="n7", epoch=3)

    def play(m: a.ScriptedMembership) -> None:
        m.begin(4, a.ME)
        m.expect(WorkersEnded)

    shown = EventLog(tmp_path, f"{WRITER}n1", node="n1")
    run(tmp_path, task, play, shown=shown, record_dir=tmp_path)
    assert of_script(tmp_path, "script.silent", epoch=4) == [{"newest": newest}]


def test_streams_have_logs_and_the_console_of_their_own(tmp_path: Path, capfd) -> None:
    code = (
        "import json, os, sys; print('step', 3); "
        "print(json.loads(os.environ['HOLDFAST_RUNG'])['layout']['dp'], file=sys.stderr)"
    )
    task = Task(kind="command", target=sys.executable, args=("-c", code))

    def play(m: a.ScriptedMembership) -> None:
        m.begin(1, a.ME)
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=1, finished=True, step=0)

    streams = {0: Streams(console=Std.ALL), 1: Streams(console=Std.OUT, prefix=Std.ALL)}
    run(tmp_path, task, play, streams=streams)
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[default1]:step 3", "step 3"]
    assert shown.err.splitlines() == ["2"]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["0.stderr.log", "0.stdout.log", "1.stderr.log", "1.stdout.log"]
    assert logs["1.stdout.log"] == "step 3\n"
    assert logs["1.stderr.log"].endswith("2\n")


def run(
    tmp_path: Path,
    task: Task,
    play,
    *,
    grace_s: float = 30.0,
    settle_s: float = 0.05,
    streams: dict[int, Streams] | None = None,
    **record: Any,
) -> list[Event]:
    """Run one agent until the played coordinator stops the job; return its events."""
    (tmp_path / "scratch" / "snapshots").mkdir(parents=True)
    waker = Waker()
    log = EventLog(tmp_path, "agent", node="n1")
    membership = a.ScriptedMembership(waker, play)
    follower = LogFollower(streams, None) if streams else None
    agent = HoldfastAgent(
        AgentConfig(
            me=a.ME,
            workers=2,
            scratch=tmp_path / "scratch",
            secret_dir=tmp_path,
            log_dir=tmp_path / "logs",
            stacks_dir=tmp_path / "stacks",
            hang_ceiling_s=30.0,
            start_ceiling_s=30.0,
            watch_all=False,
            settle_s=settle_s,
        ),
        WorkerSpec("default", 2, membership, entrypoint=task.target, max_restarts=3),
        workers=Workers(task, env=t.base_env()),
        waker=waker,
        log=log,
        scripts=Scripts(
            task,
            log,
            say=print,
            follower=follower,
            split=streams is not None,
            grace_s=grace_s,
            **record,
        ),
    )
    try:
        agent.run()
    finally:
        waker.close()
        log.close()
    if membership.error is not None:
        raise membership.error
    lines = event_files(tmp_path)
    return [
        event
        for path in lines
        for line in path.read_text().splitlines()
        if (event := Event.decode(line))
    ]
