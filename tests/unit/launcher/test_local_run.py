"""The watching loop, with a cluster that only remembers what was asked of it."""

from __future__ import annotations

import io
import signal

import pytest
from synthetic_record import Stream, config_of

from launcher.local.faults import Chaos, parse_faults
from launcher.local.run import Interrupts, LocalRun
from launcher.record.files import LauncherLog, RunRecord
from launcher.record.status import TrainingStatus
from launcher.runs.watching.screen import PlainView

NODES = ["node0", "node1", "node2"]


class Node:
    def __init__(self, name):
        self.name, self.alive, self.paused = name, False, False


class Cluster:
    """In the place of LocalCluster: every node it is told to stop ends with 91."""

    attempt = 1

    def __init__(self):
        self.nodes = {name: Node(name) for name in NODES}
        self.calls, self.dead, self.ended = [], [], {}

    def start(self):
        for node in self.nodes.values():
            node.alive = True

    def alive(self):
        return [name for name, node in self.nodes.items() if node.alive]

    def codes(self):
        return self.ended

    def end(self, code):
        for name in self.alive():
            self.nodes[name].alive = False
            self.ended[name] = code

    def kill_node(self, name):
        self.calls.append(("kill", name))
        self.nodes[name].alive = False
        self.dead.append(name)

    def start_node(self, name):
        self.calls.append(("return", name))
        self.nodes[name].alive = True
        self.dead.remove(name)

    def longest_dead(self):
        return self.dead[0] if self.dead else None

    def kill_agent(self, name):
        self.calls.append(("agent", name))
        self.nodes[name].alive = False
        self.dead.append(name)

    def kill_zygote(self, name):
        self.calls.append(("zygote", name))

    def signal_worker(self, number, pid):
        self.calls.append((number, pid))

    def pause_node(self, name):
        self.calls.append(("pause", name))
        self.nodes[name].paused = True

    def resume_node(self, name):
        self.calls.append(("resume", name))
        self.nodes[name].paused = False

    def check_small_disk(self):
        pass

    def fill_disk(self, left_bytes):
        self.calls.append(("fill", left_bytes))

    def free_disk(self):
        self.calls.append(("free",))

    def stop(self):
        self.calls.append(("stop",))
        self.end(91)

    def kill_all(self):
        self.calls.append(("kill all",))
        for node in self.nodes.values():
            node.alive = False


class Story:
    """Feeds the record one chapter at every turn of the loop."""

    def __init__(self, tmp_path, faults, chapters, interrupts=None, chaos=None):
        self.cluster, self.stream, self.written = Cluster(), Stream(), 0
        self.path = tmp_path / "events" / "agents.jsonl"
        self.path.parent.mkdir()
        self.chapters, self.out = iter(chapters), io.StringIO()
        self.turns = 0
        self.run = LocalRun(
            cluster=self.cluster,
            record=RunRecord(tmp_path),
            log=LauncherLog(tmp_path, "launcher-1"),
            progress=TrainingStatus(config_of(steps=100, nodes=(3,))),
            view=PlainView(self.out),
            faults=parse_faults(faults, num_nodes=3, num_workers=3, steps=100),
            chaos=chaos,
            interrupts=interrupts or Interrupts(),
            mono=lambda: float(self.turns),
            sleep=self.turn,
        )

    def turn(self, _):
        self.turns += 1
        assert self.turns < 100, "the loop does not end"
        chapter = next(self.chapters, None)
        if chapter is None:
            self.cluster.end(0)
            return
        chapter(self)
        with self.path.open("a") as file:
            file.write("".join(e.encode() for e in self.stream.events[self.written :]))
        self.written = len(self.stream.events)


def form(*members, resume=0):
    return lambda story: story.stream.form(list(members), resume=resume)


def steps(upto):
    return lambda story: story.stream.steps(upto)


def injected(story):
    return [
        (e.fields["action"], e.node, e.step)
        for e in story.run.record.events
        if e.event == "fault.injected"
    ]


def test_faults_strike_once_after_their_step_while_training(tmp_path):
    story = Story(
        tmp_path,
        ["kill-node:2@5", "kill-coordinator@6", "return-node@8"],
        [
            form(*NODES),
            steps(4),
            steps(6),  # 5 strikes; 6 waits until training goes on
            lambda s: s.stream.add("epoch.aborted", epoch=1, reason="lost", victims=["node2"]),
            form("node0", "node1", resume=3),
            steps(5),
            steps(7),
            form("node1", resume=7),
            steps(9),
            steps(10),
        ],
    )
    story.run.run()
    assert [call for call in story.cluster.calls if call[0] != "kill all"] == [
        ("kill", "node2"),
        ("kill", "node0"),
        ("return", "node2"),
    ]
    assert injected(story) == [
        ("kill-node", "node2", 6),
        ("kill-coordinator", "node0", 7),
        ("return-node", "node2", 9),
    ]


def test_kill_worker_finds_the_pid_of_this_epoch(tmp_path):
    def started(epoch, pid):
        return lambda s: s.stream.add(
            "workers.started", epoch=epoch, node="node1", first_rank=1, pids=[pid], how="zygote"
        )

    story = Story(
        tmp_path,
        ["kill-worker:1@5"],
        [form(*NODES), started(1, 11), steps(4), form(*NODES), started(2, 22), steps(6)],
    )
    story.run.run()
    assert (signal.SIGKILL, 22) in story.cluster.calls


def test_a_parked_job_gets_its_node_back_at_once(tmp_path):
    story = Story(
        tmp_path,
        ["kill-node:1@2", "return-node@50"],
        [
            form(*NODES),
            steps(3),
            lambda s: s.stream.add("membership.parked", have=2, need=3),
            lambda _: None,
        ],
    )
    story.run.run()
    assert ("return", "node1") in story.cluster.calls
    assert "parked: 2 nodes" in story.out.getvalue()


@pytest.mark.parametrize("silent_before", [0, 20])
def test_a_full_disk_silences_the_run_and_is_freed_but_not_before_it_is_full(
    tmp_path, silent_before
):
    quiet = [lambda story: story.stream.add("board.failed", detail="no space")]
    story = Story(
        tmp_path,
        ["fill-disk:1@5", "free-disk@50"],
        [*quiet * silent_before, form(*NODES), steps(4), steps(6), *quiet * 20],
    )
    story.run.run()
    assert [call for call in story.cluster.calls if call[0] != "kill all"] == [
        ("fill", 1024),
        ("free",),
    ]
    assert injected(story) == [("fill-disk", None, 6), ("free-disk", None, 6)]


def test_a_disk_is_not_filled_under_a_save(tmp_path):
    def save(what, step):
        return lambda story: story.stream.add(f"checkpoint.{what}", step=step)

    story = Story(
        tmp_path,
        ["fill-disk:1@5", "free-disk@50"],
        [form(*NODES), save("started", 4), steps(5), steps(6), save("committed", 4), steps(50)],
    )
    story.run.run()
    assert injected(story) == [("fill-disk", None, 6), ("free-disk", None, 50)]


def test_when_faults_have_killed_every_node_one_comes_back(tmp_path):
    story = Story(
        tmp_path,
        ["kill-node:0@2", "kill-node:1@2", "kill-node:2@2", "return-node@60", "return-node@61"],
        [form(*NODES), steps(3), lambda _: None],
    )
    story.run.run()
    assert ("return", "node0") in story.cluster.calls


def test_what_cannot_be_done_is_said(tmp_path):
    story = Story(tmp_path, ["return-node:1@2", "resume-node@2"], [form(*NODES), steps(3)])
    story.run.run()
    assert all(fault in story.out.getvalue() for fault in ("return-node:1@2", "resume-node@2"))
    assert injected(story) == []


def test_one_interrupt_stops_cleanly(tmp_path):
    interrupts = Interrupts()
    story = Story(
        tmp_path, ["kill-node:1@5"], [form(*NODES), lambda _: interrupts(2, None)], interrupts
    )
    story.run.run()
    assert ("stop",) in story.cluster.calls
    assert story.cluster.codes() == dict.fromkeys(NODES, 91)


def test_a_second_interrupt_kills(tmp_path):
    interrupts = Interrupts()
    story = Story(
        tmp_path,
        [],
        [form(*NODES), lambda _: interrupts(2, None), lambda _: interrupts(2, None)],
        interrupts,
    )
    story.cluster.stop = lambda: None  # agents that do not listen
    story.run.run()
    assert story.cluster.codes() == {}
    assert story.cluster.calls[-1] == ("kill all",)


@pytest.mark.parametrize("faults", [[], ["return-node@50"]])
def test_agents_that_all_end_by_themselves_end_the_run(tmp_path, faults):
    story = Story(tmp_path, faults, [form(*NODES), lambda s: s.cluster.end(93)])
    story.run.run()
    assert story.cluster.codes() == dict.fromkeys(NODES, 93)


def add(name, **fields):
    return lambda story: story.stream.add(name, **fields)


def test_a_fault_with_a_phase_waits_for_its_next_beginning(tmp_path):
    story = Story(
        tmp_path,
        ["kill-agent:1@3/save", "kill-zygote:2@3/restore"],
        [
            form(*NODES),
            steps(2),
            add("checkpoint.started"),  # too early
            steps(6),
            add("checkpoint.started"),
            steps(7),
            add("epoch.aborted", epoch=1, reason="lost", victims=["node1"]),
            form("node0", "node2", resume=7),
            add("recovery.phase", phase="model", epoch=2),
            steps(9),
            add("checkpoint.started"),
        ],
    )
    story.run.run()
    assert injected(story) == [("kill-agent", "node1", 6), ("kill-zygote", "node2", 7)]
    assert story.cluster.calls[:2] == [("agent", "node1"), ("zygote", "node2")]


def test_chaos_kills_and_returns_but_never_the_last_node(tmp_path):
    chapters = [form(*NODES), *[steps(upto) for upto in range(1, 60)]]
    story = Story(tmp_path, [], chapters, chaos=Chaos(seed=3, mean_s=2.0, return_s=5.0))
    story.run.run()
    calls = [call for call in story.cluster.calls if call[0] != "kill all"]
    assert {kind for kind, _ in calls} == {"kill", "return"}
    up = set(NODES)
    for kind, name in calls:
        (up.remove if kind == "kill" else up.add)(name)
        assert up
    assert len(calls) > 20
    assert [(kind[:4], node) for kind, node, _ in injected(story)] == [
        (kind[:4], name) for kind, name in calls
    ]
