"""Records of nodes whose clocks are minutes or a day apart."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_trainer.events import Event
from launcher.ops.record.breakdown import failures
from launcher.ops.record.clocks import TOLERANCE_S, by_one_clock
from launcher.ops.record.record import RunRecord
from launcher.ops.record.summary import summarise
from launcher.ops.record.timeline import epochs

NODES = ["node0", "node1", "node2", "node3"]
BEGIN = 1_800_000_000.0
BOOTS = {"launcher": 90_000.0, "node0": 7_000.0, "node1": 300.0, "node2": 1e6, "node3": 50.0}
"""Monotonic clocks are unrelated."""


class Writers:
    """Writes a run by the true time; each writer's file has its own clocks."""

    def __init__(self, wall=(), seed: int = 0) -> None:
        self.wall, self.dice = dict(wall), random.Random(seed)
        self.boots = dict(BOOTS)
        self.t, self.truth = BEGIN, []
        self.files: dict[str, list[Event]] = {}

    def add(self, writer: str, name: str, after: float = 0.0, **fields) -> None:
        """Write an event `after` seconds from now, and a little."""
        node = writer.rsplit(".", maxsplit=1)[-1]
        known = {k: fields.pop(k, None) for k in ("rank", "epoch", "step")}
        t = self.t + after + self.dice.random() * 0.004
        struck = fields.get("target") if name == "fault.injected" else None
        event = Event(
            event=name,
            t_unix=t,
            t_mono=t - BEGIN + self.boots[node],
            node=struck or (None if writer == "launcher" else node),
            fields=fields,
            **known,
        )
        self.truth.append(event)
        skewed = dataclasses.replace(event, t_unix=t + self.wall.get(node, 0.0))
        self.files.setdefault(writer, []).append(skewed)

    def form(self, epoch: int, members: list[str], resume: int) -> None:
        head = members[0]
        names = {"members": members, "spares": [], "rung": len(members), "coordinator": head}
        self.add(head, "epoch.formed", epoch=epoch, **names, reason="start")
        for rank, node in enumerate(members):
            delay = 0.012 + 0.02 * self.dice.random()
            self.add(node, "worker.started", delay, epoch=epoch, worker_rank=rank, pid=7)
        self.t += 0.4
        self.add(
            f"worker.{head}",
            "trainer.started",
            epoch=epoch,
            rank=0,
            step=resume,
            resume_step=resume,
        )

    def steps(self, epoch: int, node: str, first: int, last: int) -> None:
        for step in range(first, last + 1):
            self.t += 0.1
            fields = {"loss": 2.0, "tokens": 10, "step_s": 0.1}
            self.add(f"worker.{node}", "step.completed", epoch=epoch, step=step, rank=0, **fields)

    def lose(self, epoch: int, node: str, by: str, step: int) -> None:
        kill = {"action": "kill-node", "target": node}
        self.add("launcher", "fault.injected", 0.05, epoch=epoch, step=step, **kill)
        self.t += 0.13
        self.add(by, "member.lost", epoch=epoch, member=node, reason="gone")
        self.add(by, "epoch.aborted", 0.001, epoch=epoch, reason="lost", victims=[node])
        self.t += 0.01


def storm(wall=(), seed: int = 0, *, end: bool = True) -> Writers:
    """Four nodes; one dies, then the coordinator."""
    run = Writers(wall, seed)
    run.add("launcher", "run.started", attempt=1, nodes=4)
    run.t += 5
    for node in NODES:
        run.add(node, "agent.started", 0.2, pid=1)
    run.t += 2
    run.form(1, NODES, 0)
    run.steps(1, "node0", 1, 20)
    run.lose(1, "node2", "node0", 20)
    run.form(2, ["node0", "node1", "node3"], 20)
    run.steps(2, "node0", 21, 50)
    run.lose(2, "node0", "node1", 50)
    run.form(3, ["node1", "node3"], 50)
    run.steps(3, "node1", 51, 80)
    if not end:
        return run
    for node in ("node1", "node3"):
        run.add(node, "agent.exit", 0.1, code=0)
    run.t += 1
    run.add("launcher", "run.ended", code=0)
    return run


def durations(events: list[Event]) -> dict[str, list[float]]:
    summary = summarise(events, code=0)
    found = {"whole": [summary["wall_s"], summary["startup_s"]]}
    for failure in failures(events, epochs(events)):
        found[str(failure.node)] = [failure.detected_s, failure.recovered_s]
    return found


OFFSETS = {
    "all differ": {"node0": 420.0, "node1": -300.0, "node3": 86_400.0},
    "coordinator alone": {"node0": -3600.0},
    "one behind": {"node3": -7.0},
    "one ahead": {"node1": 31.5},
    "launcher alone": {"launcher": 600.0},
    "half a second": {"node1": 0.9, "node0": -0.6},
}


@pytest.mark.parametrize("name", OFFSETS)
def test_durations_are_those_of_equal_clocks(name: str) -> None:
    right = durations(sorted(storm().truth, key=lambda event: event.t_unix))
    found = durations(by_one_clock(storm(OFFSETS[name]).files))
    assert found.keys() == right.keys() == {"whole", "node2", "node0"}
    for key, seconds in right.items():
        assert found[key] == pytest.approx(seconds, abs=0.12), key


@settings(max_examples=60, deadline=None)
@given(
    st.fixed_dictionaries(dict.fromkeys(BOOTS, st.floats(-1e6, 1e6))),
    st.integers(0, 9),
)
def test_any_clocks_are_brought_together(wall: dict[str, float], seed: int) -> None:
    run = storm(wall, seed)
    found = by_one_clock(run.files)
    true = {(e.event, e.node, e.epoch, e.step, e.t_mono): e.t_unix for e in run.truth}
    assert len(found) == len(run.truth)
    shifts = [e.t_unix - true[e.event, e.node, e.epoch, e.step, e.t_mono] for e in found]
    # All by as much: which clock is right nobody can know.
    assert max(shifts) - min(shifts) < 0.7
    by_node = {
        e.node: shift
        for e, shift in zip(found, shifts, strict=True)
        if e.node and e.event != "fault.injected"
    }
    # A clock that is ahead by less than a start takes contradicts nothing.
    assert max(by_node.values()) - min(by_node.values()) < 0.4 + 2 * TOLERANCE_S


def test_equal_clocks_are_left_as_they_are() -> None:
    small = {"node1": 0.004, "node2": -0.01, "launcher": 0.02}
    for wall in ({}, small):
        run = storm(wall)
        written = [event for events in run.files.values() for event in events]
        assert by_one_clock(run.files) == sorted(written, key=lambda event: event.t_unix)


def test_most_are_right() -> None:
    found = by_one_clock(storm({"node0": 420.0}).files)
    formed = next(event for event in found if event.event == "epoch.formed")
    assert formed.t_unix == pytest.approx(BEGIN + 7, abs=0.2)


def test_a_clock_that_is_set_while_it_runs() -> None:
    run = storm()
    plain = durations(by_one_clock(run.files))
    for name in ("node1", "worker.node1"):
        late = [e for e in run.files[name] if e.epoch == 3]
        for event in late:
            index = run.files[name].index(event)
            run.files[name][index] = dataclasses.replace(event, t_unix=event.t_unix - 5000)
    found = durations(by_one_clock(run.files))
    for key, seconds in plain.items():
        assert found[key] == pytest.approx(seconds, abs=0.12), key


def test_a_node_that_boots_anew_has_another_clock() -> None:
    run = storm(end=False)
    run.boots["node2"], run.wall["node2"] = 1.0 - (run.t - BEGIN), 77.0
    run.add("node2", "agent.started", pid=2)
    run.form(4, ["node1", "node2"], 80)
    run.steps(4, "node1", 81, 90)
    true = {e.t_mono: e.t_unix for e in run.truth if e.node == "node2"}
    found = [e for e in by_one_clock(run.files) if e.node == "node2"]
    for event in found:
        if event.event != "fault.injected" and event.t_mono in true:
            assert event.t_unix == pytest.approx(true[event.t_mono], abs=0.1)


@pytest.mark.parametrize("events", [[], [Event(event="run.started", t_unix=1.0, t_mono=1.0)]])
def test_short_records(events: list[Event]) -> None:
    assert by_one_clock({"launcher-1.jsonl": events, "empty.jsonl": []}) == events
    assert by_one_clock({}) == []


def test_a_record_is_read_by_one_clock(tmp_path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    run = storm({"node1": 86_400.0})
    for writer, events in run.files.items():
        (folder / f"{writer}.jsonl").write_text("".join(event.encode() for event in events))
    record = RunRecord(tmp_path)
    record.poll()
    assert len(record.by_one_clock()) == len(record.events)
    raw, aligned = durations(record.events), durations(record.by_one_clock())
    assert raw["node0"][1] > 1000
    assert aligned["node0"][1] < 2


@pytest.mark.parametrize("ends_well", [True, False])
@pytest.mark.parametrize("skew", [-500.0, -2.0, 2.0, 500.0])
def test_a_first_rank_that_is_no_coordinator(skew: float, ends_well: bool) -> None:
    """Nobody but the end of the epoch says that its clock is not ahead."""
    run = Writers({"node0": skew})
    names = {"members": ["node0", "node1"], "spares": [], "rung": 2, "coordinator": "node1"}
    for epoch in (1, 2):
        run.add("node1", "epoch.formed", epoch=epoch, **names, reason="start")
        for rank, node in enumerate(names["members"]):
            run.add(node, "worker.started", 0.02, epoch=epoch, worker_rank=rank, pid=7)
        run.t += 0.4
        known = {"epoch": epoch, "rank": 0, "step": epoch}
        run.add("worker.node0", "trainer.started", resume_step=0, **known)
        run.steps(epoch, "node0", epoch, epoch)
        run.t += 0.05
        if ends_well:
            for node in names["members"]:
                run.add(node, "worker.exit", epoch=epoch, code=91, worker_rank=0)
            run.t += 0.01
    if ends_well:
        run.add("node1", "job.stopped", epoch=2, code=91, reason="stopped")
    true = {(e.node, e.event, e.epoch): e.t_unix for e in run.truth}
    shifts = [e.t_unix - true[e.node, e.event, e.epoch] for e in by_one_clock(run.files)]
    assert max(shifts) - min(shifts) < (0.15 if ends_well else 0.7)
