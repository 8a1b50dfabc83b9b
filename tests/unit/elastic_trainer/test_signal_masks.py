from __future__ import annotations

import subprocess
import sys

import pytest

from elastic_trainer.agent.hangs.stacks import _signal_masks
from elastic_trainer.stack_signal import FLIGHT_SIGNAL

CODE = """
import signal, threading, time
from elastic_trainer.stack_signal import FLIGHT_SIGNAL

def block():
    signal.pthread_sigmask(signal.SIG_BLOCK, {FLIGHT_SIGNAL})

def thread():
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

%s
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("first", "blocked"), [("block(); thread()", True), ("thread(); block()", False)]
)
def test_a_signal_is_blocked_where_all_threads_block_it(first, blocked):
    worker = subprocess.Popen([sys.executable, "-c", CODE % first], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None
        worker.stdout.readline()
        mask = _signal_masks(worker.pid)["SigBlk"]
        assert bool(mask >> (FLIGHT_SIGNAL - 1) & 1) is blocked
    finally:
        worker.kill()
        worker.communicate()
