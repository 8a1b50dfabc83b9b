from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from elastic_trainer.worker.torch_private import OneThreadGloo

PROGRAM = """\
import json, os, sys
import torch
from torch import distributed
from elastic_trainer.worker.torch_private import keep_process_groups
if "keep" in sys.argv:
    keep_process_groups()
from torch.distributed import destroy_process_group  # as scripts do, after their start
threads = []
for _ in range(3):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    distributed.all_reduce(torch.ones(1))
    during = len(os.listdir("/proc/self/task"))
    destroy_process_group()
    threads.append((during, len(os.listdir("/proc/self/task"))))
assert not distributed.is_initialized()
print(json.dumps(threads), flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["keep", "free"])
def test_a_group_that_has_ended_is_not_freed_before_the_next_one_has(how):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, check=True, timeout=60
    )
    threads = json.loads(done.stdout)
    during, after = threads[0]
    assert (after == during) is (how == "keep"), threads
    assert {after for _, after in threads} == {after}, f"one is kept, not all: {threads}"


NAMES_ABOVE_15_CHARACTERS = """\
import os, sys, time
import torch
from torch import distributed as dist
from elastic_trainer.worker.torch_private import use_one_thread
if "one" in sys.argv:
    use_one_thread()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
gloo = dist.group.WORLD._get_backend(torch.device("cpu"))
deadline, part = time.monotonic() + 8, torch.ones(1)
while time.monotonic() < deadline:
    for work in [gloo.allgather_coalesced([[part]], [part]) for _ in range(64)]:
        work.wait()
os._exit(0)
"""
"""Two threads end it within a second."""


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["one", "two"])
def test_collectives_at_once_corrupt_the_heap_on_two_threads_only(threads, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NAMES_ABOVE_15_CHARACTERS, threads],
        check=False,
        cwd=tmp_path,
        timeout=60,
    )
    signals = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}
    assert done.returncode in ({0} if threads == "one" else signals)


def run_loops():
    tasks = Path("/proc/self/task").iterdir()
    return {task.name for task in tasks if "gloo_runloop" in (task / "comm").read_text()}


@pytest.mark.parametrize(("interfaces", "devices"), [(None, 1), ("", 1), ("lo", 1), ("lo,lo", 2)])
def test_a_group_is_torch_s_own_on_the_network_that_torch_would_take(
    interfaces, devices, monkeypatch
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interfaces is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    before = run_loops()
    group = OneThreadGloo(dist.HashStore(), 0, 1, timedelta(seconds=7))
    group.allreduce([torch.ones(1)]).wait()  # threads name themselves
    assert len(run_loops() - before) == 1
    assert type(group) is dist.ProcessGroupGloo
    assert isinstance(group, OneThreadGloo)
    assert not isinstance(dist.HashStore(), OneThreadGloo)
    assert len(group.options._devices) == devices
    assert group.options._timeout == timedelta(seconds=7)


def test_an_interface_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(RuntimeError, match="nosuch0"):
        OneThreadGloo(dist.HashStore(), 0, 1)


def test_a_lazy_group_does_not_wait_for_its_peers(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    assert OneThreadGloo(store, 0, 2, timedelta(seconds=1)).size() == 2
    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT")
    with pytest.raises(RuntimeError):
        OneThreadGloo(dist.PrefixStore("2", store), 0, 2, timedelta(seconds=1))
