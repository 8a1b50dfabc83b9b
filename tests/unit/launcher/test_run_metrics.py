"""What a run's events add up to for Prometheus."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_trainer.plan.config import METRICS_TARGETS
from elastic_trainer.record.events import Event
from launcher.cli.main import cli
from launcher.plan.loading import load_spec
from launcher.plan.planning import plan
from launcher.record.run_metrics import STATES, RunMetrics
from launcher.render.local import render_local
from launcher.runs.reports.metrics import RunsCollector, agents_of, write_targets

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "tiny-cpu.yaml"


def event(name, step=None, *, t=0.0, epoch=1, **fields):
    return Event(
        event=name, t_unix=t, t_mono=t, node="n1", rank=None, epoch=epoch, step=step, fields=fields
    )


def added(*events):
    found = RunMetrics()
    for each in events:
        found.add(each)
    return found


FORMED = event("epoch.formed", members=["n1", "n2"], spares=["n3"])


def done(step, *, t=0.0, seconds=0.3):
    return event("step.completed", step, t=t, loss=2.0, grad_norm=1.0, tokens=10, step_s=seconds)


def test_redone_steps_count_apart_and_the_newest_state_is_told():
    found = added(
        FORMED,
        done(1, t=1.0),
        done(2, t=2.0, seconds=1000.0),
        event("epoch.aborted", reason="n2 is lost"),
        event("member.lost", member="n2"),
    )
    assert (found.state, found.totals["restarts"]) == ("recovering", 0)
    assert found.totals["nodes_lost"] == 1
    for each in (event("epoch.formed", epoch=2, members=["n1"]), done(2, t=5.0), done(3, t=6.0)):
        found.add(each)
    assert found.steps == {"completed": 3, "redone": 1}
    assert found.totals["restarts"] == 1
    assert (found.state, found.tokens, found.times["step_completed"]) == ("training", 40, 6.0)
    assert (found.values["step"], found.values["epoch"], found.values["nodes"]) == (3, 2, 1)
    assert found.buckets == {0.5: 3, float("inf"): 1}
    assert found.step_s == pytest.approx(1000.9)


def test_states_of_a_run():
    assert added().state == "starting"
    assert added(FORMED).state == "starting"
    assert added(FORMED, event("membership.parked", have=1, need=2)).state == "parked"
    over = added(FORMED, done(1), event("run.ended", code=93))
    assert (over.state, over.exit_code, over.values["nodes"]) == ("ended", 93, 0)
    over.add(FORMED)
    assert (over.state, over.exit_code) == ("recovering", None), "it was submitted again"


def test_a_snapshot_and_a_checkpoint_have_times_of_their_own():
    found = added(
        event("step.committed", 1, t=3.0, source="memory"),
        event("step.committed", 1, t=4.0, source="storage"),
        event("checkpoint.committed", 1, t=5.0, dir="x"),
    )
    assert found.times == {"snapshot_copied": 3.0, "checkpoint_committed": 5.0}


def test_numbers_that_are_none_are_left_out():
    found = added(event("step.completed", 1, loss="nan", tokens=None, step_s=float("inf")))
    assert (found.values, found.tokens, found.step_s) == ({"step": 1}, 0, 0.0)


def write_run(folder, name, events):
    (folder / name / "events").mkdir(parents=True)
    spec = load_spec(str(EXAMPLE))
    places = {"run_id": name, "run_dir": folder / name, "base_dir": EXAMPLE.parent}
    (folder / name / "job.json").write_text(render_local(spec, plan(spec), **places)["job.json"])
    (folder / name / "events" / "a.jsonl").write_text("".join(map(Event.encode, events)))


def samples(collector):
    text = generate_latest(collector.registry()).decode()
    return {
        (sample.name, sample.labels.get("run"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_runs_of_a_folder_are_served_and_forgotten_after_their_end(tmp_path):
    write_run(tmp_path, "one", [FORMED, done(1, t=100.0)])
    write_run(tmp_path, "over", [FORMED, done(1, t=90.0), event("run.ended", t=95.0, code=0)])
    (tmp_path / "half" / "events").mkdir(parents=True)
    (tmp_path / "half" / "job.json").write_text("{")
    now = [101.0]
    collector = RunsCollector(tmp_path, wall=lambda: now[0])
    collector.poll()
    found = samples(collector)
    assert found["holdfast_unread_runs", None] == 1.0
    assert found["holdfast_step", "one", "one"] == 1.0
    assert found["holdfast_exit_code", "over", "over"] == 0.0
    assert found["holdfast_nodes", "one", "in", "one"] == 2.0
    states = [found["holdfast_run_state", "one", *sorted(("one", state))] for state in STATES]
    assert sum(states) == 1.0
    of_one = [key for key in found if key[1] == "one"]
    assert len(of_one) < 80, "bounded, however many ranks it has"
    with (tmp_path / "one" / "events" / "a.jsonl").open("a") as file:
        file.write(done(2, t=102.0).encode())
    now[0] += 7 * 3600
    collector.poll()
    found = samples(collector)
    assert found["holdfast_step", "one", "one"] == 2.0
    assert ("holdfast_exit_code", "over", "over") not in found
    assert collector._runs[tmp_path / "over"]._record.events == [], "a month has hundreds of them"
    with (tmp_path / "over" / "events" / "a.jsonl").open("a") as file:
        file.write(event("run.started", t=now[0], nodes=1).encode())
        file.write(event("epoch.formed", t=now[0], epoch=2, members=["a"]).encode())
        file.write(event("step.completed", t=now[0] + 1, step=2, epoch=2).encode())
    collector.poll()
    assert samples(collector)["holdfast_step", "over", "over"] == 2.0, "it was resumed"


def test_totals_are_of_the_whole_run_and_memory_of_the_last_hour(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.record.files.NEWEST", 10)
    formed = [event("epoch.formed", t=t, epoch=t // 3600 + 1, members=["a"]) for t in (0, 3600)]
    steps = [done(step, t=float(step * 60)) for step in range(1, 241)]
    write_run(tmp_path, "one", [formed[0], *steps[:59], formed[1], *steps[59:]])
    collector = RunsCollector(tmp_path, wall=lambda: 4 * 3600.0)
    collector.poll()
    assert samples(collector)["holdfast_steps_total", "one", "completed", "one"] == 240.0
    [followed] = collector._runs.values()
    assert [each.event for each in followed._record.events[:1]] == ["epoch.formed"]
    assert len(followed._record.events) == 1 + 181, "what came after the epoch of that hour"


def test_the_agents_of_runs_that_go_on_are_listed(tmp_path):
    write_run(tmp_path, "one", [FORMED, done(1, t=100.0)])
    write_run(tmp_path, "over", [FORMED, done(1, t=90.0), event("run.ended", t=95.0, code=0)])
    listed = json.dumps([{"targets": ["10.0.0.2:9465", "[fd00::1]:9465"], "labels": {"a": "b"}}])
    for run in ("one", "over"):
        (tmp_path / run / METRICS_TARGETS).write_text(listed)
    collector = RunsCollector(tmp_path, wall=lambda: 101.0)
    collector.poll()
    assert collector.agents() == ["10.0.0.2:9465", "[fd00::1]:9465"]
    path = tmp_path / "file_sd.json"
    write_targets(path, "10.0.0.1:9464", collector.agents())
    own, agents = json.loads(path.read_text())
    assert (own, agents) == (
        {"targets": ["10.0.0.1:9464"]},
        {"targets": ["10.0.0.2:9465", "[fd00::1]:9465"]},
    )


@pytest.mark.parametrize(
    "text",
    ["", "{", "null", "{}", "[]", '[{"labels": {}}]', '[{"targets": 5}]', "\xff",
     '[{"targets": ["db.internal:9465", "10.0.0.1:22", "10.0.0.1", "10.0.0.1:x", 7, null]}]'],
)  # fmt: skip
def test_what_a_run_lists_leads_prometheus_nowhere_else(tmp_path, text):
    (tmp_path / METRICS_TARGETS).write_text(text, encoding="latin-1")
    assert agents_of(tmp_path) == []


def test_a_list_that_is_a_pipe_holds_nobody_up(tmp_path):
    os.mkfifo(tmp_path / METRICS_TARGETS)
    assert agents_of(tmp_path) == []


def test_bad_addresses_and_folders_are_told_in_words(tmp_path):
    for address in ("9464", "here:port", ":1", "a:99999"):
        done_ = CliRunner().invoke(cli, ["metrics", "--listen", address], standalone_mode=True)
        assert done_.exit_code == 2
    told = CliRunner().invoke(cli, ["metrics", "--runs", str(tmp_path / "no"), "--once"])
    assert str(tmp_path / "no") in told.stderr


@pytest.mark.process
def test_it_is_read_by_http_and_ends_though_a_reader_dawdles(tmp_path):
    command = [sys.executable, "-m", "launcher.cli.main", "metrics", "--listen", "127.0.0.1:0"]
    command += ["--runs", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            port = int(re.search(r"127\.0\.0\.1:(\d+)/metrics", process.stderr.readline())[1])
            with socket.create_connection(("127.0.0.1", port), 60) as slow:
                slow.sendall(b"GET /metrics HTTP/1.1\r\n")
                url = f"http://127.0.0.1:{port}/metrics"
                with urllib.request.urlopen(url, timeout=60) as answer:
                    assert b"holdfast_unread_runs 0.0" in answer.read()
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            assert process.stderr.read() == ""
        finally:
            process.kill()
