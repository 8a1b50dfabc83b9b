from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """\
import json, os, sys
import torch
from torch import distributed
from elastic_trainer.process_groups import keep_process_groups
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
