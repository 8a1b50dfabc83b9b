"""Stacks that a worker writes itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hostile_items as hostile
import pytest

from elastic_trainer.agent.hangs import stacks
from elastic_trainer.agent.hangs.stacks import StackTarget, gather_fronts, gather_stacks
from elastic_trainer.worker.worker_answers import ASK, FRONTS, SIGNALLED, ask

ANSWERS = """
import sys
from pathlib import Path
from elastic_trainer.worker.worker_answers import answer_when_asked, answer_with_flight
answer_when_asked(Path(sys.argv[1]))
answer_with_flight(lambda: b'{"entries": []}')
"""
MANY_THREADS = """
import os, threading, time

def deep(levels):
    if levels:
        deep(levels - 1)
    else:
        there.wait()
        time.sleep(600)

there = threading.Barrier(51)
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
KEEPS_THE_LOCK = """
import ctypes, sys, threading, time

def a_helper():
    time.sleep(600)

def a_call_into_c():
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    sys.setswitchinterval(600)
    libc.write(1, b"up\\n", 3)
    libc.pthread_mutex_lock(mutex)  # signals do not end it

threading.Thread(target=a_helper, daemon=True).start()
a_call_into_c()
"""
BUSY = "while True: pass"
DEADLINE_S = 60.0
"""An agent grants a part of that: this is about what comes, not when."""

Start = Callable[[str], StackTarget]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a worker that answers and then runs the code, and waits for its first line."""
    with ExitStack() as running:

        def start(code: str) -> StackTarget:
            heartbeat = tmp_path / "0.heartbeat"
            command = [sys.executable, "-c", code, str(heartbeat)]
            process = running.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
            running.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline()
            return StackTarget(rank=0, pid=process.pid, heartbeat=heartbeat)

        yield start


@pytest.mark.process
def test_stacks_are_read_when_all_of_them_are_written_however_slowly(start: Start) -> None:
    target = start(ANSWERS + MANY_THREADS)
    for _ in range(4):
        start("print(flush=True)\n" + BUSY)
    texts = gather_stacks([target], deadline_s=DEADLINE_S).texts
    said = texts["rank0.txt"].decode()
    assert said.count("in deep") == 50 * 81
    assert "in the_main_thread" in said  # the last that is written
    assert texts["rank0.flight.json"] == b'{"entries": []}'
    # Frames that change while a signal handler reads them crash the worker.
    assert target.heartbeat.with_suffix(SIGNALLED).read_bytes() == b""


@pytest.mark.process
def test_a_worker_whose_thread_cannot_answer_is_sent_a_signal(start: Start) -> None:
    target = start(ANSWERS + KEEPS_THE_LOCK)
    for _ in range(2):  # each time what it says then, and no more
        texts = gather_stacks([target], deadline_s=2.0).texts
        assert list(texts) == ["rank0.txt"]
        said = texts["rank0.txt"].decode()
        assert (said.count("in a_call_into_c"), said.count("in a_helper")) == (1, 1)


@pytest.mark.process
def test_who_cannot_be_asked_is_found(tmp_path: Path) -> None:
    heartbeat = tmp_path / "0.heartbeat"
    assert not ask(heartbeat)  # it has no pipe
    os.mkfifo(heartbeat.with_suffix(ASK))
    assert not ask(heartbeat)  # nobody reads
    reads = os.open(heartbeat.with_suffix(ASK), os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert all(ask(heartbeat) for _ in range(1 << 17))  # more than fits
    finally:
        os.close(reads)


CLOSES_ALL = """
import os, time
os.closerange(3, 256)
read, write = os.pipe()
os.write(write, b"of the script")
print("up", flush=True)
print("kept" if os.read(read, 64) == b"of the script" else "lost", flush=True)
time.sleep(600)
"""


def test_a_script_that_closes_all_descriptors_keeps_what_it_opens_then(tmp_path: Path) -> None:
    code = ANSWERS + CLOSES_ALL
    command = [sys.executable, "-c", code, str(tmp_path / "0.heartbeat")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert process.stdout.readline() == b"up\n"
            assert process.stdout.readline() == b"kept\n"
        finally:
            process.kill()
        assert process.stderr.read() == b""


def test_rubbish_of_one_worker_hides_no_word_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "ask", lambda _: True)
    good, bad = (tmp_path / f"{rank}.heartbeat" for rank in (0, 1))
    targets = [
        StackTarget(rank=rank, pid=os.getpid(), heartbeat=path)
        for rank, path in enumerate((good, bad))
    ]
    good.with_suffix(FRONTS).write_text('{"0": [3, 4]}')
    for kind, make in hostile.items({"0": [1, 2]}):
        make(bad.with_suffix(FRONTS))
        assert gather_fronts(targets, deadline_s=0) == {0: {"0": (3, 4)}}, kind
        hostile.clear(bad.with_suffix(FRONTS))
