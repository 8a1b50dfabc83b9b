from __future__ import annotations

import json
import os
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_record import config_of

from elastic_trainer.record.event_log import NODE_BYTES, EventLog
from elastic_trainer.record.events import EVENTS, Event
from elastic_trainer.record.hostlist import folded
from launcher.record import files
from launcher.record.cost import gpu_time_since
from launcher.record.event import describe
from launcher.record.failures import failures
from launcher.record.files import LauncherLog, RunRecord, events_named, present_record, workers_of
from launcher.record.run_metrics import RunMetrics
from launcher.record.status import TrainingStatus
from launcher.record.timeline import epochs
from launcher.spec.errors import UserError


def event(t, name="agent.started"):
    return Event(event=name, t_unix=t, t_mono=t)


def of_one_file(run_dir):
    """Return a record, the only file of it, which is not there yet, and a line."""
    path = run_dir / "events" / "a.jsonl"
    path.parent.mkdir()
    return RunRecord(run_dir), path, event(1.0).encode()


def test_merges_writers_by_time_and_reads_only_what_is_new(tmp_path):
    record = RunRecord(tmp_path)
    assert record.poll() == []
    times = iter([1.0, 3.0, 5.0])
    log = LauncherLog(tmp_path, "a", wall=lambda: next(times))
    log.emit("run.started", attempt=1, nodes=2)
    log.emit("fault.injected", action="kill-node", target="node1")
    (tmp_path / "events" / "b.jsonl").write_text(event(2.0).encode())
    assert [e.t_unix for e in record.poll()] == [1.0, 2.0, 3.0]
    log.emit("run.ended", code=0)
    assert [e.event for e in record.poll()] == ["run.ended"]
    assert [e.t_unix for e in record.events] == [1.0, 2.0, 3.0, 5.0]


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    record, path, line = of_one_file(tmp_path)
    path.write_text(line + line[:20])
    assert len(record.poll()) == 1
    with path.open("a") as file:
        file.write(line[20:])
    assert len(record.poll()) == 1


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path):
    record, path, line = of_one_file(tmp_path)
    path.write_text(line[:20] + line + line + '{}\n{"event":"run.ended","t_unix":"now"}\n')
    assert len(record.poll()) == 1


@given(st.lists(st.integers(1, 40), max_size=12), st.lists(st.floats(0, 1e9), max_size=6))
def test_any_cuts_give_the_same_events(tmp_path_factory, cuts, times):
    record, path, _ = of_one_file(tmp_path_factory.mktemp("run"))
    text, at = "".join(event(t).encode() for t in times), 0
    for cut in [*cuts, len(text)]:
        with path.open("a") as file:
            file.write(text[at : at + cut])
        at += cut
        record.poll()
    assert [e.t_unix for e in record.events] == sorted(round(t, 6) for t in times)


def test_of_steps_the_newest_are_enough_of_all_else_everything(tmp_path, monkeypatch):
    assert present_record(tmp_path).poll() == []
    monkeypatch.setattr("launcher.record.files.NEWEST", 100)
    clock = iter(range(10**6))
    logs = [LauncherLog(tmp_path, name, wall=lambda: float(next(clock))) for name in "ba"]
    for step in range(400):
        logs[step // 100 % 2].emit("step.completed", step=step, padding="x" * 100)
        if step % 100 == 0:
            logs[0].emit("epoch.formed", epoch=step // 100 + 1, members=["n"] * 3000)
    found = present_record(tmp_path).poll()
    assert [e.step for e in found if e.event == "step.completed"] == [*range(300, 400)]
    assert [e.epoch for e in found if e.event == "epoch.formed"] == [1, 2, 3, 4]


NAMES = st.sampled_from(["epoch.formed", "member.lost", "epoch.aborted", "worker.hung"])


@given(st.lists(st.tuples(NAMES, st.integers(0, 4)), min_size=3), st.floats(-3.0, 3.0))
def test_the_steps_next_to_other_events_tell_the_same_of_failures(tmp_path_factory, parts, skew_s):
    run = tmp_path_factory.mktemp("run")
    now = [100.0]
    lead = LauncherLog(run, "agent-n0", wall=lambda: now[0])
    workers = [LauncherLog(run, f"worker-n{i}-0", wall=lambda: now[0] + skew_s) for i in range(2)]
    epoch = step = 0
    for name, steps in parts:
        now[0] += 1.0
        epoch += name == "epoch.formed"
        about = {"members": ["n0", "n1"]} if name == "epoch.formed" else {"member": "n1"}
        lead.emit(name, epoch=epoch, node="n0", **about)
        for _ in range(steps):
            now[0] += 1.0
            step += 1
            for rank, log in enumerate(workers):
                log.emit("step.completed", epoch=epoch, step=step, rank=rank, node=f"n{rank}")
    whole, part = RunRecord(run), RunRecord(run, next_to=("step.completed",))
    found = [failures(record.poll(), epochs(record.events)) for record in (whole, part)]
    assert [each.to_json(0.0) for each in found[0]] == [each.to_json(0.0) for each in found[1]]


@given(st.lists(st.integers(0, 99), max_size=6), st.integers(65, 100))
def test_a_large_run_reads_alike_with_names_as_ranges(tmp_path_factory, lost, nodes):
    names = [f"rack{number // 8}-n{number % 8:02}" for number in range(nodes)]
    runs = [tmp_path_factory.mktemp("run") for _ in range(2)]
    for run, written in zip(runs, (list, folded), strict=True):
        now = [100.0]
        log = LauncherLog(run, "agent-n0", wall=partial(now.__getitem__, 0))
        members = names
        for epoch, index in enumerate([None, *lost], 1):
            if index is not None:
                now[0] += 5.0
                victim = names[index % nodes]
                log.emit("member.lost", epoch=epoch - 1, member=victim, host=victim, reason="r")
                members = [name for name in names if name != victim]
            spares = [name for name in names if name not in members]
            about = {"members": written(members), "spares": written(spares), "layout": "dp4"}
            log.emit("epoch.formed", epoch=epoch, coordinator="n0", reason="r", **about)
            now[0] += 5.0
            log.emit("step.completed", epoch=epoch, step=epoch, rank=0, node="n0", tokens=1)
    by_name, by_range = (RunRecord(run).poll() for run in runs)
    assert type(by_range[0].fields["members"]) is str
    assert told(by_name) == told(by_range)


def told(events):
    """Return what status, why, cost and metrics make of a record."""
    metrics = RunMetrics()
    for event in events:
        metrics.add(event)
    spans = epochs(events)
    return [
        TrainingStatus(config_of(), events).to_json(),
        [describe(event) for event in events],
        [failure.to_json(0.0) for failure in failures(events, spans)],
        gpu_time_since(events, spans, 0.0, gpus_per_node=8).by_cause,
        metrics,
    ]


def test_following_a_run_for_a_month_keeps_no_more_than_opening_its_record(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "NEWEST", 20)
    log, followed = LauncherLog(tmp_path, "a", wall=iter(map(float, range(9999))).__next__), None
    for epoch in range(50):
        log.emit("epoch.formed", epoch=epoch, members=["n0"], spares=[])
        for step in range(10):
            log.emit("step.completed", epoch=epoch, step=10 * epoch + step)
        followed = followed or present_record(tmp_path)
        followed.poll()
        assert len(followed.events) <= 33 + epoch
    opened = present_record(tmp_path).poll()
    assert len(opened) == 50 + 20
    assert [each for each in followed.events if each in opened] == opened


def test_a_record_of_an_agent_that_told_of_each_worker_gives_the_same_state(tmp_path):
    log = LauncherLog(tmp_path, "agent-n0")
    with (tmp_path / "events" / "agent-n0.jsonl").open("w") as file:
        for rank in range(8):
            start = {"v": 1, "t_unix": 1.0, "t_mono": 1.0, "event": "worker.started", "pid": rank}
            file.write(json.dumps(start, separators=(",", ":")) + "\n")
    for rank in range(8):
        log.emit("worker.exit", epoch=1, worker_rank=rank, kind=None, signal=9)
    log.emit("worker.exit", epoch=1, worker_rank=8, kind="crash", signal=11)
    log.emit("member.evicted", member="n1", host="n1", reason="it left", kind=None)
    found = present_record(tmp_path).poll()
    assert [(e.event, e.fields["kind"]) for e in found] == [
        ("worker.exit", "crash"),
        ("member.evicted", None),
    ]


def test_what_each_node_does_at_each_start_is_read_where_it_is_asked_for(tmp_path):
    log = EventLog(tmp_path, "agent-n1", node="n1", epoch=3)
    log.emit("member.lost", member="n0")
    for start in range(1000):
        log.emit_here("workers.started", first_rank=8, pids=[start, 7], how="zygote")
    log.close()
    assert [event.event for event in RunRecord(tmp_path).poll()] == ["member.lost"]
    assert sum(path.stat().st_size for path in (tmp_path / "nodes").iterdir()) <= 2.1 * NODE_BYTES
    assert {rank: one.pid for rank, one in workers_of(tmp_path).items()} == {8: 999, 9: 7}
    assert events_named(tmp_path, ["workers.started"]) == []
    found = events_named(tmp_path, ["workers.started", "member.lost"], nodes=True, node="n1")
    assert found[0].event == "member.lost"
    assert 100 < len(found) < 1000


def test_a_few_events_are_found_in_the_files_that_were_written_since(tmp_path):
    for writer in ("a", "b"):
        log = LauncherLog(tmp_path, writer, wall=lambda: 50.0)
        log.emit("member.evicted", member=writer)
        log.emit("member.lost", member="evicted")
    (tmp_path / "events" / "notes.txt").write_text('{"event":"member.evicted"}')
    with (tmp_path / "events" / "a.jsonl").open("a") as file:
        file.write('{"event":"member.evi')
    os.utime(tmp_path / "events" / "b.jsonl", (100.0, 100.0))
    found = events_named(tmp_path, ["member.evicted"], since_unix=90.0)
    assert [event.fields["member"] for event in found] == ["a", "b"]
    assert len(events_named(tmp_path, ["member.evicted"], since_unix=5000.0)) == 1


@pytest.mark.parametrize("record", [present_record, RunRecord])
def test_a_record_that_cannot_be_read(tmp_path, record):
    (tmp_path / "events").write_text("")
    with pytest.raises(UserError, match="HF613"):
        record(tmp_path).poll()


FIELDS = [
    *("members", "spares", "layout", "tokens", "loss", "code", "nodes", "have", "need", "host"),
    *("seconds", "reason", "kind", "victims", "member", "worker_rank", "resume_step"),
]


NONSENSE = [10**400, float("nan"), "x", [1, {}, None], {"a": [{}]}, None, True]


@pytest.mark.parametrize("keys", [FIELDS, ["step"], ["epoch"], ["rank"], ["node"], ["t_unix"]])
@pytest.mark.parametrize("value", NONSENSE, ids=lambda value: f"{value!r:.10}")
def test_no_line_breaks_what_is_told_of_a_run(tmp_path, keys, value):
    record, path, _ = of_one_file(tmp_path)
    usual = {"t_unix": 1.7e9, "t_mono": 1.0, "epoch": 1, "step": 1, "rank": 0, "node": "a"}
    lines = [{**usual, **dict.fromkeys(keys, value), "event": name} for name in EVENTS]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    events = record.poll()
    epochs(events)
    for each in events:
        describe(each)


@pytest.mark.timeout(10)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_pipes_and_devices_are_no_events(tmp_path, make):
    record, path, _ = of_one_file(tmp_path)
    make(path)
    assert record.poll() == []
    assert present_record(tmp_path).poll() == []


def test_deep_lines_are_passed_over(tmp_path):
    record, path, line = of_one_file(tmp_path)
    path.write_text("[" * 200_000 + "\n" + line)
    assert len(record.poll()) == 1


def test_the_launcher_goes_on_after_a_torn_line(tmp_path):
    log = LauncherLog(tmp_path, "a")
    log.emit("run.started", nodes=1)
    path = tmp_path / "events" / "a.jsonl"
    with path.open("a") as file:
        file.write('{"v":1,"t_un')
    log.emit("run.ended", code=0)
    log.emit("run.started", nodes=1)
    names = [each.event for each in RunRecord(tmp_path).poll()]
    assert names == ["run.started", "run.ended", "run.started"]


def test_a_follower_that_needs_no_past_keeps_none(tmp_path):
    record, log = RunRecord(tmp_path, keep=False), LauncherLog(tmp_path, "a")
    for step in (1, 2):
        log.emit("step.completed", step=step)
        assert [event.step for event in record.poll()] == [step]
    assert record.events == []
