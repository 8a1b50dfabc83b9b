"""A clock that leaves out the time in which its process was stopped; the network's is one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from elastic_trainer.plan.running_clock import LONGEST_S, RunningClock


def test_a_gap_between_two_readings_that_only_a_stop_explains_is_no_time():
    now = [100.0]
    clock = RunningClock(lambda: now[0])
    times = []
    for seconds in (0.5, LONGEST_S, 80.0, 0.25, 0.0, LONGEST_S + 0.001):
        now[0] += seconds
        times.append(clock())
    assert times == [100.5, 102.5, 102.5, 102.75, 102.75, pytest.approx(102.75)]
    assert clock.stopped_s == pytest.approx(80.0 + LONGEST_S + 0.001)


REACTOR = """
import sys, time
from elastic_trainer.agent.wire.network import NetworkThread
network = NetworkThread()
network.start()
begun = time.monotonic()
def due():
    print(round(time.monotonic() - begun, 1), round(network.now.stopped_s, 1), flush=True)
network.call(lambda: network.call_at(network.now() + 1.5, due))
print("begun", flush=True)
sys.stdin.read()
network.stop()
"""


@pytest.mark.slow
def test_a_timer_of_the_reactor_waits_for_as_long_as_its_process_runs():
    process = subprocess.Popen(
        [sys.executable, "-c", REACTOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(LONGEST_S + 0.5)
        process.send_signal(signal.SIGCONT)
        took_s, stopped_s = map(float, process.stdout.readline().split())
        assert stopped_s >= LONGEST_S
        assert took_s >= stopped_s + 1.4
    finally:
        process.kill()
        process.communicate()
