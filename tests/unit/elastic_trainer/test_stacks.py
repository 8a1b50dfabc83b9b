"""Stacks that a worker writes itself."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from elastic_trainer.agent.hangs.stacks import Target, gather_stacks

SCRIPT = """
import os, sys, threading, time
from pathlib import Path
from elastic_trainer.stack_signal import answer_with_stacks

def deep(levels):
    if levels:
        deep(levels - 1)
    else:
        there.wait()
        time.sleep(600)

there = threading.Barrier(51)
answer_with_stacks(Path(sys.argv[1]))
for _ in range(50):
    threading.Thread(target=deep, args=(80,), daemon=True).start()
there.wait()
os.nice(19)
def the_main_thread():
    print("up", flush=True)
    while True:
        pass
the_main_thread()
"""
BUSY = "while True: pass"
DEADLINE_S = 60.0
"""An agent grants a part of that: this is about what comes, not when."""


def test_stacks_are_read_when_all_of_them_are_written_however_slowly(tmp_path: Path) -> None:
    with ExitStack() as running:

        def start(*argv: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-c", *argv]
            process = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            running.callback(process.kill)
            return process

        worker = start(SCRIPT, str(tmp_path / "heartbeat"))
        assert worker.stdout is not None
        assert worker.stdout.readline()
        for _ in range(4):
            start(BUSY)
        target = Target(rank=0, pid=worker.pid, heartbeat=tmp_path / "heartbeat")
        said = gather_stacks([target], deadline_s=DEADLINE_S).texts["rank0.txt"].decode()
    assert said.count("in deep") == 50 * 81
    assert "in the_main_thread" in said  # the last that is written
