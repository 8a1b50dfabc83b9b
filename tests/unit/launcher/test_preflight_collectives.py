"""Preflight's collectives for real: eight nodes' processes, a slow and a broken one among them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import hostile_items as hostile
import psutil
import pytest

from elastic_trainer.storage.files import write_json
from launcher.fleet.preflight import collectives
from launcher.fleet.preflight.collectives import Verdicts, finding

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def stuttering(pid):
    """Let the process and its children run for a sixteenth of the time."""
    stop = threading.Event()

    def send(number):
        for each in (pid, *family_of(pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, number)

    def stutter():
        while not stop.wait(0.02):
            send(signal.SIGSTOP)
            stop.wait(0.3)
            send(signal.SIGCONT)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        send(signal.SIGCONT)


def family_of(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def preflight(folder, *words):
    command = [sys.executable, "-m", "launcher.cli.main", "preflight", "--to", "local"]
    command += ["--collectives", "--check", "versions", "--folder", str(folder / "files"), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def servers(folder):
    return {
        path.stem.removeprefix("hello-"): json.loads(path.read_text())["pid"]
        for path in (folder / "files" / "collectives").glob("hello-*.json")
    }


def runs(pid):
    """Whether a process runs; one that has ended may wait for its parent, if that is ours."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def gone(pids):
    deadline = time.monotonic() + 30
    while any(runs(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_slow_and_a_broken_node_among_eight_are_found(tmp_path, death):
    with preflight(tmp_path, "--nodes", "8") as process, contextlib.ExitStack() as stack:
        rounds, again = [], False
        for line in process.stderr:
            again |= "once more" in line
            if "round" in line and not again:
                rounds.append(line)
            if "round 1" in line:
                found = servers(tmp_path)
                broken = [found["local5"], *family_of(found["local5"])]
                for pid in broken:
                    stack.callback(kill, pid)
                    os.kill(pid, death)
                stack.enter_context(stuttering(found["local2"]))
        table = process.stdout.read()
    rows = [line.split() for line in table.splitlines() if "collectives" in line]
    assert process.returncode == 1, table
    assert len(rounds) <= 4, rounds  # log2(8) + 1
    assert [row[0] for row in rows] == ["ok", "ok", "fail", "ok", "ok", "fail", "ok", "ok"], table
    assert "6 of 8 nodes" in table
    gone(set(found.values()))


def kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.process
@pytest.mark.timeout(100)
def test_healthy_nodes_are_fit_and_nothing_is_left(tmp_path):
    with preflight(tmp_path, "--nodes", "3", "--json") as process:
        out, err = process.communicate(timeout=90)
    answer = json.loads(out)
    assert (process.returncode, answer["ok"]) == (0, True), (out, err)
    checks = [finding["check"] for node in answer["nodes"] for finding in node["findings"]]
    assert checks == ["versions", "collectives"] * 3
    assert not (tmp_path / "files").exists()


@contextlib.contextmanager
def answering(place, nodes, seconds):
    """Answer as the nodes' servers do, with `seconds(round, node)`; real ones vary with load."""

    def serve():
        number = 1
        while not (place / "stop").exists():
            try:
                asked = json.loads((place / f"round-{number}.json").read_text())
            except FileNotFoundError:
                time.sleep(0.01)
                continue
            for group in asked["groups"]:
                took = max(seconds(number, node) for node in group)
                for node in group:
                    write_json(place / f"answer-{number}-{node}.json", {"seconds": took})
            number += 1

    for node in nodes:
        write_json(place / f"hello-{node}.json", {})
    thread = threading.Thread(target=serve)
    thread.start()
    yield
    thread.join(timeout=30)


@pytest.mark.parametrize(("slow_until", "slow"), [(3, set()), (math.inf, {"b"})])
def test_a_node_is_slow_only_if_it_is_so_in_two_passes(tmp_path, slow_until, slow):
    said = []
    with answering(tmp_path, "abc", lambda n, node: 9.0 if node == "b" and n <= slow_until else 1):
        found = collectives.compare("abc", tmp_path, said.append)
    assert found == Verdicts(slow=frozenset(slow))
    assert len([line for line in said if "round" in line]) == 6


@pytest.mark.process
@pytest.mark.timeout(100)
def test_an_interrupt_leaves_no_process(tmp_path):
    with preflight(tmp_path, "--nodes", "4") as process:
        for line in process.stderr:
            if "round 1" in line:
                break
        found = servers(tmp_path)
        assert len(found) == 4
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    gone(set(found.values()))


def test_a_number_of_nodes_that_is_none_is_refused(tmp_path):
    for nodes in ("0", "n[1-3]", "65"):
        with preflight(tmp_path, "--nodes", nodes) as process:
            _, err = process.communicate(timeout=60)
        assert process.returncode == 2
        assert "HF661" in err


def test_findings_name_what_to_look_at():
    verdicts = Verdicts(
        broken=frozenset({"a"}), slow=frozenset({"b"}), suspects=frozenset({"c", "d"})
    )
    found = {node: finding(verdicts, node, 5) for node in "abcde"}
    assert [found[n].level for n in "abcde"] == ["fail", "fail", "warn", "warn", "ok"]
    assert "c, d" in found["c"].text
    two, three = (finding(Verdicts(), "a", nodes).text for nodes in (2, 3))
    assert two.startswith(three)
    assert two != three


def test_rubbish_of_one_node_is_no_answer_and_hides_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(collectives, "DEADLINE_S", 0.0)
    monkeypatch.setattr(collectives, "_GRACE_S", 0.0)
    (tmp_path / "answer-1-a.json").write_text('{"seconds": 2}')
    for kind, make in hostile.items({"seconds": 1.0}):
        bad = tmp_path / "answer-1-b.json"
        make(bad)
        found = collectives._round([("a",), ("b",)], 1, tmp_path)
        assert found[("a",)] == 2, kind
        assert found[("b",)] is None or 0 <= found[("b",)] <= 1e308, kind
        hostile.clear(bad)
