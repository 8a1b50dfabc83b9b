"""Standbys: forks made ahead that warm up, wait, and become the workers of the next epoch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_zygote as t
from test_zygote import launch, until_exited, until_started

from elastic_trainer.agent.membership.tasks import StandbyReady, Task
from elastic_trainer.agent.workers.workers import Workers

RUNG = {"HOLDFAST_RUNG": "the next"}


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    report = {"CHILD_REPORT": str(tmp_path / "report")}
    task = Task(kind="main", target=t.CHILD, cwd=str(tmp_path))
    group = Workers(task, env=t.base_env() | report)
    yield group
    group.close()


def begin(workers: Workers, tmp_path: Path, num: int = 1, **env: str) -> None:
    """Have `num` workers run, in epoch 1, and ask for their standbys."""
    wait = {"CHILD_ACT": "wait", "CHILD_REPORT": str(tmp_path / "report"), **env}
    workers.launch(1, [launch(tmp_path, rank, **wait) for rank in range(num)])
    until_started(workers, num)
    workers.stand_by(RUNG)


def ready(workers: Workers, num: int = 1) -> list[StandbyReady]:
    seen = t.gather(workers, lambda s: sum(isinstance(i, StandbyReady) for i in s) == num)
    return [item for item in seen if isinstance(item, StandbyReady)]


def warmed(tmp_path: Path, rank: int = 0) -> dict[str, object]:
    path = tmp_path / f"report.{rank}.warmed"

    def text() -> str:
        return path.read_text() if path.exists() else ""

    t.until(text, "no warm-up")
    return dict(json.loads(text()))


def test_a_standby_becomes_the_worker_of_its_local_rank(workers: Workers, tmp_path: Path) -> None:
    begin(workers, tmp_path, 2)
    standbys = {standby.local_rank: standby for standby in ready(workers, 2)}
    assert warmed(tmp_path)["rung"] == "the next"
    assert warmed(tmp_path)["priority"] == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert all(0 < (standby.private_mib or 0) < 100 for standby in standbys.values())
    assert workers.alive == 2  # they are nobody's workers yet

    workers.kill_all(20)
    assert workers.cleared
    assert not any(t.gone(standby.pid) for standby in standbys.values())
    workers.launch(2, [launch(tmp_path, 7), launch(tmp_path, 1)][1:])
    started, ended = t.run_one(workers)
    assert (started.how, started.why, started.pid) == ("standby", None, standbys[1].pid)
    assert (ended.code, ended.local_rank) == (0, 1)
    header = (tmp_path / "logs" / "1.log").read_text().splitlines()[-2]
    assert header.endswith(f"epoch 2 rank 1 local_rank 1 pid {started.pid} standby ---")
    assert not t.gone(standbys[0].pid)  # nobody has asked for it


def test_a_worker_that_was_a_standby_is_as_any_other(workers: Workers, tmp_path: Path) -> None:
    begin(workers, tmp_path)
    ready(workers)
    t.until((tmp_path / "report.0").exists, "no report")
    plain = json.loads((tmp_path / "report.0").read_text())
    workers.kill_all(20)
    workers.launch(2, [launch(tmp_path, CHILD_REPORT=str(tmp_path / "second"))])
    (ended,) = until_exited(workers)
    report = json.loads((tmp_path / "second.0").read_text())
    assert (report["warmed"], report["threads"]) == (["0"], plain["threads"])
    assert report["priority"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert report["ppid"] == workers._zygote.pid
    assert report["pgid"] == ended.pid
    assert "HOLDFAST_RUNG" not in report["env"]  # what was warmed up for is not its environment
    log = tmp_path / "logs" / "0.log"
    answers = {str(tmp_path / name) for name in ("0.ask", "0.signalled")}
    assert set(report["fds"]) == {os.devnull, str(log), *answers}
    assert all("_ignore" in handler for handler in report["signals"].values())


@pytest.mark.parametrize("act", ["wait", "raise a fault", "exit 3", f"signal {signal.SIGKILL:d}"])
def test_one_that_is_not_ready_is_replaced_by_a_fork(
    workers: Workers, tmp_path: Path, act: str
) -> None:
    begin(workers, tmp_path, CHILD_REHEARSAL=act)
    pid = warmed(tmp_path)["pid"]
    assert isinstance(pid, int)
    workers.kill_all(20)
    if act != "wait":
        t.until(lambda: t.gone(pid), "it lives")
    workers.launch(2, [launch(tmp_path)])
    started, ended = t.run_one(workers)
    assert (started.how, ended.code) == ("zygote", 0)
    t.until(lambda: t.gone(pid), "it lives")


def test_one_that_died_while_it_waited_is_replaced_by_a_fork(
    workers: Workers, tmp_path: Path
) -> None:
    begin(workers, tmp_path)
    (standby,) = ready(workers)
    os.kill(standby.pid, signal.SIGKILL)
    t.until(lambda: t.gone(standby.pid), "it lives on")  # on a busy machine it takes its time
    workers.kill_all(20)
    workers.launch(2, [launch(tmp_path)])
    started, ended = t.run_one(workers)
    assert (started.how, ended.code) == ("zygote", 0)


def test_each_epoch_has_new_ones(workers: Workers, tmp_path: Path) -> None:
    begin(workers, tmp_path)
    (first,) = ready(workers)
    workers.stand_by(RUNG)  # there is one: nothing to do
    workers.kill_all(20)
    workers.launch(2, [launch(tmp_path, CHILD_ACT="wait", CHILD_REPORT=str(tmp_path / "report"))])
    assert until_started(workers)[0].pid == first.pid
    workers.stand_by(RUNG)
    (second,) = ready(workers)
    assert second.pid != first.pid
    workers.kill_all(20)
    workers.launch(3, [launch(tmp_path)])
    started, ended = t.run_one(workers)
    assert (started.pid, ended.code) == (second.pid, 0)


@pytest.mark.process
def test_a_script_has_one_that_has_imported_torch(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nloaded = 'torch' in sys.modules\nimport os, time\n"
        "if os.environ.get('WAIT'):\n    time.sleep(600)\nprint(f'torch {loaded}')\n"
    )
    group = Workers(Task(kind="script", target=str(script), cwd=str(tmp_path)), env=t.base_env())
    try:
        group.launch(1, [launch(tmp_path, WAIT="1")])
        until_started(group)
        group.stand_by(RUNG)
        (standby,) = ready(group)
        group.kill_all(20)
        group.launch(2, [launch(tmp_path)])
        started, ended = t.run_one(group)
        assert (started.how, started.pid, ended.code) == ("standby", standby.pid, 0)
        assert (tmp_path / "logs" / "0.log").read_text().endswith("torch True\n")
    finally:
        group.close()


AGENT = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["TESTS"])
import test_zygote_standbys as mine, test_zygote as t
from elastic_trainer.agent.membership.tasks import Task
from elastic_trainer.agent.workers.workers import Workers
folder = Path(sys.argv[1])
workers = Workers(Task(kind="main", target=t.CHILD, cwd=str(folder)), env=t.base_env())
mine.begin(workers, folder, 2, CHILD_REHEARSAL_0="wait")
mine.ready(workers, 2)
(folder / "zygote").write_text(str(workers._zygote.pid))
time.sleep(600)
"""


@pytest.mark.parametrize("warming", [False, True])
def test_none_outlives_its_agent(tmp_path: Path, *, warming: bool) -> None:
    text = AGENT
    if warming:
        text = text.replace("_REHEARSAL_0", "_REHEARSAL").replace("mine.ready(workers, 2)", "")
    agent = subprocess.Popen(
        [sys.executable, "-c", text, str(tmp_path)], env={**t.base_env(), "TESTS": str(t.HERE)}
    )
    try:
        pids = [warmed(tmp_path, rank)["pid"] for rank in range(2)]
        t.until((tmp_path / "zygote").exists, "not ready")
        assert not any(t.gone(int(str(pid))) for pid in pids)
    finally:
        agent.kill()
        agent.wait()
    for pid in pids:
        t.until(lambda pid=pid: t.gone(int(str(pid))), "a standby is left", deadline_s=10)


def test_requests_for_standbys_of_commands_do_nothing(tmp_path: Path) -> None:
    task = Task(kind="command", target="sleep", args=("600",), cwd=str(tmp_path))
    group = Workers(task, env=t.base_env())
    try:
        group.launch(1, [launch(tmp_path)])
        (first,) = until_started(group)
        group.stand_by(RUNG)
        group.kill_all(20)
        group.launch(2, [launch(tmp_path)])
        (second,) = until_started(group)
        assert (first.how, second.how) == ("fresh", "fresh")
    finally:
        group.close()
