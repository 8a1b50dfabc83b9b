"""Commands in pods over a real WebSocket: real processes behind a small server, a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import sys
import tempfile
import termios
import threading
import time

import pytest
from fake_api import kubeconfig, server

from launcher.platforms.kubernetes.api import connect
from launcher.platforms.kubernetes.exec import ExecFailedError, PodExec, exit_code

__all__ = ["server"]  # fixture


@pytest.fixture
def there(server, tmp_path):
    path = tmp_path / "kubeconfig"
    path.write_text(kubeconfig(server.url))
    api = connect(env={"KUBECONFIG": str(path)})
    return PodExec(api=api, namespace="train", container="c")


@pytest.fixture
def ran(there):
    """Return a function: a script for sh -> the answer."""

    def run(script, timeout_s=60.0, **files):
        return there.run("p", ["sh", "-c", script], timeout_s=timeout_s, **files)

    return run


def test_what_a_command_says_and_how_it_ends(ran):
    answer = ran("echo out; echo err >&2; exit 7")
    assert (answer.code, answer.out, answer.err) == (7, "out\n", "err\n")
    assert ran("true").code == 0


def test_large_input_and_output_pass_whole_and_at_once(ran):
    """A command may answer before it has read all: more than any buffer holds, both ways."""
    data = os.urandom(8 << 20)
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out:
        stdin.write(data)
        stdin.seek(0)
        answer = ran(f"head -c {len(data)}", stdin=stdin, out=out)
        out.seek(0)
        assert (answer.code, answer.out, out.read() == data) == (0, "", True)


def test_a_command_may_write_all_before_it_reads(ran):
    num_bytes = 32 << 20
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out:
        stdin.truncate(num_bytes)
        script = f"head -c {num_bytes} /dev/zero; head -c {num_bytes} | wc -c >&2"
        answer = ran(script, stdin=stdin, out=out)
        assert (answer.code, int(answer.err), out.tell()) == (0, num_bytes, num_bytes)


def test_of_endless_complaints_the_end_is_kept(ran):
    answer = ran("head -c 300000 /dev/zero | tr '\\0' a >&2; echo end >&2; exit 1")
    assert len(answer.err) == 64 * 1024
    assert answer.err.endswith("aend\n")


def test_a_command_that_does_not_end_in_time(ran):
    ran("true")  # imports what it takes
    began = time.monotonic()
    with pytest.raises(ExecFailedError, match=r"0\.5 s"):
        ran("exec sleep 60", timeout_s=0.5)
    assert time.monotonic() - began < 15.0


def test_a_connection_that_breaks_off(ran, server):
    server.breaks_off = True
    with pytest.raises(ExecFailedError):
        ran("echo a; exec sleep 60")


def test_a_command_that_is_not_there(ran):
    assert ran("exec /no/such/thing").code == 127


STATUS = {"status": "Failure", "message": "container  not\nfound"}


@pytest.mark.parametrize(
    ("status", "words"),
    [(json.dumps(STATUS).encode(), "container not found"), (b"", "said so"), (b"[]", "[]")],
)
def test_what_did_not_run_says_why(status, words):
    with pytest.raises(ExecFailedError) as caught:
        exit_code(status, "p", "said so")
    assert words in str(caught.value)


@pytest.fixture
def attached(monkeypatch):
    """Return a function: file descriptors -> they are this process's streams."""
    with contextlib.ExitStack() as files, monkeypatch.context() as patch:

        def attach(**numbers):
            for name, number in numbers.items():
                mode = "r" if name == "stdin" else "w"
                file = files.enter_context(open(number, mode, closefd=False))
                patch.setattr(sys, name, file)

        yield attach


def test_pipes_are_handed_through(there, server, attached):
    stdin, typed = os.pipe()
    os.write(typed, b"hello\n")
    os.close(typed)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        attached(stdin=stdin, stdout=out.fileno(), stderr=err.fileno())
        script = "read line; echo got $line; echo err >&2; exit 5"
        assert there.terminal("p", ["sh", "-c", script]) == 5
        os.close(stdin)
        assert (os.pread(out.fileno(), 99, 0), os.pread(err.fileno(), 99, 0)) == (
            b"got hello\n",
            b"err\n",
        )
    assert "tty=false" in server.calls[0].lower()


def test_a_terminal_is_raw_meanwhile_and_the_pod_knows_its_size(there, server, attached):
    mine, theirs = pty.openpty()
    before, during = termios.tcgetattr(theirs), []

    def types():
        end = time.monotonic() + 60.0
        while not server.frames and time.monotonic() < end:
            time.sleep(0.02)
        during.append(termios.tcgetattr(theirs)[3])
        os.write(mine, b"key\n")

    typing = threading.Thread(target=types)
    typing.start()
    attached(stdin=theirs, stdout=theirs)
    assert there.terminal("p", ["sh", "-c", "read line; echo got $line"]) == 0
    typing.join()
    assert os.read(mine, 1000) == b"got key\n", "no echo, no carriage return"
    assert not during[0] & (termios.ICANON | termios.ECHO)
    assert termios.tcgetattr(theirs) == before
    channel, size = server.frames[0]
    assert (channel, set(json.loads(size))) == (4, {"Width", "Height"})
    assert "tty=true" in server.calls[0].lower()
    for number in (mine, theirs):
        os.close(number)
