"""What an agent serves to Prometheus: its values, slow readers, the list of a run's agents."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_trainer.agent import metrics as agent_metrics
from elastic_trainer.agent.membership.notices import Member
from elastic_trainer.agent.metrics import EPOCH, NodeMetrics, write_targets
from elastic_trainer.agent.settings import STATES, NodeStatus
from elastic_trainer.record.failures import Kind

NOW = 1_800_000_000.0


def shown(*statuses):
    metrics = NodeMetrics("r", "n1", path=None, port=0, wall=lambda: NOW)
    for status in statuses:
        metrics.show(status)
    registry = CollectorRegistry()
    registry.register(metrics)
    return {
        (
            sample.name,
            *(v for k, v in sample.labels.items() if k not in ("run", "node")),
        ): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_a_nodes_values_are_served():
    status = NodeStatus(state="in", epoch=3, step=40, committed=39, workers=8, idle_s=2.5,
                        coordinator=True, faults={"hang": 2})  # fmt: skip
    found = shown(status)
    assert [found["holdfast_node_state", each] for each in STATES] == [0, 1, 0, 0]
    assert (found["holdfast_node_epoch",], found["holdfast_node_step",]) == (3, 40)
    assert (found["holdfast_node_workers",], found["holdfast_node_coordinator",]) == (8, 1)
    assert found["holdfast_worker_progress_timestamp_seconds",] == NOW - 2.5
    assert found["holdfast_node_snapshot_timestamp_seconds",] == NOW
    assert found["holdfast_node_faults_total", "hang"] == 2
    assert found["holdfast_node_faults_total", "crash"] == 0
    # What is bounded: the same series on a node of 8 workers as on any other.
    assert len(found) == len(STATES) + len(Kind) + 6


def test_what_is_not_known_has_no_sample():
    assert shown() == {}
    found = shown(NodeStatus())
    assert ("holdfast_worker_progress_timestamp_seconds",) not in found
    assert ("holdfast_node_snapshot_timestamp_seconds",) not in found


def test_progress_stays_known_between_two_epochs():
    found = shown(NodeStatus(state="in", epoch=1, idle_s=1.0), NodeStatus(epoch=1))
    assert found["holdfast_worker_progress_timestamp_seconds",] == NOW - 1.0


# -- serving -----------------------------------------------------------------------------------


@pytest.fixture
def served():
    found = NodeMetrics("r", "n1", path=None, port=0)
    found.show(NodeStatus())
    found.start("127.0.0.1")
    yield found
    found.close()


def read(metrics, path="/metrics"):
    url = f"http://127.0.0.1:{metrics.port}{path}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return answer.read().decode()


def test_it_is_read_by_http(served):
    assert 'holdfast_node_epoch{node="n1",run="r"} 0.0' in read(served)


def test_a_port_that_is_taken_costs_the_metrics_alone(served, capsys):
    other = NodeMetrics("r", "n2", path=None, port=served.port)
    other.start("127.0.0.1")
    assert "network.metrics_port" in capsys.readouterr().err
    other.show(NodeStatus())
    other.close()


@pytest.mark.process
def test_neither_agent_nor_zygote_imports_the_library():
    code = (
        "import sys, elastic_trainer.agent.node, elastic_trainer.worker.preload\n"
        "assert 'elastic_trainer.agent.metrics' in sys.modules\n"
        "assert not [name for name in sys.modules if name.startswith('prometheus')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- the list ----------------------------------------------------------------------------------


def member(node, address):
    return Member(agent_id=node, node=node, host=node, address=address, port=1, workers=1)


A, B = member("a", "10.0.0.1"), member("b", "fd00::2")


def test_the_list_is_one_for_file_sd(tmp_path):
    path = tmp_path / "targets.json"
    write_targets(path, 3, [A, B], port=9465)
    assert json.loads(path.read_text()) == [
        {"targets": ["10.0.0.1:9465", "[fd00::2]:9465"], "labels": {EPOCH: "3"}}
    ]


@pytest.mark.parametrize(
    ("epoch", "before", "listed"),
    [
        (4, None, ["10.0.0.1:9465"]),
        (2, None, ["10.0.0.1:9465", "[fd00::2]:9465"]),  # a coordinator that was cut off
        (3, None, ["10.0.0.1:9465"]),
        (4, "{", ["10.0.0.1:9465"]),
        (4, "[]", ["10.0.0.1:9465"]),
        (4, '[{"labels": {"__meta_holdfast_epoch": null}}]', ["10.0.0.1:9465"]),
    ],
)
def test_a_late_coordinator_replaces_nothing(tmp_path, epoch, before, listed):
    path = tmp_path / "targets.json"
    write_targets(path, 3, [A, B], port=9465)
    if before is not None:
        path.write_text(before)
    write_targets(path, epoch, [A], port=9465)
    assert json.loads(path.read_text())[0]["targets"] == listed


def test_storage_that_stalls_holds_neither_agent_nor_end_up(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_metrics, "_CLOSE_S", 0.1)
    begun, go_on = threading.Event(), threading.Event()

    def stall(*_, **__):
        begun.set()
        go_on.wait(60)

    monkeypatch.setattr(agent_metrics, "write_targets", stall)
    metrics = NodeMetrics("r", "n1", path=tmp_path / "targets.json", port=0)
    metrics.start("127.0.0.1")
    metrics.list_agents(1, [A])
    assert begun.wait(20)
    metrics.list_agents(2, [A, B])
    metrics.show(NodeStatus())
    assert "holdfast_node_epoch" in read(metrics)
    metrics.close()
    go_on.set()
