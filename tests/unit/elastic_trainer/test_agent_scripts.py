"""Requests to scripts of others: real agents and processes, a membership that is played."""

from __future__ import annotations

import sys
from pathlib import Path

import agent_bench as a
import pytest
import test_zygote as t

from elastic_trainer.agent.agent import HoldfastAgent
from elastic_trainer.agent.command.flags import Std, Streams
from elastic_trainer.agent.membership.notices import AskWorkers, WorkersEnded, WorkersRunning
from elastic_trainer.agent.membership.tasks import Task
from elastic_trainer.agent.wire.waker import Waker
from elastic_trainer.agent.workers.ends import worker_spec
from elastic_trainer.agent.workers.scripts import Scripts
from elastic_trainer.agent.workers.settings import AgentConfig
from elastic_trainer.agent.workers.tail import LogFollower
from elastic_trainer.agent.workers.workers import Workers
from elastic_trainer.event_log import EventLog
from elastic_trainer.events import Event
from elastic_trainer.heartbeat import Request
from elastic_trainer.layout import ParallelLayout

HANDLER = """
import signal, sys, time
from pathlib import Path
def leave(*_):
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
        (True, "0", Request.STOP, {"finished": True, "saved": True}),
        (True, "5", Request.STOP, {"finished": False, "saved": False}),
        (True, "none", Request.STOP, {"finished": False, "saved": False}),
        (False, "none", Request.STOP, {"finished": False, "saved": False}),
        (False, "stay", Request.STOP, {"finished": False, "saved": False}),
        (False, "0", Request.GROW, {"finished": False, "saved": True}),
        (False, "91", Request.GROW, {"finished": False, "saved": True}),
        (False, "none", Request.GROW, {"finished": False, "saved": False}),
    ],
)
def test_a_script_is_asked_by_sigterm(
    tmp_path: Path, fresh: bool, leaves: str, request_: Request, ended: dict[str, bool]
) -> None:
    (tmp_path / "script.py").write_text(HANDLER)
    args = (str(tmp_path / "up.{dp}.${local_rank}"), leaves)
    # No preloading: what is tested is the same, and a second faster.
    target = str(tmp_path / "script.py")
    task = Task(kind="script", target=target, args=args, fresh=fresh, count_steps=False)

    def play(m: a.ScriptedMembership) -> None:
        m.say(a.formed(1, a.ME))
        t.until(lambda: len(list(tmp_path.glob("up.2.*"))) == 2, "workers never came up")
        m.expect(WorkersRunning)
        m.say(AskWorkers(epoch=1, request=request_))
        report = m.expect(WorkersEnded)
        assert isinstance(report, WorkersEnded)
        assert {"finished": report.finished, "saved": report.saved} == ended

    events = run(tmp_path, task, play, grace_s=1.0 if leaves == "stay" else 30.0)
    assert sorted(path.name for path in tmp_path.glob("up.*")) == ["up.2.0", "up.2.1"]
    signalled = [event.fields for event in events if event.event == "worker.signalled"]
    assert [fields["request"] for fields in signalled] == (
        ["stop" if request_ is Request.STOP else "growth"] * 2
    )


def test_streams_have_logs_and_the_console_of_their_own(tmp_path: Path, capfd) -> None:
    code = "import os, sys; print('step', 3); print(os.environ['HOLDFAST_LAYOUT'], file=sys.stderr)"
    task = Task(kind="command", target=sys.executable, args=("-c", code))

    def play(m: a.ScriptedMembership) -> None:
        m.say(a.formed(1, a.ME))
        m.expect(WorkersRunning)
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=1, finished=True, step=0)

    streams = {0: Streams(console=Std.ALL), 1: Streams(console=Std.OUT, prefix=Std.ALL)}
    run(tmp_path, task, play, streams=streams)
    shown = capfd.readouterr()
    assert sorted(shown.out.splitlines()) == ["[default1]:step 3", "step 3"]
    assert shown.err.splitlines() == ["dp2-pp1-cp1-tp1"]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["0.stderr.log", "0.stdout.log", "1.stderr.log", "1.stdout.log"]
    assert logs["1.stdout.log"] == "step 3\n"
    assert logs["1.stderr.log"].endswith("dp2-pp1-cp1-tp1\n")


def run(
    tmp_path: Path,
    task: Task,
    play,
    *,
    grace_s: float = 30.0,
    streams: dict[int, Streams] | None = None,
) -> list[Event]:
    """Run one agent until the played coordinator stops the job; return its events."""
    (tmp_path / "scratch").mkdir()
    waker = Waker()
    log = EventLog(tmp_path, "agent", node="n1")
    membership = a.ScriptedMembership(waker, play)
    follower = LogFollower(streams, None) if streams else None
    layouts = {1: ParallelLayout(dp=2)}
    agent = HoldfastAgent(
        AgentConfig(
            me=a.ME,
            run_id="r",
            workers=2,
            scratch=tmp_path / "scratch",
            log_dir=tmp_path / "logs",
            stacks_dir=tmp_path / "stacks",
            max_restarts=3,
            hang_ceiling_s=30.0,
            start_ceiling_s=30.0,
            watch_all=False,
        ),
        worker_spec(2, task.target, 3),
        workers=Workers(task, env=t.base_env()),
        membership=membership,
        waker=waker,
        log=log,
        scripts=Scripts(
            task, layouts, log, follower=follower, split=streams is not None, grace_s=grace_s
        ),
    )
    try:
        agent.run()
    finally:
        waker.close()
        log.close()
    if membership.error is not None:
        raise membership.error
    lines = (tmp_path / "events").glob("*.jsonl")
    return [
        event
        for path in lines
        for line in path.read_text().splitlines()
        if (event := Event.decode(line))
    ]
