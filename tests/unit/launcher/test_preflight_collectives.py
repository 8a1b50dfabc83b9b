"""Preflight's collectives for real: eight nodes' processes, a slow and a broken one among them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from launcher.ops.preflight.collectives import Collectives, findings, local_servers

NODES = [f"n{i}" for i in range(8)]


@contextlib.contextmanager
def stuttering(process):
    """Let the process and its children run for a sixteenth of the time."""
    stop = threading.Event()

    def descendants():
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        return [process.pid, *map(int, children.split())]

    def send(number):
        for pid in descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stutter():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            while not stop.is_set():
                send(signal.SIGSTOP)
                stop.wait(0.3)
                send(signal.SIGCONT)
                stop.wait(0.02)

    thread = threading.Thread(target=stutter)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            send(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_slow_and_a_broken_node_among_eight_are_found(tmp_path, death):
    with local_servers(NODES, tmp_path) as running, contextlib.ExitStack() as stack:

        def plant(text):
            if "round 1" in text:
                os.killpg(running[5].pid, death)
                stack.enter_context(stuttering(running[2]))

        driver = Collectives(nodes=NODES, folder=tmp_path, deadline_s=15, say=plant)
        verdicts = driver.run()
        assert (verdicts.broken, verdicts.slow, verdicts.suspects) == ({"n5"}, {"n2"}, set()), (
            driver.bisection.times
        )
        assert driver.rounds <= 4  # log2(8) + 1
    found = findings(verdicts, NODES)
    assert [n for n in NODES if found[n].level == "fail"] == ["n2", "n5"]
    assert json.loads((tmp_path / "round-1.json").read_text())["deadline_s"] == 15
    for process in running:
        assert process.returncode is not None
