from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_trainer.agent.workers.environment import Scratch
from launcher.platforms.base import JobId
from launcher.platforms.local import LocalCluster, loopback_address, process_table
from launcher.spec.errors import PermanentError

# An agent with a child in a session of its own (as a zygote might be), and that one's child.
AGENT = """
import os, signal, subprocess, sys, time
if sys.argv[1] == "top":
    zygote = subprocess.Popen([sys.executable, __file__, "zygote"], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda *_: (zygote.kill(), sys.exit(91)))
elif sys.argv[1] == "zygote":
    subprocess.Popen([sys.executable, __file__, "worker"])
print("up", sys.argv[1], os.getpid(), flush=True)
while True:
    time.sleep(60)
"""


def eventually(true, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@pytest.fixture
def cluster(tmp_path):
    script = tmp_path / "agent.py"
    script.write_text(AGENT)
    with LocalCluster(
        tmp_path / "run",
        run_id="test",
        job_id=JobId(f"test-{os.getpid()}-{tmp_path.name}"),
        attempt=1,
        num_nodes=2,
        command=lambda _: [sys.executable, str(script), "top"],
    ) as made:
        yield made


def up(cluster, name="node0"):
    """Wait until agent, zygote and worker run; return their pids."""
    log = cluster.agent_log(name)
    eventually(lambda: log.exists() and log.read_text().count("up ") == 3)
    return cluster.pids(name)


def alive(pids):
    return {row.pid for row in process_table() if row.pid in pids and row.state != "Z"}


def test_a_power_loss_takes_agent_zygote_and_workers(cluster):
    cluster.start()
    first, other = up(cluster), up(cluster, "node1")
    assert len(first) == len(other) == 3
    cluster.kill_node("node0")
    assert not alive(first)
    assert alive(other) == other
    assert cluster.alive() == ["node1"]
    assert cluster.longest_dead() == "node0"
    assert cluster.codes() == {}  # it did not end by itself


def test_what_a_killed_agent_left_in_memory_is_removed(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.platforms.local.SCRATCH", tmp_path)
    cluster.start()
    up(cluster)
    living = Scratch("test", "node0", root=tmp_path)  # of another job on this run
    names = ["holdfast-test-node0-a1b2", "holdfast-x-node0-a1b2", "holdfast-test-node0-making"]
    for name in names:
        (tmp_path / name).mkdir()
    for name in names[:2]:
        (tmp_path / name / "owner").touch()
    cluster.kill_all()
    assert [(tmp_path / name).exists() for name in names] == [False, True, True]
    assert living.path.exists()
    living.remove()


def test_a_node_comes_back_under_its_name_and_address(cluster):
    cluster.start()
    up(cluster)
    cluster.kill_node("node0")
    cluster.start_node("node0")
    assert cluster.alive() == ["node0", "node1"]
    assert cluster.longest_dead() is None
    assert cluster.nodes["node0"].starts == 2


def test_strays_of_a_dead_agent_are_found(cluster):
    cluster.start()
    pids = up(cluster)
    agent = cluster.nodes["node0"].process
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    assert cluster.pids("node0") == pids - {agent.pid}
    cluster.kill_all()
    assert not alive(pids)


def test_kill_worker_strikes_one_process_and_only_ours(cluster):
    cluster.start()
    pids = up(cluster)
    worker = max(pids)
    cluster.signal_worker(signal.SIGKILL, worker)
    eventually(lambda: alive(pids) == pids - {worker})
    with pytest.raises(PermanentError, match=str(os.getpid())):
        cluster.signal_worker(signal.SIGKILL, os.getpid())


def test_a_killed_agent_leaves_the_rest_to_the_kernel(cluster):
    cluster.start()
    pids = up(cluster)
    agent = cluster.nodes["node0"].process.pid
    cluster.kill_agent("node0")
    assert not alive({agent})
    assert cluster.codes() == {}  # it did not end by itself
    assert cluster.longest_dead() == "node0"
    cluster.kill_all()
    assert not alive(pids)


def test_a_zygote_is_found_by_its_parent_and_its_name(tmp_path):
    # As a real one: a child of the agent, and what it forks has the same name.
    agent = """
import ctypes, os, time
child = os.fork()
if not child:
    ctypes.CDLL(None).prctl(15, b"holdfast-zygote", 0, 0, 0)
    os.fork()
    time.sleep(600)
print(child, flush=True)
os.waitpid(child, 0)
time.sleep(600)
"""
    with LocalCluster(
        tmp_path,
        run_id="r",
        job_id=JobId("j"),
        attempt=1,
        num_nodes=1,
        command=lambda _: [sys.executable, "-c", agent],
    ) as cluster:
        cluster.start()
        eventually(
            lambda: len(cluster.pids("node0")) == 3 and cluster.agent_log("node0").read_text()
        )
        child = int(cluster.agent_log("node0").read_text())
        pids = cluster.pids("node0")
        cluster.kill_zygote("node0")
        eventually(lambda: alive(pids) == pids - {child})
        with pytest.raises(PermanentError, match="node0"):
            cluster.kill_zygote("node0")


def test_a_paused_worker_stays_and_stops(cluster):
    cluster.start()
    pids = up(cluster)
    cluster.signal_worker(signal.SIGSTOP, max(pids))
    eventually(lambda: {row.state for row in process_table() if row.pid == max(pids)} == {"T"})
    assert alive(pids) == pids


def test_pause_and_resume(cluster):
    cluster.start()
    pids = up(cluster)

    def states():
        return {row.state for row in process_table() if row.pid in pids}

    cluster.pause_node("node0")
    eventually(lambda: states() == {"T"})
    cluster.resume_node("node0")
    eventually(lambda: "T" not in states())


def test_a_clean_stop_reaches_paused_nodes_too(cluster):
    cluster.start()
    up(cluster), up(cluster, "node1")
    cluster.pause_node("node1")
    cluster.stop()
    assert cluster.wait(20)
    assert cluster.codes() == {"node0": 91, "node1": 91}


def test_a_disk_that_others_use_is_not_filled(cluster, monkeypatch):
    monkeypatch.setattr("launcher.platforms.local.SMALL_DISK_BYTES", 1 << 80)
    with pytest.raises(PermanentError, match=str(cluster.run_dir)):
        cluster.check_small_disk()


def test_wait_gives_up(cluster):
    cluster.start()
    assert not cluster.wait(0.05)


def test_an_agent_that_cannot_start_is_named(tmp_path):
    cluster = LocalCluster(
        tmp_path,
        run_id="r",
        job_id=JobId("j"),
        attempt=1,
        num_nodes=1,
        command=lambda _: ["/nonexistent/agent"],
    )
    with pytest.raises(PermanentError, match=r"node0.*/nonexistent/agent"):
        cluster.start()


def test_agents_die_with_a_killed_launcher(tmp_path):
    launcher = """
import sys
from pathlib import Path
from launcher.platforms.local import LocalCluster
cluster = LocalCluster(Path(sys.argv[1]), run_id="r", job_id="j", attempt=1, num_nodes=2,
                       command=lambda _: ["sleep", "600"])
cluster.start()
print(*(node.process.pid for node in cluster.nodes.values()), flush=True)
sys.stdin.read()
"""
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", launcher, str(tmp_path)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        pids = {int(word) for word in process.stdout.readline().split()}
        assert len(alive(pids)) == 2
        process.kill()
        eventually(lambda: not alive(pids))


def test_agents_are_told_where_and_who_they_are(tmp_path):
    made = []

    def command(node):
        made.append(node)
        return [sys.executable, "-c", "import os; print(dict(os.environ))"]

    with LocalCluster(
        tmp_path, run_id="r", job_id=JobId("j"), attempt=3, num_nodes=1, command=command
    ) as cluster:
        default = cluster._agent_command(cluster.nodes["node0"])
        cluster.start()
        assert cluster.wait(20)
        env = (tmp_path / "logs" / "3" / "node0" / "agent.log").read_text()
    assert "'OMP_NUM_THREADS': '1'" in env
    assert "'GLOO_SOCKET_IFNAME': 'lo'" in env
    assert default[1:] == [
        *("-P", "-u", "-m", "elastic_trainer.agent", "--run-dir", str(tmp_path), "--node", "node0"),
        *("--local-addr", loopback_address("r", 0), "--job", "j", "--attempt", "3"),
    ]


@given(st.text(), st.integers(0, 249))
def test_addresses_are_loopback_and_distinct_by_node(run_id, index):
    parts = [int(part) for part in loopback_address(run_id, index).split(".")]
    assert parts[0] == 127
    assert all(1 <= part <= 254 for part in parts[1:])
    assert loopback_address(run_id, index) != loopback_address(run_id, (index + 1) % 250)
