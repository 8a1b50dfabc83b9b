from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_record import Stream, config_of, storm

from launcher.cli.main import run_cli
from launcher.record.files import RunRecord, present_record
from launcher.record.picture import NodeState, picture
from launcher.record.status import TrainingStatus
from launcher.record.summary import summarise
from launcher.runs.runs import find_run
from launcher.runs.watching.findings import Finding, FindingKind
from launcher.runs.watching.screen import Known, Page, screen
from launcher.runs.watching.watch import Following

NODES = [f"node{i}" for i in range(4)]


def fold(events, nodes=4):
    status = TrainingStatus(config_of(nodes=(nodes,)))
    lines = status.apply(events)
    return status, picture(events, status, gpus_per_node=8), lines


def known(events, nodes=4):
    status, folded, lines = fold(events, nodes)
    return Known(status=status, picture=folded, events=lines, now_unix=events[-1].t_unix + 5)


def test_what_each_node_does():
    stream = Stream().start().form(NODES, resume=0).steps(30).kill_node("node2")
    stream.form(["node0", "node1", "node3"], resume=30).steps(40)
    at = {"epoch": 2, "worker_rank": 1, "ratio": 1.5}
    stream.add("worker.slow", node="node0", member="node1", **at)
    stream.add("worker.stalled", node="node3", epoch=2, local_rank=0)
    stream.add("member.evicted", node="node0", member="node9", host="m9", reason="ECC")
    _, folded, _ = fold(stream.events)
    assert folded.nodes == {
        "node0": NodeState.WORKS,
        "node1": NodeState.SLOW,
        "node2": NodeState.LOST,
        "node3": NodeState.STALLED,
        "node9": NodeState.EXCLUDED,
    }
    _, after, _ = fold(stream.steps(41).events)
    assert after.nodes["node3"] is NodeState.WORKS
    assert list(after.nodes) == sorted(after.nodes)


def test_nodes_are_ordered_by_their_numbers():
    names = [f"node{i}" for i in (10, 2, 1)]
    _, folded, _ = fold(Stream().start(3).form(names, resume=0).steps(3).events)
    assert list(folded.nodes) == ["node1", "node2", "node10"]


def test_goodput_and_failures_are_those_of_the_record():
    events = sorted(storm().events, key=lambda event: event.t_unix)
    _, folded, _ = fold(events)
    assert folded.goodput == pytest.approx(summarise(events, code=0)["goodput"], abs=1e-3)
    assert [failure.node for failure in folded.failures] == ["node2", "node0"]
    assert folded.loss[-1][0] == 120
    assert folded.to_json()["failures"][0]["steps_redone"] == 2


many = st.integers(0, 3000)


@given(many, st.sampled_from(Page), st.integers(1, 200), st.integers(1, 70))
def test_every_screen_fits(nodes, page, width, height):
    stream = Stream().start(nodes)
    if nodes:
        names = [f"node{i}" for i in range(nodes)]
        stream.add(
            "epoch.formed",
            epoch=1,
            node="node0",
            members=names,
            spares=[],
            layout="dp1-pp1-cp1-tp1",
        )
        stream.epoch = 1
        stream.steps(50, ranks=1).kill_node(names[-1])
    drawn = screen(known(stream.events, max(1, nodes)), page, width=width, height=height)
    lines = drawn.plain.split("\n")
    assert len(lines) == height
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [60, 200])
def test_a_runbook_is_never_cut_off(width):
    finding = Finding(FindingKind.NO_PROGRESS, "no step for so long" * 5)
    drawn = dataclasses.replace(known(storm().events), findings=[finding])
    for page, name in ((Page.OVERVIEW, "hang"), (Page.FAILURES, "node_lost")):
        text = screen(drawn, page, width=width, height=30).plain
        assert any(line.endswith(f"; holdfast runbook {name}") for line in text.split("\n"))


def test_one_bad_node_of_2048_shows():
    names = [f"node{i}" for i in range(2048)]
    stream = Stream().start(2048)
    stream.add("epoch.formed", epoch=1, node="node0", members=names, spares=[], layout="dp2048")
    stream.epoch = 1
    stream.steps(3, ranks=1)
    stream.add("member.lost", epoch=1, node="node0", member="node777", reason="EOF")
    drawn = screen(known(stream.events, 2048), Page.NODES, width=80, height=24).plain
    assert "node777" in drawn
    assert drawn.count("✕") == 2  # its cell, and the legend


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "one"
    (folder / "events").mkdir(parents=True)
    (folder / "job.json").write_text(config_of().to_json())
    (folder / "events" / "agent-node0.jsonl").write_text(
        "".join(event.encode() for event in storm().events)
    )
    return folder


def test_only_the_newest_steps_of_a_long_record_are_read(run, monkeypatch):
    whole = RunRecord(run).poll()
    monkeypatch.setattr("launcher.record.files.NEWEST", 10)
    record = present_record(run)
    part = record.poll()
    steps = [event for event in part if event.event == "step.completed"]
    assert 0 < len(steps) <= 10
    assert steps == [event for event in whole if event.event == "step.completed"][-len(steps) :]
    left_out = {each.event for each in whole} - {each.event for each in part}
    assert left_out <= {"step.committed", "recovery.phase"}
    with (run / "events" / "agent-node0.jsonl").open("a") as file:
        file.write(whole[0].encode())
    [again] = record.poll()
    assert again == whole[0]


def test_a_record_is_followed_as_it_grows(run):
    following = Following(find_run(str(run), run.parent))
    following.look()
    assert following.known.status.step == 120
    stream = Stream(t=storm().t, epoch=4, step=120).steps(125, ranks=1)
    with (run / "events" / "agent-node0.jsonl").open("a") as file:
        file.writelines(event.encode() for event in stream.events)
    following.look()
    assert following.known.status.step == 125


def test_lines_and_json_end_with_the_run(run, capfd):
    assert run_cli(["watch", str(run), "--json"]) == 0
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert last["training"]["step"] == 120
    assert last["failures"][0]["runbook"] == "holdfast runbook node_lost"
    (run / "pods").mkdir()
    assert run_cli(["watch", str(run)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any("step 120" in line for line in lines)
    assert sum(line.endswith("; holdfast runbook k8s_pod_lost") for line in lines) == 2
    assert run_cli(["watch", "nothing", "--runs", str(run.parent)]) == 2


def test_top_counts_what_it_cannot_read(run, capfd):
    (run.parent / "user" / "two" / "events").mkdir(parents=True)
    (run.parent / "user" / "two" / "job.json").write_text(config_of().to_json())
    assert run_cli(["top", "--runs", str(run.parent), "--all", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert {row["name"] for row in told["runs"]} == {"one", "two"}
    assert told["problems"] == []
    assert run_cli(["top", "--runs", str(run.parent / "none")]) == 0


def read_until(master, wanted, seconds=30.0):
    """Return what a terminal shows, up to `wanted`."""
    shown, until = b"", time.monotonic() + seconds
    while wanted not in shown:
        ready, _, _ = select.select([master], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"{wanted!r} did not come: {shown!r}"
        shown += os.read(master, 65536)
    return shown


@pytest.mark.parametrize("how", ["watch", "top"])
def test_on_a_terminal(run, how):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 120, 0, 0))
    before = termios.tcgetattr(slave)
    words = [str(run)] if how == "watch" else ["--all", "--runs", str(run.parent)]
    command = [sys.executable, "-m", "launcher.cli.main", how, *words]
    env = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env) as process:
        try:
            read_until(master, b"120")
            if how == "watch":
                os.write(master, b"f")
                read_until(master, b"form_epoch")
            os.write(master, b"q")
            drain = threading.Thread(target=lambda: os.read(master, 65536), daemon=True)
            drain.start()
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert termios.tcgetattr(slave) == before
    os.close(slave)
    os.close(master)
