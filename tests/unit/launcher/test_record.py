from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.events import Event
from launcher.ops.record.record import LauncherLog, RunRecord


def event(t, name="agent.started"):
    return Event(event=name, t_unix=t, t_mono=t)


def test_merges_writers_by_time_and_reads_only_what_is_new(tmp_path):
    record = RunRecord(tmp_path)
    assert record.poll() == []
    times = iter([1.0, 3.0, 5.0])
    log = LauncherLog(tmp_path, "a", wall=lambda: next(times), mono=lambda: 0.0)
    log.emit("run.started", attempt=1, nodes=2)
    log.emit("fault.injected", action="kill-node", target="node1")
    (tmp_path / "events" / "b.jsonl").write_text(event(2.0).encode())
    assert [e.t_unix for e in record.poll()] == [1.0, 2.0, 3.0]
    log.emit("run.ended", code=0)
    assert [e.event for e in record.poll()] == ["run.ended"]
    assert [e.t_unix for e in record.events] == [1.0, 2.0, 3.0, 5.0]


def test_a_torn_last_line_waits_for_its_rest(tmp_path):
    record = RunRecord(tmp_path)
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    line = event(1.0).encode()
    path.write_text(line + line[:20])
    assert len(record.poll()) == 1
    with path.open("a") as file:
        file.write(line[20:])
    assert len(record.poll()) == 1
    assert record.torn == 0


def test_a_line_torn_by_a_crash_costs_only_itself(tmp_path):
    record = RunRecord(tmp_path)
    path = tmp_path / "events" / "a.jsonl"
    path.parent.mkdir()
    line = event(1.0).encode()
    path.write_text(line[:20] + line + line + "{}\n")
    assert len(record.poll()) == 1
    assert record.torn == 2


@given(st.lists(st.integers(1, 40), max_size=12), st.lists(st.floats(0, 1e9), max_size=6))
def test_any_cuts_give_the_same_events(tmp_path_factory, cuts, times):
    run_dir = tmp_path_factory.mktemp("run")
    path = run_dir / "events" / "a.jsonl"
    path.parent.mkdir()
    text = "".join(event(t).encode() for t in times)
    record, at = RunRecord(run_dir), 0
    for cut in [*cuts, len(text)]:
        with path.open("a") as file:
            file.write(text[at : at + cut])
        at += cut
        record.poll()
    assert [e.t_unix for e in record.events] == sorted(round(t, 6) for t in times)


def test_follow_ends_with_one_last_look(tmp_path):
    record, log = RunRecord(tmp_path), LauncherLog(tmp_path, "a")
    turns = iter([False, True])

    def until():
        log.emit("run.started", attempt=1, nodes=1)
        return next(turns)

    batches = list(record.follow(until=until, sleep=lambda _: None))
    assert [len(batch) for batch in batches] == [1, 1]
