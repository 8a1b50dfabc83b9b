"""The agent: epochs from start to end, failures of workers, zygotes and of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import test_zygote as t
from agent_bench import ME, OTHER, Bench, ScriptedMembership, bench, formed, named
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.metrics import MetricData, MetricHandler
from torch.distributed.elastic.metrics import api as metrics_api

from elastic_trainer.agent import agent as agents
from elastic_trainer.agent.agent import HoldfastAgent
from elastic_trainer.agent.hangs.stacks import GATHER_S, is_stuck, state_of
from elastic_trainer.agent.membership.attribution import attribute
from elastic_trainer.agent.membership.notices import (
    AskWorkers,
    EpochAborted,
    JobStopped,
    NodeLeaving,
    Report,
    ShowWorkers,
    WorkersEnded,
    WorkersFailed,
    WorkersRunning,
    WorkersSeen,
)
from elastic_trainer.agent.membership.tasks import Happening, Launch, Task, WorkerExited
from elastic_trainer.agent.workers.group import JobResult, forward_error_file, process_failure
from elastic_trainer.agent.workers.hang_monitor import AGREE_S
from elastic_trainer.agent.workers.workers import Workers, has_run
from elastic_trainer.plan.gpus import Gpu
from elastic_trainer.plan.ladder import Ladder, Rung
from elastic_trainer.record.failures import Action, Kind
from elastic_trainer.record.flight_recorder import Front
from elastic_trainer.worker.heartbeat import Beat, Request, Section

__all__ = ["bench"]  # the fixture


@pytest.mark.parametrize("section", Section)
def test_a_worker_has_run_once_a_step_is_done_and_not_while_it_connects(section: Section) -> None:
    before = {Section.STARTING, Section.CONNECTING, Section.RESTORING, Section.FIRST_STEP}
    assert has_run(Beat(0, section, 0, 0)) == (section not in before)


def test_runs_an_epoch_to_its_end(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train 3"

    def script(m: ScriptedMembership) -> None:
        running = m.begin(4, OTHER, ME)
        assert (running.epoch, running.phases.keys()) == (4, {"fork"})
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=4, finished=True, step=3)
        m.no_more_reports()

    result, agent, events = bench.run(script)
    assert (result.state, result.is_failed(), result.code) == (WorkerState.SUCCEEDED, False, 0)
    assert [event.event for event in events] == [
        "agent.started", "workers.started", "agent.exit",
    ]  # fmt: skip
    assert (events[1].epoch, events[1].fields["how"]) == (4, "zygote")
    assert (events[1].fields["first_rank"], len(events[1].fields["pids"])) == (2, 2)
    reports = bench.reports()
    assert sorted(reports) == [2, 3]
    env = reports[3]["env"]
    assert isinstance(env, dict)
    expected = {
        "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "ROLE_NAME": "default", "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400",
        "TORCHELASTIC_RESTART_COUNT": "3", "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "HOLDFAST_EPOCH": "4", "HOLDFAST_NODE": "n1",
        "HOLDFAST_ADDRESS": "127.0.0.2",
    }  # fmt: skip
    assert {name: env.get(name) for name in expected} == expected
    assert Rung.from_dict(json.loads(env["HOLDFAST_RUNG"])) == formed(4, OTHER, ME).rung
    group = agent.get_worker_group()
    assert [worker.global_rank for worker in group.workers] == [2, 3]
    assert [worker.id for worker in group.workers] == [reports[2]["pid"], reports[3]["pid"]]
    assert (bench.tmp_path / "logs" / "0" / "n1" / "3.log").exists()


def test_each_local_rank_has_its_cpus(bench: Bench) -> None:
    one = min(os.sched_getaffinity(0))
    bench.config["cpus"] = (None, str(one))
    bench.env["CHILD_ACT"] = "train 1"

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        m.expect(WorkersEnded)
        m.no_more_reports()

    bench.run(script)
    logs = bench.tmp_path / "logs" / "0" / "n1"
    told = [f"on CPUs {one}," in (logs / f"{rank}.log").read_text() for rank in (0, 1)]
    assert told == [False, True]


def test_saves_and_leaves_when_asked(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        m.say(AskWorkers(epoch=7, request=Request.STOP))  # of another epoch: not for them
        m.say(AskWorkers(epoch=0, request=Request.GROW))
        ended = m.expect(WorkersEnded)
        assert not ended.finished
        assert ended.step >= 1

    bench.run(script)


def test_an_aborted_epoch_is_killed_and_the_next_one_runs(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.begin(1, OTHER, ME)
        m.say(EpochAborted(epoch=0, reason="an old one", victims=()))
        m.say(EpochAborted(epoch=1, reason="node lost", victims=("n0",)))
        m.say(formed(0, OTHER, ME))  # late: fenced out
        running = m.begin(2, ME)
        assert (running.epoch, running.phases.keys()) == (2, {"fork", "kill_workers"})
        m.no_more_reports()

    _, _, events = bench.run(script)
    assert named(events, "worker.exit") == [], "that they are killed follows"
    assert [event.epoch for event in named(events, "workers.started")] == [1, 2]
    assert sorted(bench.reports()) == [0, 1, 2, 3]


def test_an_epoch_does_not_run_before_the_start_of_all_its_workers_is_known(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may have completed a step before the zygote's word of their start is read."""
    bench.env["CHILD_ACT"] = "train"
    poll, report = Workers.poll, ScriptedMembership.report
    late: list[Happening] = []
    turns = 0
    known: list[bool] = []

    def poll_late(workers: Workers, timeout_s: float = 0.0) -> list[Happening]:
        nonlocal turns
        late.extend(poll(workers, timeout_s))
        turns += len(late) == bench.num_workers and all(map(has_run, workers.beats().values()))
        found = late[:] if turns > 1 else []  # a turn looks at the heartbeats after this
        del late[: len(found)]
        return found

    def noted(membership: ScriptedMembership, said: Report) -> None:
        if isinstance(said, WorkersRunning):
            known.append(not late)
        report(membership, said)

    monkeypatch.setattr(Workers, "poll", poll_late)
    monkeypatch.setattr(ScriptedMembership, "report", noted)

    def script(m: ScriptedMembership) -> None:
        assert m.begin(0, ME).phases.keys() == {"fork"}

    bench.run(script)
    assert known == [True]


def test_a_spare_runs_nothing_until_it_is_a_member(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train 2"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(1, OTHER, spares=(ME,)))
        m.say(EpochAborted(epoch=1, reason="node lost", victims=("n0",)))
        m.begin(2, ME)
        m.expect(WorkersEnded)

    _, _, events = bench.run(script)
    assert [event.epoch for event in named(events, "workers.started")] == [2]


@pytest.mark.parametrize(
    ("act", "kind", "action", "detail"),
    [
        ("raise all is lost", Kind.CRASH, Action.RESTART, "RuntimeError: all is lost"),
        ("signal 9", Kind.KILLED, Action.RESTART, "SIGKILL"),
        ("exit 93", Kind.USER_ERROR, Action.STOP, "child does exit 93"),
        ("raise HF999 uncorrectable ECC error", Kind.NODE_FAULT, Action.EVICT, "ECC"),
    ],
)
def test_the_first_failure_is_reported_and_the_rest_killed(
    bench: Bench, act: str, kind: Kind, action: Action, detail: str
) -> None:
    bench.env |= {"CHILD_ACT": "train", "CHILD_ACT_1": act}

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert (failed.local_rank, failed.rank) == (1, 1)
        assert (failed.failure.kind, failed.failure.action) == (kind, action)
        assert detail in failed.failure.detail
        m.no_more_reports()

    _, _, events = bench.run(script)
    exits = [event.fields for event in named(events, "worker.exit")]
    assert [(each["local_rank"], each["kind"]) for each in exits] == [(1, kind)]


@pytest.mark.parametrize("stepped", [True, False])
def test_a_failure_says_whether_a_step_was_done_before(bench: Bench, stepped: bool) -> None:
    bench.env["CHILD_ACT"] = "train" if stepped else "raise odd"

    def script(m: ScriptedMembership) -> None:
        m.say(formed(3, ME))
        if stepped:
            m.expect(WorkersRunning)
            os.kill(bench.zygotes[0]._zygote.pid, signal.SIGKILL)
        failed = m.expect(WorkersFailed)
        assert failed.stepped is stepped
        assert m.stepped == ([3] if stepped else [])

    bench.run(script)


def test_a_fault_of_a_gpu_names_the_gpu_of_the_worker(bench: Bench) -> None:
    uuids = [f"GPU-{digit * 8}-aaaa-bbbb-cccc-{digit * 12}" for digit in "01"]
    bench.config["gpus"] = tuple(Gpu(str(i), uuid, f"0:{i}:0") for i, uuid in enumerate(uuids))
    bench.env |= {"CHILD_ACT": "train", "CHILD_ACT_1": "raise uncorrectable ECC error"}

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert failed.failure.kind is Kind.NODE_FAULT
        assert uuids[1] in failed.failure.detail
        m.no_more_reports()

    _, _, events = bench.run(script)
    assert [event.fields["gpus"] for event in named(events, "agent.started")] == [uuids]


def test_a_failure_counts_although_another_worker_was_seen_to_end_well_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.env |= {"CHILD_ACT_0": "exit 0", "CHILD_ACT_1": "exit 5"}
    poll, ends = Workers.poll, []

    def both_at_once(workers: Workers, timeout_s: float = 0.0) -> list[Happening]:
        found = poll(workers, timeout_s)
        ends.extend(each for each in found if isinstance(each, WorkerExited))
        rest: list[Happening] = [each for each in found if not isinstance(each, WorkerExited)]
        if len(ends) < 2:
            return rest
        rest += sorted(ends, key=lambda end: end.rank)
        ends.clear()
        return rest

    monkeypatch.setattr(Workers, "poll", both_at_once)

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert failed.rank == 1
        m.no_more_reports()

    bench.run(script)


def test_a_consequence_waits_for_its_cause(bench: Bench) -> None:
    bench.config["settle_s"] = 20.0
    bench.env |= {
        "CHILD_ACT_0": "raise Connection closed by peer",
        "CHILD_ACT_1": "late raise the cause",
    }

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert (failed.rank, failed.failure.kind) == (1, Kind.CRASH)
        m.no_more_reports()

    bench.run(script)


def test_a_consequence_alone_is_reported_soon(bench: Bench) -> None:
    bench.env |= {"CHILD_ACT": "train", "CHILD_ACT_0": "raise Connection closed by peer"}

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        failed = m.expect(WorkersFailed)
        assert (failed.rank, failed.failure.kind) == (0, Kind.COLLATERAL)

    bench.run(script)


def test_a_hang_is_a_failure(bench: Bench) -> None:
    bench.config |= {"hang_ceiling_s": 0.3, "unattributed_s": 0.2}
    bench.env |= {"CHILD_ACT_0": "train", "CHILD_ACT_1": "stall 20"}

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        seen = m.expect(WorkersSeen)
        while not seen.hangs:  # the first warnings come before the limit
            assert seen.stalled
            seen = m.expect(WorkersSeen)
        assert [view.idle_s > view.limit_s for view in seen.workers] == [False, True]
        assert [view.rank for view in seen.workers] == [0, 1]
        failed = m.expect(WorkersFailed)
        assert (failed.local_rank, failed.step) == (1, 20)
        assert (failed.failure.kind, failed.failure.action) == (Kind.HANG, Action.RESTART)
        assert "0.3 s" in failed.failure.detail

    _, _, events = bench.run(script)
    (hung,) = named(events, "worker.hung")
    assert (hung.fields["local_rank"], hung.fields["section"]) == (1, "step")
    (stalled,) = named(events, "worker.stalled")
    assert (stalled.fields["local_rank"], stalled.fields["part"]) == (1, "other")


def test_workers_say_how_far_they_are_in_their_collectives(bench: Bench) -> None:
    entry = {"process_group": ["5", "mesh_dp"], "is_p2p": False, "retired": True}
    entry |= {"collective_seq_id": 41, "state": "completed"}
    bench.env |= {"CHILD_ACT": "train", "CHILD_FLIGHT": json.dumps({"entries": [entry]})}

    def script(m: ScriptedMembership) -> None:
        m.begin(3, OTHER, ME)
        looks: list[list[tuple[int, Mapping[str, Front]]]] = []
        since = time.monotonic()
        while not looks or not all(fronts for _, fronts in looks[-1]):
            m.say(ShowWorkers(epoch=3))
            seen = m.expect(WorkersSeen)
            looks.append([(v.rank, v.fronts) for v in seen.workers])
        # One look may have caught them between two collectives.
        assert looks[0] == [(2, {}), (3, {})]
        assert looks[-1] == [(2, {"5": (41, 41)}), (3, {"5": (41, 41)})]
        assert time.monotonic() - since >= AGREE_S

    bench.run(script)


def test_stacks_of_all_workers_are_kept_before_they_are_killed(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.begin(3, OTHER, ME)
        pids = {rank: report["pid"] for rank, report in bench.reports().items()}
        os.kill(pids[3], signal.SIGSTOP)
        t.until(lambda: state_of(pids[3]) == "T", "not stopped")
        m.say(ShowWorkers(epoch=3))
        seen = m.expect(WorkersSeen)
        assert not seen.stalled
        told = time.time()
        m.say(EpochAborted(epoch=3, reason="hang", victims=(), stacks=True))
        t.until(lambda: all(t.gone(pid) for pid in pids.values()), "not killed")
        # Agents of other nodes may be told later, and their workers fail when these end.
        assert time.time() - told >= GATHER_S

    _, _, events = bench.run(script)
    (dumped,) = named(events, "stacks.dumped")
    assert dumped.epoch == 3
    assert dumped.fields["seconds"] < 1.0
    folder = Path(dumped.fields["folder"])
    assert folder == bench.tmp_path / "stacks" / "3"
    runs, stopped = ((folder / f"rank{rank}.txt").read_text() for rank in (2, 3))
    assert "_train" in runs
    assert "State T" in stopped
    heading = "--- stacks, from the worker itself\n"
    assert [heading in text for text in (runs, stopped)] == [True, False]
    assert list(bench.tmp_path.rglob("*.stacks")) == []


def test_a_zygote_that_dies_is_a_failure_and_twice_a_bad_node(bench: Bench) -> None:
    bench.env["CHILD_ACT"] = "wait"

    def script(m: ScriptedMembership) -> None:
        for epoch in range(2):
            m.say(formed(epoch, ME))
            t.until(lambda: len(bench.reports()) == 2, "not started")
            os.kill(bench.zygotes[0]._zygote.pid, signal.SIGKILL)
            failed = m.expect(WorkersFailed)
            assert failed.epoch == epoch
            assert failed.failure.kind is Kind.COLLATERAL
            assert "SIGKILL" in failed.failure.detail
            for path in bench.tmp_path.glob("report.*"):
                path.unlink()
        assert re.search(r"\b2\b.*SIGKILL", m.expect(NodeLeaving).reason)
        # A coordinator stays, but starts no third one.
        t.until(lambda: t.gone(bench.zygotes[0]._zygote.pid), "a third zygote")
        m.say(formed(2, OTHER, spares=(ME,)))
        m.no_more_reports()

    bench.run(script)


def test_a_directory_in_memory_that_is_removed_is_made_again(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by systemd-logind at the end of a user's last session."""
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        (scratch,) = bench.tmp_path.glob("holdfast-*")
        shutil.rmtree(scratch)
        m.say(EpochAborted(epoch=0, reason="another node is lost", victims=("n0",)))
        m.begin(1, ME)
        assert (scratch / "owner").is_file()
        assert (scratch / "snapshots").is_dir()

    bench.run(script)
    assert capfd.readouterr().err.count(f"{bench.tmp_path}/holdfast-") == 1


@pytest.mark.parametrize("of_memory", [False, True])
def test_a_zygote_that_dies_where_workers_have_run_is_not_held_against_the_node(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, of_memory: bool
) -> None:
    bench.env["CHILD_ACT"] = "train"

    def script(m: ScriptedMembership) -> None:
        for epoch in range(3):
            m.begin(epoch, ME)
            (workers,) = bench.zygotes
            before = workers._oom_kills()
            if of_memory:
                monkeypatch.setattr(workers, "_oom_kills", lambda before=before: before + 1)
            os.kill(workers._zygote.pid, signal.SIGKILL)
            failed = m.expect(WorkersFailed)
            assert failed.failure.kind is (Kind.OUT_OF_MEMORY if of_memory else Kind.COLLATERAL)
            (found,) = attribute([], [("n1", failed), ("n2", failed)][: 1 + of_memory], 2)
            assert found.node is None
        m.no_more_reports()

    bench.run(script)


def test_a_zygote_that_dies_before_any_epoch_twice_is_a_bad_node(bench: Bench) -> None:
    def script(m: ScriptedMembership) -> None:
        first = bench.zygotes[0]._zygote.pid
        os.kill(first, signal.SIGKILL)
        t.until(lambda: bench.zygotes[0]._zygote.pid != first, "not replaced")
        os.kill(bench.zygotes[0]._zygote.pid, signal.SIGKILL)
        assert re.search(r"\b2\b.*SIGKILL", m.expect(NodeLeaving).reason)

    bench.run(script)


def test_a_process_is_stuck_when_a_thread_is_in_the_kernel(tmp_path: Path) -> None:
    for thread, state in ((7, "Z"), (8, "S"), (9, "R")):
        stat = tmp_path / "7" / "task" / str(thread) / "stat"
        stat.parent.mkdir(parents=True)
        stat.write_text(f"{thread} (D) D python) {state} 1 7 7 0 -1")
    assert not is_stuck(7, proc=tmp_path)
    (tmp_path / "7" / "task" / "9" / "stat").write_text("9 (python) D 1 7 7 0 -1")
    assert is_stuck(7, proc=tmp_path)
    assert not is_stuck(8, proc=tmp_path)


@pytest.mark.parametrize("lost", ["a node", "a worker"])
def test_standbys_begin_the_next_epoch_while_workers_end(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    bench.env["CHILD_ACT"] = "train"
    bench.config["standbys_for"] = Ladder.data_parallel(max_nodes=2, min_nodes=1, workers=2)
    begun: list[tuple[int, bool, int]] = []
    kill_all, real = Workers.kill_all, Workers.prepare

    def kill(self: Workers, *args: Any) -> tuple[list[WorkerExited], list[int]]:
        if not begun:
            os.kill(self._zygote.pid, signal.SIGSTOP)  # it says later who has ended
        return kill_all(self, *args)

    def prepare(self: Workers, epoch: int, launches: list[Launch], *, urgent: bool = False) -> None:
        os.kill(self._zygote.pid, signal.SIGCONT)
        begun.append((epoch, urgent, self.alive))
        real(self, epoch, launches, urgent=urgent)

    monkeypatch.setattr(Workers, "kill_all", kill)
    monkeypatch.setattr(Workers, "prepare", prepare)

    def standing() -> bool:
        return len(named(bench.events(), "standby.ready")) == 2

    def script(m: ScriptedMembership) -> None:
        m.begin(1, OTHER, ME)
        t.until(standing, "no standby")
        if lost == "a node":
            m.say(EpochAborted(epoch=1, reason="node lost", victims=("n0",)), formed(2, ME))
        else:
            (started,) = named(bench.events(), "workers.started")
            m.answer_failures(formed(2, ME))
            os.kill(started.fields["pids"][0], signal.SIGKILL)
            m.expect(WorkersFailed)
        running = m.expect(WorkersRunning)
        assert (running.epoch, running.phases.keys()) == (2, {"fork", "kill_workers"})
        m.no_more_reports()

    _, _, events = bench.run(script)
    ((epoch, urgent, alive),) = begun
    assert (epoch, urgent) == (2, True)
    assert alive == {"a node": 2, "a worker": 1}[lost], "those of epoch 1 are on their way out"
    assert [e.fields["how"] for e in named(events, "workers.started")] == ["zygote", "standby"]


def test_a_worker_that_ends_late_does_not_cost_the_node_its_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose memory the driver still frees: not in state D."""
    bench.env["CHILD_ACT"] = "train"
    real = Workers.kill_all

    def late(self: Workers, *args: Any) -> tuple[list[WorkerExited], list[int]]:
        exits, unreapable = real(self, *args)
        return exits[1:], [*unreapable, os.getpid()]

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        with monkeypatch.context() as during:
            during.setattr(Workers, "kill_all", late)
            m.say(EpochAborted(epoch=0, reason="another node is lost", victims=("n0",)))
            m.begin(1, ME)

    _, _, events = bench.run(script)
    assert [e.fields["stuck"] for e in named(events, "worker.unreapable")] == [False]
    assert len(named(events, "workers.started")) == 2


def test_a_worker_that_cannot_be_killed_costs_the_node_its_place(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stuck in the kernel: killed, but never reaped."""
    monkeypatch.setattr(agents, "is_stuck", lambda _pid: True)
    bench.env["CHILD_ACT"] = "wait"
    real = Workers.kill_all
    left: list[str] = []

    def stuck(self: Workers, *args: Any) -> tuple[list[WorkerExited], list[int]]:
        exits, unreapable = real(self, *args)
        return exits[1:], [*unreapable, *(item.pid for item in exits[:1])]

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        t.until(lambda: len(bench.reports()) == 2, "not started")
        monkeypatch.setattr(Workers, "kill_all", stuck)
        m.say(EpochAborted(epoch=0, reason="another node is lost", victims=("n0",)))
        left.append(m.expect(NodeLeaving).reason)
        m.say(formed(1, ME))  # too late: it runs nothing any more
        m.say(JobStopped(code=92, reason="excluded"))

    result, _, events = bench.run(script)
    assert result.code == 92
    (unreapable,) = named(events, "worker.unreapable")
    assert str(unreapable.fields["pid"]) in left[0]
    # Those of epoch 0 may be killed before the zygote's word of their start is read.
    assert {event.epoch for event in named(events, "workers.started")} <= {0}


def test_an_error_of_the_agents_own_ends_workers_and_says_what_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.env["CHILD_ACT"] = "wait"

    def broken(self: HoldfastAgent) -> None:
        raise RuntimeError("out of order")

    def script(m: ScriptedMembership) -> None:
        m.say(formed(0, ME))
        t.until(lambda: len(bench.reports()) == 2, "not started")
        monkeypatch.setattr(HoldfastAgent, "_look_at_heartbeats", broken)
        assert m.closing.wait(t.DEADLINE_S)

    with pytest.raises(RuntimeError, match="out of order"):
        bench.run(script)
    (ended,) = named(bench.events(), "agent.exit")
    assert ended.fields["code"] == 1
    assert ended.fields["reason"].endswith("RuntimeError: out of order")
    assert all(t.gone(report["pid"]) for report in bench.reports().values())


class Told(logging.Handler, MetricHandler):
    """What a site would register with torchelastic: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []
        self.metrics: dict[str, int] = {}
        self.fails = False

    def emit(self, told: Any) -> None:
        if self.fails:
            raise OSError("no network")
        if isinstance(told, MetricData):
            self.metrics[told.name] = told.value
        else:
            self.events.append(json.loads(told.getMessage()))

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802
        raise OSError("no network")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Told:
    told = Told()
    monkeypatch.setitem(handlers._log_handlers, "site", told)
    monkeypatch.setattr(events, "_events_loggers", {})
    monkeypatch.setitem(metrics_api._metrics_map, "torchelastic", told)
    bench.event_log_handler = "site"
    return told


def test_torchelastics_events_and_metrics_are_told(bench: Bench, told: Told) -> None:
    bench.env |= {"CHILD_ACT": "train", "CHILD_ACT_3": "raise all is lost"}

    def script(m: ScriptedMembership) -> None:
        m.begin(1, ME)
        m.say(EpochAborted(epoch=1, reason="node lost", victims=("n0",)))
        m.begin(2, ME)
        m.say(EpochAborted(epoch=2, reason="again", victims=("n0",)))
        m.say(formed(3, OTHER, ME))
        m.expect(WorkersFailed)
        m.say(JobStopped(code=94, reason="restart budget used up"))
        assert m.closing.wait(t.DEADLINE_S)

    result, _, _ = bench.run(script)
    assert (result.code, result.state) == (94, WorkerState.FAILED)
    assert list(result.failures) == [3]
    failure = result.failures[3]
    assert failure.exitcode == 1
    assert "all is lost" in json.dumps(failure.error_file_data)
    places = [
        (event["source"], event["metadata"]["state"], event["metadata"]["global_rank"])
        for event in told.events
    ]
    assert places == [
        ("AGENT", "RENDEZVOUS", None), ("WORKER", "START", 0), ("WORKER", "START", 1),
        ("AGENT", "RENDEZVOUS", None), ("WORKER", "START", 0), ("WORKER", "START", 1),
        ("AGENT", "RENDEZVOUS", None), ("WORKER", "START", 2), ("WORKER", "START", 3),
        ("WORKER", "TERMINATED", 2), ("WORKER", "FAILED", 3), ("AGENT", "FAILED", None),
    ]  # fmt: skip
    failed = told.events[-2]
    assert failed["name"] == "torchelastic.worker.status.FAILED"
    expected = {
        "run_id": "run", "rdzv_backend": "scripted", "role": "default", "hostname": "n1",
        "group_rank": 1, "agent_restarts": 2, "worker_id": str(failure.pid),
    }  # fmt: skip
    assert {name: failed["metadata"][name] for name in expected} == expected
    assert "all is lost" in failed["metadata"]["raw_error"]
    assert json.loads(failed["metadata"]["metadata"])["exit_code"] == [1]
    values = {name.removeprefix("workers.default."): n for name, n in told.metrics.items()}
    assert 0 < values.pop("recovery.duration.ms") < t.DEADLINE_S * 1000
    assert values == {
        "epoch": 3, "healthy": 1, "unhealthy": 1, "failed": 1, "run_total": 1,
        "run_success_with_retries": 0, "run_success_no_retries": 0,
        "run_failed_with_retries": 1, "run_failed_no_retries": 0,
    }  # fmt: skip


def test_a_handler_that_fails_costs_nothing_but_what_it_was_to_tell(
    bench: Bench, told: Told, capfd: pytest.CaptureFixture[str]
) -> None:
    bench.env["CHILD_ACT"] = "train 1"
    told.fails = True

    def script(m: ScriptedMembership) -> None:
        m.begin(1, ME)
        m.expect(WorkersEnded)

    assert bench.run(script)[0].code == 0
    assert "OSError: no network" in capfd.readouterr().err


def test_the_first_failure_is_handed_to_who_started_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_for, left = tmp_path / "asked.json", tmp_path / "left.json"
    left.write_text('{"message": {"message": "lost", "extraInfo": {"timestamp": "5"}}}')
    failures = {
        rank: process_failure(
            WorkerExited(
                local_rank=rank, rank=rank, pid=7, code=1, signal=None, record={"message": "x"},
                error_file=path, log=path, log_tail="", beat=Beat(0, Section.STARTING, 0, 0),
            )
        )
        for rank, path in ((0, tmp_path / "gone.json"), (1, left))
    }  # fmt: skip
    result = JobResult(state=WorkerState.FAILED, failures=failures, code=93)
    forward_error_file(result)
    assert not asked_for.exists()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(asked_for))
    forward_error_file(result)
    assert json.loads(asked_for.read_text())["message"]["message"] == "lost"


def test_scripts_without_heartbeats_run_as_soon_as_they_have_started(bench: Bench) -> None:
    bench.task = Task(
        kind="command", target=sys.executable, args=("-c", "pass"), cwd=str(bench.tmp_path)
    )
    bench.config["watch_all"] = False

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        assert m.expect(WorkersEnded) == WorkersEnded(epoch=0, finished=True, step=0)

    _, _, events = bench.run(script)
    assert {event.fields["how"] for event in named(events, "workers.started")} == {"fresh"}


def test_fork_to_main_is_quick(bench: Bench) -> None:
    """Not a benchmark: a warm fork must not import anything again."""
    bench.env["CHILD_ACT"] = "train 1"
    said: list[float] = []

    def script(m: ScriptedMembership) -> None:
        m.begin(0, ME)
        m.expect(WorkersEnded)
        said.append(time.monotonic())
        m.begin(1, ME)
        m.expect(WorkersEnded)

    bench.run(script)
    slowest = max(float(str(report["begun"])) for report in bench.reports().values()) - said[0]
    assert slowest < 1.0
