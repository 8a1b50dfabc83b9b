"""Stacks of processes that cannot answer themselves, read by py-spy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_trainer.agent.hangs.stacks import StackTarget, find_py_spy, gather_stacks, state_of

pytestmark = pytest.mark.skipif(
    find_py_spy() is None, reason="py-spy is not installed: pip install py-spy"
)
SCRIPT = """
import threading, time

def a_helper():
    time.sleep(600)

def a_loop_of_the_user():
    print("up", flush=True)
    while True:
        pass

threading.Thread(target=a_helper, daemon=True).start()
a_loop_of_the_user()
"""
DEADLINE_S = 30.0
"""An agent grants a hundredth of that: this is about what comes, not when."""


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    """A process that knows nothing of us, at 100 % of a processor."""
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("stopped", [False, True])
def test_py_spy_shows_what_a_process_is_doing_that_cannot_say(
    spinning: subprocess.Popen[bytes], tmp_path: Path, stopped: bool
) -> None:
    if stopped:
        os.kill(spinning.pid, signal.SIGSTOP)
        begin = time.monotonic()
        while state_of(spinning.pid) != "T":
            assert time.monotonic() - begin < DEADLINE_S
            time.sleep(0.01)
    target = StackTarget(rank=3, pid=spinning.pid, heartbeat=tmp_path / "heartbeat")
    dump = gather_stacks([target], deadline_s=DEADLINE_S)
    assert dump.seconds < DEADLINE_S
    assert list(dump.texts) == ["rank3.txt"]
    kernel, _, python = dump.texts["rank3.txt"].decode().partition("--- stacks, from py-spy\n")
    assert f"State {'T (stopped)' if stopped else 'R (running)'}" in kernel
    assert "a_loop_of_the_user" in python.partition("Python v")[2]
    assert "a_helper" in python.partition("Python v")[2]


def test_what_py_spy_does_not_finish_in_time_is_left_out(
    spinning: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    target = StackTarget(rank=0, pid=spinning.pid, heartbeat=tmp_path / "heartbeat")
    dump = gather_stacks([target], deadline_s=0.0)
    assert "--- stacks, from py-spy" in dump.texts["rank0.txt"].decode()
    assert "pid" in dump.texts["rank0.txt"].decode()
