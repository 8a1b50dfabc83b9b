"""Workers of an epoch that may come: they begin ahead, wait, and run once it starts."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_zygote as t
from test_zygote import launch, until_exited, until_started
from test_zygote_standbys import RUNG, ready

from elastic_trainer.agent.membership.tasks import PreparedLost, PreparedReady, Task
from elastic_trainer.agent.workers.workers import Workers


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    env = t.base_env() | {"CHILD_REPORT": str(tmp_path / "all")}
    group = Workers(Task(kind="main", target=t.CHILD, cwd=str(tmp_path)), env=env)
    yield group
    group.close()


def begin(workers: Workers, tmp_path: Path, num: int = 1) -> None:
    """Have `num` workers run, in epoch 1, as long as they are let."""
    workers.launch(1, [launch(tmp_path, rank, CHILD_ACT="wait") for rank in range(num)])
    until_started(workers, num)


def waiting(workers: Workers, num: int = 1) -> set[int]:
    seen = t.gather(workers, lambda s: sum(isinstance(i, PreparedReady) for i in s) == num)
    return {item.local_rank for item in seen if isinstance(item, PreparedReady)}


def lost(workers: Workers) -> PreparedLost:
    seen = t.gather(workers, lambda s: any(isinstance(i, PreparedLost) for i in s))
    return next(item for item in seen if isinstance(item, PreparedLost))


def next_one(tmp_path: Path, rank: int = 0, **env: str) -> t.Launch:
    """Return a worker of epoch 2, which keeps out of the way of that of epoch 1."""
    return launch(tmp_path / "next", rank, **env)


@pytest.fixture(autouse=True)
def _place(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()


def test_it_waits_beside_those_that_run_and_runs_when_its_epoch_starts(
    workers: Workers, tmp_path: Path
) -> None:
    begin(workers, tmp_path, 2)
    report = str(tmp_path / "report")
    launches = [next_one(tmp_path, rank, CHILD_REPORT=report) for rank in range(2)]
    workers.prepare(2, launches)
    assert waiting(workers, 2) == {0, 1}
    assert workers.alive == 2
    assert not (tmp_path / "report.0").exists(), "it goes on before its epoch"
    exits, _ = workers.kill_all(20)
    assert len(exits) == 2
    assert workers.cleared
    workers.launch(2, launches, prepared=True)
    started = until_started(workers, 2)
    assert {one.how for one in started} == {"prepared"}
    ended = until_exited(workers, 2)
    assert {(one.local_rank, one.code) for one in ended} == {(0, 0), (1, 0)}
    assert {one.pid for one in ended} == {one.pid for one in started}
    seen = json.loads((tmp_path / "report.1").read_text())
    assert seen["env"]["RANK"] == "1"
    assert seen["priority"] == os.getpriority(os.PRIO_PROCESS, 0)
    assert set(seen["fds"]) <= {os.devnull, str(tmp_path / "next" / "logs" / "1.log")} | {
        str(tmp_path / "next" / name) for name in ("1.ask", "1.signalled")
    }


@pytest.mark.parametrize("warm", [True, False])
def test_a_standby_is_taken_for_it_warm_or_not(
    workers: Workers, tmp_path: Path, warm: bool
) -> None:
    begin(workers, tmp_path)
    workers.stand_by(RUNG)
    standby = ready(workers)[0] if warm else None
    one = next_one(tmp_path)
    workers.prepare(2, [one])
    assert waiting(workers) == {0}
    workers.kill_all(20)
    workers.launch(2, [one], prepared=True)
    started, ended = t.run_one(workers)
    assert ended.code == 0
    assert standby is None or started.pid == standby.pid
    header = (tmp_path / "next" / "logs" / "0.log").read_text().splitlines()[-2]
    assert header.endswith("standby ---")


def test_a_standby_begins_while_others_end_and_need_not_wait_before_its_start(
    workers: Workers, tmp_path: Path
) -> None:
    begin(workers, tmp_path)
    workers.stand_by(RUNG)
    assert workers.standing == 0
    (standby,) = ready(workers)
    report = str(tmp_path / "report")
    one = next_one(tmp_path, CHILD_REPORT=report, CHILD_BEFORE_HOLD=f"await {tmp_path / 'go on'}")
    seen: list[int] = []

    def meanwhile() -> bool:
        seen.append(workers.alive)
        if len(seen) == 1:
            return False
        os.kill(workers._zygote.pid, signal.SIGCONT)
        assert workers.standing == 1
        workers.prepare(2, [one], urgent=True)
        return True

    os.kill(workers._zygote.pid, signal.SIGSTOP)  # until then it does not say who has ended
    workers.kill_all(20, meanwhile)
    assert seen == [1, 1], "called until it has what it looks for, while others end"
    assert workers.cleared
    assert workers.standing == 0
    said = time.monotonic()
    workers.launch(2, [one], prepared=True)
    (started,) = until_started(workers)
    assert (started.how, started.pid) == ("standby", standby.pid)
    let = time.monotonic()
    (tmp_path / "go on").touch()
    assert until_exited(workers)[0].code == 0
    told = json.loads((tmp_path / "report.0").read_text())
    assert told["env"]["HOLDFAST_URGENT"] == "1"
    assert said < told["begun"] < let, "of its start, which came before it waited"


def test_what_is_dropped_ends_and_the_epoch_forks(workers: Workers, tmp_path: Path) -> None:
    begin(workers, tmp_path)
    one = next_one(tmp_path)
    workers.prepare(2, [one])
    waiting(workers)
    workers.drop_prepared()
    workers.kill_all(20)
    workers.launch(2, [one])
    started, ended = t.run_one(workers)
    assert (started.how, ended.code) == ("zygote", 0)


@pytest.mark.parametrize("act", ["raise a fault", "exit 3", f"signal {signal.SIGKILL:d}"])
def test_one_that_ends_before_it_waits_is_told(workers: Workers, tmp_path: Path, act: str) -> None:
    begin(workers, tmp_path)
    workers.prepare(2, [next_one(tmp_path, CHILD_BEFORE_HOLD=act)])
    said = lost(workers)
    assert said.local_rank == 0
    assert any(word in said.detail for word in ("exit code", "signal 9"))
    assert workers.alive == 1, "those that run are none the worse"


def test_an_epoch_that_counts_on_one_that_died_has_a_dead_worker(
    workers: Workers, tmp_path: Path
) -> None:
    begin(workers, tmp_path)
    one = next_one(tmp_path)
    workers.prepare(2, [one])
    waiting(workers)
    (pid,) = {int(p) for p in _children(workers._zygote.pid)} - {
        one.pid for one in workers.processes().values()
    }
    os.kill(pid, signal.SIGKILL)
    workers.kill_all(20)
    workers.launch(2, [one], prepared=True)
    (ended,) = until_exited(workers)
    assert ended.signal == signal.SIGKILL


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_another_takes_the_place_of_one_that_is_prepared(workers: Workers, tmp_path: Path) -> None:
    begin(workers, tmp_path)
    workers.prepare(2, [next_one(tmp_path, CHILD_BEFORE_HOLD="wait")])
    one = next_one(tmp_path, CHILD_ACT="exit 0")
    workers.prepare(2, [one])
    assert waiting(workers) == {0}
    workers.kill_all(20)
    workers.launch(2, [one], prepared=True)
    assert until_exited(workers)[0].code == 0


def test_it_is_gone_once_the_agent_closes(tmp_path: Path) -> None:
    group = Workers(Task(kind="main", target=t.CHILD, cwd=str(tmp_path)), env=t.base_env())
    begin(group, tmp_path)
    group.prepare(2, [next_one(tmp_path)])
    waiting(group)
    pids = [int(pid) for pid in _children(group._zygote.pid)]
    group.close()
    for pid in pids:
        t.until(lambda pid=pid: t.gone(pid), "it lives on")
