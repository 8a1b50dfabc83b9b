"""Storage that stalls is a FIFO without a reader: opening it waits as a frozen disk does."""

from __future__ import annotations

import errno
import os
import shutil
import time

import pytest

from elastic_trainer.record.event_log import EventLog
from elastic_trainer.record.events import Event
from elastic_trainer.storage import write_behind
from elastic_trainer.storage.write_behind import WriteBehind
from elastic_trainer.train.feed import SampleLedger


def read_until(fd, lines):
    raw, deadline = b"", time.monotonic() + 20.0
    while raw.count(b"\n") < lines and time.monotonic() < deadline:
        raw += os.read(fd, 1 << 16)
    return raw.decode().splitlines()


def test_what_is_put_is_on_the_file_at_once(tmp_path):
    file = WriteBehind(tmp_path / "new" / "a.jsonl")
    for number in range(100):
        file.put(f"{number}\n".encode())
    assert file.flush(10)
    assert (tmp_path / "new" / "a.jsonl").read_text().split() == [str(n) for n in range(100)]
    assert (file.behind, file.failed) == (0, 0)
    assert file.close()
    file.put(b"more\n")
    assert file.close()
    assert (tmp_path / "new" / "a.jsonl").read_text().endswith("99\nmore\n")


def test_a_file_that_was_removed_is_made_again(tmp_path):
    file = WriteBehind(tmp_path / "run" / "events" / "a.jsonl")
    file.put(b"lost\n")
    assert file.flush(10)
    shutil.rmtree(tmp_path / "run")
    file.put(b"kept\n")
    assert file.close()
    assert (tmp_path / "run" / "events" / "a.jsonl").read_text() == "kept\n"


def test_frozen_storage_holds_a_caller_up_once_and_the_lines_come_later(tmp_path, monkeypatch):
    monkeypatch.setattr(write_behind, "STALL_S", 0.25)  # of 0.3 s at least
    told = []
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    file = WriteBehind(fifo, on_stall=lambda *what: told.append(what))
    begun = time.monotonic()
    for number in range(1000):
        file.put(f"{number}\n".encode())
    assert file.behind == 1000
    assert not file.flush(0.1)
    assert time.monotonic() - begun < 60 * write_behind.PATIENCE_S  # not 1000 times
    fd = os.open(fifo, os.O_RDONLY)
    assert read_until(fd, 1000) == [str(n) for n in range(1000)]
    assert file.flush(10)
    file.put(b"after\n")
    assert read_until(fd, 1) == ["after"]
    assert file.close()
    [(seconds, held_back)] = told
    assert seconds >= 0.3
    assert held_back == 1000
    os.close(fd)


@pytest.mark.process
def test_the_event_log_says_afterwards_that_storage_stalled(tmp_path, monkeypatch):
    monkeypatch.setattr(write_behind, "STALL_S", 0.0)
    log = EventLog(tmp_path, "w")
    log.emit("agent.started")
    log.close()
    lines = (tmp_path / "events" / "w.jsonl").read_text().splitlines()
    found = [Event.decode(line) for line in lines]
    assert [event.event for event in found if event][:2] == ["agent.started", "storage.stalled"]


def full(*_):
    raise OSError(errno.ENOSPC, "full")


def test_events_are_dropped_by_a_full_disk_and_counted(tmp_path, monkeypatch):
    file = WriteBehind(tmp_path / "a")
    monkeypatch.setattr(write_behind.os, "write", full)
    file.put(b"x\n")
    assert file.flush(10)
    assert file.failed == 1
    monkeypatch.setattr(write_behind, "HELD_BYTES", 1)
    file.put(b"xxx\n")
    assert file.failed == 2
    file.close()


def test_the_ledger_is_kept_until_a_full_disk_has_room(tmp_path, monkeypatch):
    monkeypatch.setattr(write_behind, "RETRY_S", 0.01)
    ledger = SampleLedger(tmp_path, epoch=1, dp_rank=0, resume_step=0, layout="dp1")
    assert ledger.flush(10)
    with monkeypatch.context() as patched:
        patched.setattr(write_behind.os, "write", full)
        ledger.end_step(1)
        assert ledger.behind
        assert not ledger.flush(0.1)
    assert ledger.flush(10)
    assert not ledger.behind
    ledger.close()
    [path] = (tmp_path / "ledger").iterdir()
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # it is multi-threaded
def test_a_fork_writes_with_a_thread_of_its_own(tmp_path):
    file = WriteBehind(tmp_path / "a")
    file.put(b"parent\n")
    assert file.flush(10)
    pid = os.fork()
    if pid == 0:
        file.put(b"child\n")
        os._exit(0 if file.flush(10) else 1)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert (tmp_path / "a").read_text() == "parent\nchild\n"
    file.close()


def test_after_a_torn_line_the_next_is_whole(tmp_path, monkeypatch):
    """A full disk takes the beginning of a line, and later all again."""
    wrote, room = os.write, [30]

    def full(fd, data):
        taken = bytes(data)[: room[0]]
        room[0] -= len(taken)
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return wrote(fd, taken)

    monkeypatch.setattr(write_behind.os, "write", full)
    log = EventLog(tmp_path, "a")
    for step in range(3):
        log.emit("step.completed", step=step)
    assert log.failed == 3
    room[0] = 1 << 20
    for step in (3, 4):
        log.emit("step.completed", step=step)
    log.close()
    assert log.failed == 3
    read = map(Event.decode, (tmp_path / "events" / "a.jsonl").read_text().splitlines())
    assert [event.step for event in read if event] == [3, 4]


def test_what_must_be_kept_goes_on_where_it_was_torn(tmp_path, monkeypatch):
    wrote, room = os.write, [4]

    def full(fd, data):
        taken = bytes(data)[: room[0]]
        room[0] -= len(taken)
        if not taken:
            room[0] = 1 << 20
            raise OSError(errno.ENOSPC, "No space left on device")
        return wrote(fd, taken)

    monkeypatch.setattr(write_behind, "RETRY_S", 0.01)
    monkeypatch.setattr(write_behind.os, "write", full)
    file = WriteBehind(tmp_path / "a", must_keep=True)
    file.put(b"abcdefgh\n")
    file.put(b"next\n")
    assert file.close(10)
    assert (tmp_path / "a").read_bytes() == b"abcdefgh\nnext\n"
