"""Waiting for signals: real ones, in a process of its own, which is stopped meanwhile too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

WAITER = """
import os, signal, sys
from launcher.node.agent import taken_signals
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
os.kill(os.getpid(), signal.SIGUSR2)  # held back until it is wanted
with taken_signals((signal.SIGUSR2, signal.SIGTERM)) as wait:
    for line in sys.stdin:
        print("waiting", flush=True)
        taken = wait(float(line))
        print(None if taken is None else taken.name, flush=True)
print(signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)
"""


@pytest.fixture
def waiter():
    process = subprocess.Popen(
        [sys.executable, "-c", WAITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    with process:
        process.kill()


def begin(waiter, seconds):
    waiter.stdin.write(f"{seconds}\n")
    waiter.stdin.flush()
    assert waiter.stdout.readline() == "waiting\n"


@pytest.mark.slow
def test_what_was_held_back_comes_first_and_all_is_put_back_at_the_end(waiter):
    begin(waiter, 30)
    assert waiter.stdout.readline() == "SIGUSR2\n"
    begin(waiter, 30)
    waiter.send_signal(signal.SIGTERM)
    assert waiter.stdout.readline() == "SIGTERM\n"
    begin(waiter, 0.01)
    assert waiter.stdout.readline() == "None\n"
    assert waiter.communicate() == ("True\nTrue\n", None)


@pytest.mark.slow
def test_a_stop_that_is_longer_than_the_wait_is_no_signal(waiter):
    begin(waiter, 30)
    assert waiter.stdout.readline() == "SIGUSR2\n"
    for _ in range(3):
        begin(waiter, 0.5)
        waiter.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, waiter.pid, os.WSTOPPED)
        with pytest.raises(subprocess.TimeoutExpired):
            waiter.wait(0.6)  # its time passes while it is stopped
        waiter.send_signal(signal.SIGCONT)
        assert waiter.stdout.readline() == "None\n"
