"""PID 1 of a pod: its run directory, its agent, the signals, what it reaps and how it ends."""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest
from pod_world import POD, job_json, until, world

from launcher.node.attempt import pasts
from launcher.node.pod import PodEnv
from launcher.record import stop_request
from launcher.spec.errors import UserError

__all__ = ["job_json", "world"]  # fixtures


@pytest.mark.parametrize(
    "changes",
    [
        {"HOLDFAST_KIND": "job"},
        {"HOLDFAST_JOB": ""},
        {"HOLDFAST_ATTEMPT": "x"},
        {"POD_NAME": ""},
        {"POD_NAME": "../x"},
        {"HOLDFAST_SAVE_WAIT_S": "soon"},
    ],
)
def test_outside_a_pod_it_says_so(tmp_path, changes):
    env = {"HOLDFAST_KIND": "jobset", "HOLDFAST_JOB": "a", "POD_NAME": "p", **changes}
    with pytest.raises(UserError, match="HF674"):
        PodEnv.of(env)


# --- a board that does not answer -----------------------------------------------------------------


class NoConfigMap(http.server.BaseHTTPRequestHandler):
    """An API server that has no board yet."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def lines_of(process: subprocess.Popen[str], found: str) -> list[str]:
    """Read lines until one has `found` in it."""
    lines: list[str] = []
    while not lines or found not in lines[-1]:
        lines.append(process.stdout.readline())
        assert lines[-1], lines
    return lines


@pytest.fixture
def far_board(world):
    """Return the address of an API server that does not listen yet, known to the world's pods."""
    (world.tmp_path / "token").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    world.env |= {
        "HOLDFAST_BOARD": "kubernetes://default/llama",
        "HOLDFAST_API_SERVER": f"http://127.0.0.1:{port}",
        "HOLDFAST_SERVICE_ACCOUNT_DIR": str(world.tmp_path),
    }
    return "127.0.0.1", port


def test_an_api_server_that_does_not_answer_is_asked_again(world, far_board):
    process = world.start(until=signal.SIGTERM)
    lines_of(process, "retrying")
    with http.server.ThreadingHTTPServer(far_board, NoConfigMap) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        try:
            world.agent()
            process.send_signal(signal.SIGTERM)
            world.end(process)
        finally:
            server.shutdown()
            serving.join()
    assert world.heard() == [signal.SIGTERM]


def test_a_pod_that_is_told_to_go_waits_for_no_board(world, far_board):
    process = world.start()
    lines_of(process, "retrying")
    process.send_signal(signal.SIGTERM)
    code, output = world.end(process)
    assert code == 143, output
    assert not (world.run_dir / "agent.json").exists()


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "board", "code"),
    [
        (0, {"finished": True}, 0),
        (0, {}, 143),
        (93, {"ended": 93}, 93),
        (94, {"ended": 94}, 94),
        (93, {}, 143),
        (92, {"ended": 92}, 143),
        (91, {"ended": 91}, 143),
        (1, {}, 143),
    ],
)
def test_the_job_s_end_decides_and_not_the_agent_s(world, agent, board, code):
    process = world.start(after_s=20, until=signal.SIGTERM, code=agent)
    world.agent()
    if "ended" in board:
        world.ended(board["ended"])
    elif board:
        world.put(**board)
    until(world.who.agent_file.exists)  # the agent may have begun before its parent goes on
    os.kill(int(world.who.agent_file.read_text()), signal.SIGTERM)  # the agent ends by itself
    found, output = world.end(process)
    assert found == code, output
    assert (world.run_dir / "attempts" / "llama-0.0" / "exit" / POD).read_text() == f"{agent}\n"
    named = [event["event"] for event in world.events()]
    assert named.count("run.started") == 1
    assert named.count("run.ended") == (1 if "ended" in board else 0)


def test_the_agent_is_told_who_it_is(world):
    code, _ = world.run()
    argv = world.agent()["argv"][1:]
    pairs = dict(zip(argv[::2], argv[1::2], strict=True))
    assert pairs == {
        "--run-dir": str(world.run_dir),
        "--node": POD,
        "--on-term": "leave",
        "--job": "llama-0.0",
        "--attempt": "llama-0.0",
        "--local-addr": "127.0.0.1",
        "--host": "machine-1",
    }
    assert code == 143


def test_the_next_generation_begins_where_one_has_ended(world):
    world.run()
    world.ended(92)
    _, output = world.run()
    assert "llama-0.1" in world.agent()["argv"], output
    ended = json.loads((world.run_dir / "attempts" / "llama-0.0" / "end.json").read_text())
    assert ended["code"] == 92
    assert [past.code for past in pasts(world.run_dir, {"llama-0"})] == [92, None]


def test_a_run_that_is_done_or_cancelled_starts_nothing(world):
    world.put(finished=True)
    assert world.run()[0] == 0
    world.put(finished=False)
    stop_request.ask(world.run_dir, why="cancel", t_unix=0.0)
    assert world.run()[0] == 93, "a JobSet ends with that"
    world.env["HOLDFAST_KIND"] = "pytorchjob"
    assert world.run()[0] == 91
    assert not (world.run_dir / "agent.json").exists()


def test_budgets_are_for_starts_not_for_pods_that_come_back(world):
    past = world.run_dir / "attempts" / "llama-0.0"
    past.mkdir(parents=True)
    now = time.time()
    (past / "begin.json").write_text(json.dumps({"t_unix": now, "step": -1}))
    (past / "end.json").write_text(json.dumps({"code": 93, "reason": "HF517"}))
    world.lease("llama-0.1")
    assert world.run()[0] == 143, "that generation goes on"
    assert "llama-0.1" in world.agent()["argv"]
    world.ended(91, "llama-0.0")
    code, output = world.run()
    assert (code, "HF517" in output) == (93, True), output


def test_the_word_of_every_pod_ends_a_job_that_cannot_begin(world):
    world.run(code=93)
    for pod in ("llama-node-0-0", "llama-node-0-1"):
        world.env["POD_NAME"] = pod
        assert world.run(code=93)[0] == 143
    world.env["POD_NAME"] = "llama-node-0-2"
    code, output = world.run(code=93)
    assert (code, "4 pods" in output) == (93, True), output


def test_one_pod_that_refuses_under_many_names_is_one_pod(world):
    for suffix in ("aaaaa", "bbbbb", "ccccc", "ddddd"):
        world.env["POD_NAME"] = f"llama-node-0-0-{suffix}"
        assert world.run(code=93)[0] == 143


def fail_before(world, *, count: int, pods: int = 3) -> None:
    (world.run_dir / "pods").mkdir(exist_ok=True)
    for index in range(pods):
        (world.run_dir / "pods" / f"llama-0.llama-node-0-{index}").write_text(f"{count}\n")
    (world.run_dir / "pods" / "llama-0.llama-node-0-3").write_text("9\n")
    world.env["POD_NAME"] = f"{POD}-x7k2p"


def test_pods_that_all_fail_again_and_again_end_the_job(world):
    fail_before(world, count=10)
    code, output = world.run(code=1)
    assert (code, "HF676" in output) == (93, True), output


@pytest.mark.parametrize(
    ("before", "code"),
    [({"count": 9}, 1), ({"count": 10, "pods": 2}, 1), ({"count": 10}, 92), ({"count": 10}, 91)],
)
def test_a_few_failures_an_unready_pod_or_an_orderly_end_end_nothing(world, before, code):
    fail_before(world, **before)
    assert world.run(code=code)[0] == 143


def test_pods_that_are_killed_as_a_whole_at_every_start_end_the_job(world):
    """By the kernel, for memory: with its container PID 1 is killed too, and can count nothing."""
    fail_before(world, count=10)
    count = world.run_dir / "pods" / "llama-0.llama-node-0-3"
    process = world.start(after_s=30.0)
    until((world.run_dir / "agent.json").exists)
    agent = world.agent()["pid"]
    process.kill()
    world.end_killed(process, agent)
    assert count.read_text().split()[0] == "10", "9 before, and this one"
    code, output = world.run(code=0)
    assert (code, "HF676" in output) == (93, True), output
    count.write_text("10\n")
    assert world.run(code=92)[0] == 143, "the last of them told how it ended"


def test_a_live_coordinator_keeps_a_job_whose_other_pods_fail(world):
    fail_before(world, count=10)
    world.lease("llama-0.0")
    process = world.start(after_s=0.0, code=1)
    beat = 0
    while process.poll() is None:
        beat += 1
        world.lease("llama-0.0", beat)
        time.sleep(0.1)
    assert world.end(process)[0] == 143


@pytest.mark.process
def test_the_lease_of_a_dead_coordinator_keeps_no_job(world):
    fail_before(world, count=10)
    world.lease("llama-0.0")
    assert world.run(code=1)[0] == 93


def test_it_pauses_before_it_is_started_again_and_sigterm_ends_the_pause(world):
    begun = time.monotonic()
    process = world.start(after_s=0.0, pause_s=1.0, code=1)
    assert world.end(process)[0] == 143
    assert time.monotonic() - begun >= 1.0
    process = world.start(after_s=0.0, pause_s=60.0, code=1)
    until(lambda: (world.run_dir / "pods").is_dir() and process.poll() is None)
    until((world.run_dir / "heard.json").exists)
    process.send_signal(signal.SIGTERM)
    assert world.end(process)[0] == 143


def test_a_pod_on_a_machine_that_was_excluded_says_so_and_waits_longer_each_time(world):
    """Under whatever name it is made again: the count is of its place in the job."""
    world.env["NODE_NAME"] = "bad-7"
    for count, name in enumerate(("llama-node-0-3-x7k2p", "llama-node-0-3-b2b2b"), 1):
        world.env["POD_NAME"] = name
        code, output = world.run(code=92)
        assert (code, "kubectl cordon bad-7" in output) == (143, True)
        [noted] = (world.run_dir / "pods").iterdir()
        assert (noted.name, noted.read_text()) == ("llama-0.llama-node-0-3", f"{count}\n")


def test_without_a_run_directory_it_is_tried_again(world):
    (world.run_dir / "job.json").unlink()
    code, output = world.run()
    assert (code, "HF502" in output) == (144, True), "the Job charges what pods cannot count"


# --- signals and children -------------------------------------------------------------------------


def test_sigterm_is_passed_on_once_as_this_pod_s(world):
    process = world.start(until=signal.SIGTERM, code=91)
    world.agent()
    process.send_signal(signal.SIGTERM)
    code, output = world.end(process)
    assert code == 143, output
    assert world.heard() == [signal.SIGTERM]


@pytest.mark.process
def test_after_a_cancel_sigterm_means_the_whole_job_again_and_again(world):
    world.lease("llama-0.0")  # it goes on: pods that come now are not refused
    process = world.start(listens=False, until=signal.SIGTERM, after_s=3.0, code=91)
    world.agent()
    stop_request.ask(world.run_dir, why="cancel --save", t_unix=0.0)
    process.send_signal(signal.SIGTERM)  # the agent does not listen yet, and lives
    world.end(process)
    assert (world.run_dir / "attempts/llama-0.0/exit" / POD).read_text() == "91\n"
    assert world.heard() == []
    process = world.start(until=signal.SIGUSR2, code=91)
    world.agent()
    process.send_signal(signal.SIGUSR2)
    world.end(process)
    assert signal.SIGUSR2 in world.heard()


def test_a_wish_for_a_save_is_passed_on(world):
    process = world.start(until=signal.SIGUSR1)
    world.agent()
    process.send_signal(signal.SIGUSR1)
    world.end(process)
    assert world.heard() == [signal.SIGUSR1]


def test_an_agent_that_does_not_end_is_killed_in_time(world):
    world.env["HOLDFAST_SHUTDOWN_S"] = "0.5"
    process = world.start(until=None, after_s=60)
    pid = world.agent()["pid"]
    process.send_signal(signal.SIGTERM)
    code, output = world.end(process)
    assert code == 143, output
    assert not Path(f"/proc/{pid}").exists()


def test_orphans_are_reaped(world):
    process = world.start(orphan=True, until=signal.SIGTERM)
    agent = world.agent()["pid"]
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: children.read_text().split() == [str(agent)])
    os.kill(agent, signal.SIGTERM)
    _, output = world.end(process)
    assert "left None" in output, "PID 1 has no child left"
