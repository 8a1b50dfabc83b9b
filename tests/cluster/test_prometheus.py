"""A real Prometheus reads a real run: a node is killed, and its recovery is read back."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import yaml
from live_run import ROOT, family, live_run, signal_all

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
DEADLINE_S = 60.0
WHY_NOT = (
    "a real Prometheus: as root on Debian, apt-get install -y --no-install-recommends prometheus"
)


def install():
    """Install Debian's package where that is possible and it is missing."""
    if (
        shutil.which("promtool", path=PATH)
        or os.geteuid()
        or not Path("/etc/debian_version").exists()
    ):
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "-y", "--no-install-recommends", "prometheus"]
    for args in (command, ["apt-get", "update"], command):
        done = subprocess.run(args, env=env, capture_output=True, check=False, timeout=240)
        if args is command and done.returncode == 0:
            return


@pytest.fixture(scope="module", autouse=True)
def needs_prometheus():
    install()
    if shutil.which("promtool", path=PATH) is None:
        pytest.skip(WHY_NOT)


@pytest.fixture
def rules(tmp_path):
    """Return the rules as a file of Prometheus' own: what the operator makes of the object."""
    path = tmp_path / "holdfast.rules.yml"
    spec = yaml.safe_load((ROOT / "manifests/monitoring/rules.yaml").read_text())["spec"]
    path.write_text(yaml.safe_dump(spec))
    return path


def promtool(*words):
    done = subprocess.run(
        ["promtool", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


ALERTS = """
rule_files: [{rules}]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {{series: 'holdfast_run_state{{run="a",state="training"}}', values: '1x60'}}
      - {{series: 'holdfast_step_completed_timestamp_seconds{{run="a"}}', values: '60x60'}}
      - {{series: 'holdfast_step_duration_seconds_sum{{run="a"}}', values: '20x60'}}
      - {{series: 'holdfast_step_duration_seconds_count{{run="a"}}', values: '10x60'}}
      - {{series: 'holdfast_run_state{{run="b",state="parked"}}', values: '0x5 1x60'}}
      - {{series: 'holdfast_exit_code{{run="c"}}', values: '_x10 94x60'}}
      - {{series: 'holdfast_exit_code{{run="d"}}', values: '_x10 91x60'}}
      - {{series: 'holdfast_unread_runs', values: '0x60'}}
    alert_rule_test:
      - {{eval_time: 10m, alertname: HoldfastNoProgress, exp_alerts: []}}
      - eval_time: 20m
        alertname: HoldfastNoProgress
        exp_alerts: [{{exp_labels: {{run: a, severity: critical}}, exp_annotations: {{
          summary: "a: no step for 19m 0s", runbook: holdfast runbook hang,
          runbook_url: docs/runbooks/hang.md}}}}]
      - {{eval_time: 5m, alertname: HoldfastParked, exp_alerts: []}}
      - eval_time: 8m
        alertname: HoldfastParked
        exp_alerts: [{{
          exp_labels: {{run: b, severity: critical, state: parked}}, exp_annotations: {{
          summary: "b waits: too few nodes for its smallest layout",
          runbook: holdfast runbook slurm_node_fail,
          runbook_url: docs/runbooks/slurm_node_fail.md}}}}]
      - eval_time: 15m
        alertname: HoldfastStopped
        exp_alerts: [{{exp_labels: {{run: c, severity: critical}}, exp_annotations: {{
          summary: "c ended with exit code 94", runbook_url: docs/runbooks/README.md,
          runbook: holdfast runbook --for c, description: "See `holdfast why`."}}}}]
      - {{eval_time: 30m, alertname: HoldfastBlind, exp_alerts: []}}
"""


def test_the_rules_are_valid_and_alerts_fire_when_they_should(rules, tmp_path):
    promtool("check", "rules", str(rules))
    (tmp_path / "alerts.yml").write_text(ALERTS.format(rules=rules))
    promtool("test", "rules", str(tmp_path / "alerts.yml"))


@contextlib.contextmanager
def running(command, log):
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class Api:
    def __init__(self, port):
        self._base = f"http://127.0.0.1:{port}/api/v1/query?query="

    def values(self, query):
        """Return the values of a query; empty while nothing answers."""
        url = self._base + urllib.parse.quote(query)
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310  of our own
                found = json.load(answer)["data"]["result"]
        except OSError:
            return []
        return [float(each["value"][1]) for each in found]

    def until(self, query, true):
        deadline = time.monotonic() + DEADLINE_S
        while not (found := self.values(query)) or not true(found[0]):
            assert time.monotonic() < deadline, f"{query}: {found} after {DEADLINE_S} s"
            time.sleep(0.2)
        return found[0]


@pytest.mark.timeout(170)
@pytest.mark.parametrize("which", [0, 1])
def test_a_killed_nodes_recovery_is_read_back(rules, tmp_path, which):
    targets, port = tmp_path / "targets.json", free_port()
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "holdfast",
                "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    promtool("check", "config", str(tmp_path / "prometheus.yml"))
    exporter = [sys.executable, "-m", "launcher.cli.main", "metrics", "--runs", str(tmp_path)]
    exporter += ["--listen", "127.0.0.1:0", "--targets", str(targets)]
    prometheus = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}"]
    prometheus += [
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    api = Api(port)
    with (
        running(exporter, tmp_path / "exporter.log"),
        running(prometheus, tmp_path / "prometheus.log"),
        live_run(tmp_path) as run,
    ):
        epoch = run.until_steady()
        api.until('holdfast_nodes{run="run",state="in"}', lambda value: value == 3)
        before = api.until('holdfast_step{run="run"}', lambda value: value > 0)
        assert api.values('holdfast_restarts_total{run="run"}') == [0.0]
        agents = run.agents()
        signal_all(family(agents[sorted(agents)[which]]), signal.SIGKILL)
        run.until(run.stepped_after(epoch), "the others go on")
        api.until('holdfast_restarts_total{run="run"}', lambda value: value == 1)
        api.until('holdfast_nodes{run="run",state="in"}', lambda value: value == 2)
        api.until('holdfast_nodes_lost_total{run="run"}', lambda value: value == 1)
        api.until('holdfast_run_state{run="run",state="training"}', lambda value: value == 1)
        api.until('holdfast_step{run="run"}', lambda value: value > before)
        api.until(
            'holdfast_recovery_phase_seconds{run="run",phase="restore"}', lambda value: value > 0
        )
        redone = api.values('holdfast_steps_total{run="run",outcome="redone"}')
        assert redone in ([0.0], [1.0]), "snapshots are of each step"
