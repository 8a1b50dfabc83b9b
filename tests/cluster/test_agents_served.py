"""Each agent's own metrics: read by HTTP from a real run, and listed for Prometheus."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request

import pytest
from live_run import family, live_run, signal_all
from prometheus_client.parser import text_string_to_metric_families

from elastic_trainer.plan.config import METRICS_TARGETS


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def targets(run):
    """Return the addresses of the newest list; empty while there is none."""
    try:
        [group] = json.loads((run.path / METRICS_TARGETS).read_text())
    except FileNotFoundError:
        return set()
    return set(group["targets"])


def scraped(address):
    """Return (series, state or kind) -> value of one agent, and the node it says it is."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found, nodes = {}, set()
    for each in text_string_to_metric_families(text):
        for sample in each.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "run"
            nodes.add(labels.pop("node"))
            found[sample.name, *labels.values()] = sample.value
    [node] = nodes
    return node, found


@pytest.mark.timeout(170)
def test_every_agent_is_read_and_a_lost_one_leaves_the_list(tmp_path):
    port = free_port()
    with live_run(tmp_path, sets=[f"network.metrics_port={port}"]) as run:
        epoch = run.until_steady()
        run.until(lambda: len(targets(run)) == 3, "three agents are listed")
        seen = {}
        for address in targets(run):
            assert address.endswith(f":{port}")
            node, found = scraped(address)
            seen[node] = address
            assert found["holdfast_node_state", "in"] == 1
            assert found["holdfast_node_epoch",] == epoch
            assert found["holdfast_node_step",] > 0
            assert found["holdfast_node_workers",] == 1
            assert found["holdfast_node_faults_total", "killed"] == 0
            newest = run.events("step.completed")[-1].t_unix
            assert abs(found["holdfast_worker_progress_timestamp_seconds",] - newest) < 10
            assert found["holdfast_node_snapshot_timestamp_seconds",] > 0
            assert len(found) < 40
        formed = run.events("epoch.formed")[-1].fields["coordinator"]
        coordinators = {
            node: scraped(address)[1]["holdfast_node_coordinator",]
            for node, address in seen.items()
        }
        assert coordinators == {node: float(node == formed) for node in seen}

        # The coordinator's own node: another one has to write the next list.
        agents = run.agents()
        signal_all(family(agents[formed]), signal.SIGKILL)
        run.until(run.stepped_after(epoch), "the others go on")
        left = {address for node, address in seen.items() if node != formed}
        run.until(lambda: targets(run) == left, "the lost one is not listed any more")
        for address in left:
            assert scraped(address)[1]["holdfast_node_state", "in"] == 1

        # A worker that is killed counts against its node.
        survivor = next(node for node in seen if node != formed)
        newest = run.events("epoch.formed")[-1].epoch
        [worker] = [
            pid
            for event in run.events("workers.started", newest)
            if event.node == survivor
            for pid in event.fields["pids"]
        ]
        signal_all([worker], signal.SIGKILL)
        run.until(run.stepped_after(newest), "the others go on")
        assert scraped(seen[survivor])[1]["holdfast_node_faults_total", "killed"] == 1
        run.finish()
        assert targets(run) == set()
