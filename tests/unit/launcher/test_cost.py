from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_record import STEP_S, Stream, config_of, storm

from launcher.cli.main import run_cli
from launcher.record.cost import CAUSES, attempts, gpu_time_by_month, gpu_time_since, total
from launcher.record.summary import summarise
from launcher.record.timeline import epochs

NODES = [f"node{i}" for i in range(4)]


def spent(events, gpus_per_node=8, submitted=()):
    events = sorted(events, key=lambda event: event.t_unix)
    return total(
        gpu_time_by_month(events, gpus_per_node=gpus_per_node, submitted=submitted).values()
    )


def hung(stream):
    stream.t += 60
    stream.add("worker.hung", epoch=stream.epoch, node="node1", member="node1", idle_s=60)
    stream.add("epoch.aborted", epoch=stream.epoch, node="node0", victims=["node1"])


def test_a_run_without_faults():
    stream = Stream().start().form(NODES, resume=0).steps(100).end()
    found = spent(stream.events)
    assert found.by_cause["productive"] == pytest.approx(100 * 0.09 * 32)
    assert found.by_cause["other"] == pytest.approx(99 * (STEP_S - 0.09) * 32)
    assert found.by_cause["restart"] == pytest.approx((0.1 + 0.8 + 0.01) * 32)
    assert found.by_cause["redone"] == found.by_cause["hang"] == found.by_cause["idle"] == 0


def test_redone_steps_lost_nodes_and_restarts():
    found = spent(storm().events)
    # Steps 29 and 30 of four nodes.
    assert found.by_cause["redone"] == pytest.approx(2 * 0.09 * 32)
    # One node in epoch 2, two in epoch 3, one in epoch 4; each lasts from its forming to the next.
    formed = [e.t_unix for e in storm().events if e.event == "epoch.formed"]
    lasted = [after - before for before, after in pairwise([*formed, storm().t])]
    idle = 8 * (lasted[1] + 2 * lasted[2] + lasted[3])
    assert found.by_cause["idle"] == pytest.approx(idle)
    assert found.by_cause["restart"] > 0


def test_a_hang_is_the_time_from_the_last_step_to_the_next_epoch():
    stream = Stream().start().form(NODES, resume=0).steps(10)
    hung(stream)
    stream.form(NODES, resume=10).steps(20).end()
    found = spent(stream.events)
    assert found.by_cause["hang"] == pytest.approx(60.1 * 32)


def test_parked_gpus_idle():
    stream = Stream().start().form(NODES, resume=0).steps(10).kill_node("node2")
    stream.add("membership.parked", node="node0", have=3, need=4)
    stream.t += 600
    stream.form(NODES, resume=10).steps(20).end()
    assert spent(stream.events).by_cause["idle"] == pytest.approx(600.1 * 32)


def test_time_in_the_queue_is_in_no_sum():
    stream = Stream().start().form(NODES, resume=0).steps(10).end()
    found = spent(stream.events, submitted=[stream.events[0].t_unix - 3600])
    assert found.queue == pytest.approx(3600 * 32)
    assert found.allocated == pytest.approx((stream.t - 1000.0) * 32)
    assert found.to_json()["queue"] == 32.0


def test_months_are_divided_at_midnight_utc():
    stream = Stream(t=datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
    stream.start().form(NODES, resume=0).steps(50).end()
    found = gpu_time_by_month(stream.events, gpus_per_node=1)
    assert list(found) == ["2026-12", "2027-01"]
    assert found["2026-12"].allocated == pytest.approx(4.0, abs=1e-3)


def test_the_end_of_a_record():
    stream = Stream().start().form(NODES, resume=0).steps(10).kill_node("node2")
    stream.form(NODES[:3], resume=10).steps(60)
    whole = gpu_time_since(stream.events, epochs(stream.events), stream.t - 3, gpus_per_node=8)
    assert whole.allocated == pytest.approx(3 * 32)
    read = [e for e in stream.events if e.epoch == 2]
    part = gpu_time_since(read, epochs(read), stream.t - 3, gpus_per_node=8)
    assert part.by_cause["productive"] == whole.by_cause["productive"]
    assert part.by_cause["productive"] == pytest.approx(30 * 0.09 * 24, rel=0.04)


@pytest.mark.parametrize("behind_s", [-20.0, 0.1, 20.0])
def test_an_agents_clock_makes_no_attempt_of_its_own(behind_s):
    stream = Stream().start().form(NODES, resume=0).steps(600).end(91)
    stream.t += 30
    stream.start(attempt=2).form(NODES, resume=600).steps(1200).end()
    events = [
        each if each.event[:4] == "run." else replace(each, t_unix=each.t_unix - behind_s)
        for each in stream.events
    ]
    events.sort(key=lambda each: (each.t_unix, each.event[:4] == "run."))
    found = attempts(events)
    formed = [each.t_unix for each in events if each.event == "epoch.formed"]
    started = [each.t_unix for each in events if each.event == "run.started"]
    assert [each.begun_t for each in found] == [*map(min, formed, started)]
    assert [each.nodes for each in found] == [4, 4]
    spans = [each.ended_t - each.begun_t for each in found]
    assert spent(events).allocated == pytest.approx(sum(spans) * 32)


actions = st.lists(
    st.sampled_from(["steps", "kill", "hang", "park", "again", "unended"]), max_size=12
)


@given(actions, st.integers(1, 8), st.floats(0, 2), st.integers(0, 3))
def test_causes_sum_to_what_was_allocated(plays, gpus, step_s, back):
    stream = Stream().start().form(NODES, resume=0)
    for play in plays:
        match play:
            case "steps":
                stream.steps(stream.step + 5)
            case "kill":
                stream.kill_node("node2").form(NODES[:2], resume=max(0, stream.step - back))
            case "hang":
                hung(stream)
                stream.form(NODES, resume=max(0, stream.step - back))
            case "park":
                stream.add("membership.parked", node="node0", have=3, need=4)
                stream.t += 100
            case "again" | "unended":
                if play == "again":
                    stream.end(91)
                stream.t += 500
                stream.start(attempt=2).form(NODES, resume=stream.step)
    for event in stream.events:
        if "step_s" in event.fields:
            event.fields["step_s"] = step_s  # also one that cannot be
    found = spent(stream.events, gpus)
    allocated = 0.0
    for before, event in pairwise(stream.events):
        if before.event == "run.ended" or event.event == "run.started":
            continue
        allocated += (event.t_unix - before.t_unix) * 4 * gpus
    assert all(seconds >= 0 for seconds in found.by_cause.values())
    assert found.allocated == pytest.approx(allocated, abs=1e-6)


@pytest.fixture
def runs(tmp_path):
    for name in ("one", "two"):
        folder = tmp_path / name
        (folder / "events").mkdir(parents=True)
        (folder / "job.json").write_text(config_of().to_json())
        (folder / "events" / "agent-node0.jsonl").write_text(
            "".join(event.encode() for event in storm().events)
        )
    return tmp_path


def test_the_command(runs, capfd):
    assert run_cli(["cost", "--runs", str(runs), "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["gpu_hours"]
    assert [row["run"] for row in rows] == ["one", "two"]
    assert sum(rows[0][cause] for cause in CAUSES) == pytest.approx(rows[0]["allocated"], abs=1e-3)
    assert run_cli(["cost", "--runs", str(runs), "--by", "month", "--csv"]) == 0
    [row] = csv.DictReader(io.StringIO(capfd.readouterr().out))
    assert row["month"] == "1970-01"
    assert run_cli(["cost", "--runs", str(runs)]) == 0
    assert "two" in capfd.readouterr().out


def test_a_runs_speed_is_beside_what_was_predicted(runs, capfd):
    config = config_of(nodes=(4, 3, 2), tokens_per_s=1000.0)
    (runs / "one" / "job.json").write_text(config.to_json())
    assert run_cli(["cost", "--runs", str(runs), "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["gpu_hours"]
    events = sorted(storm().events, key=lambda event: event.t_unix)
    summary = summarise(events, config=config)
    for name in ("tokens_per_s", "predicted_tokens_per_s"):
        assert rows[0][name] == summary[name] > 0
    assert (rows[1]["tokens_per_s"], rows[1]["predicted_tokens_per_s"]) == (
        rows[0]["tokens_per_s"],
        None,
    )
    assert run_cli(["cost", "--runs", str(runs)]) == 0
    [line] = (each for each in capfd.readouterr().out.splitlines() if " one " in f" {each}")
    assert line.split()[-2:] == [f"{rows[0][n]:,.0f}" for n in ("tokens_per_s", PREDICTED)]
    assert run_cli(["cost", "two", "--runs", str(runs)]) == 0
    assert "predicted" not in capfd.readouterr().out
    assert run_cli(["cost", "--runs", str(runs), "--by", "user", "--json"]) == 0
    [row] = json.loads(capfd.readouterr().out)["gpu_hours"]
    assert PREDICTED not in row


PREDICTED = "predicted_tokens_per_s"


def test_a_run_that_cannot_be_read_is_told(runs, capfd):
    (runs / "one" / "job.json").write_text("{")
    assert run_cli(["cost", "--runs", str(runs), "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert len(told["gpu_hours"]) == len(told["problems"]) == 1
    assert run_cli(["cost", "nothing", "--runs", str(runs)]) == 2
    assert run_cli(["cost", "one", "--runs", str(runs)]) == 1
