"""A name service that is down: what torch waits for, and who no longer does."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from namespaces import why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

# A server that takes questions and answers none, and a resolver that asks it once, for a second.
WORLD = """\
ip link set lo up
echo nameserver 127.0.0.53 > "$1"; echo options timeout:1 attempts:1 >> "$1"
mount --bind "$1" /etc/resolv.conf
shift; exec "$@"
"""
PROGRAM = """\
import json, os, socket, sys, time
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.53", 53))
from torch.distributed import TCPStore
from elastic_trainer.worker.process import ask_for_a_name
if sys.argv[1] == "asked":
    ask_for_a_name()
threads = len(os.listdir("/proc/self/task"))
pid = os.fork()
if not pid:
    begun = time.monotonic()
    TCPStore("127.0.5.1", 0, is_master=True, wait_for_workers=False)
    print(json.dumps({"threads": threads, "seconds": time.monotonic() - begun}), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def forked_worker(tmp_path, asked):
    """Return what a forked worker needs for its store, after its parent has asked or not."""
    done = subprocess.run(
        [
            *("unshare", "-n", "-m", "bash", "-euc", WORLD, "world"),
            *(str(tmp_path / "resolv.conf"), sys.executable, "-c", PROGRAM, asked),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        timeout=90,
    )
    return json.loads(done.stdout)


def test_a_forked_worker_does_not_wait_for_a_name_service_that_is_down(tmp_path):
    assert forked_worker(tmp_path, "not asked")["seconds"] > 0.9, "torch asks: the test is of use"
    found = forked_worker(tmp_path, "asked")
    assert found["threads"] == 1, "it can be forked"
    assert found["seconds"] < 0.9
