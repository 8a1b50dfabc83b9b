"""The doctor on short failures in the words of the programs that fail.

failed_logs.jsonl holds one a line: id, class, action, text; numbers, addresses and paths are made
up. Sets a, b and c (the end of the id) were labelled before the doctor read them; d has the words
of other platforms' drivers and libraries, and of ends that are no failure.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from launcher.doctor.judge import judge
from launcher.doctor.scan import scan

LOGS = {
    log["id"]: log
    for log in map(
        json.loads, (Path(__file__).parent / "failed_logs.jsonl").read_text().splitlines()
    )
}
ELSE = {
    "hang-a01": ("nccl_timeout", "restart_in_place"),  # NCCL's monitor: its watchdog is stuck
    "hang-a03": ("nccl_timeout", "restart_in_place"),  # the same
    "mpi-c01": ("nccl_net", "restart_elsewhere"),  # UCX: a link of InfiniBand gave up
    "ckpt_mismatch-b01": ("shape_mismatch", "fix_user"),  # only the frames above say: resuming
}


@pytest.mark.parametrize("name", LOGS)
def test_a_reported_failure_is_named(name: str) -> None:
    log = LOGS[name]
    found = judge([scan(io.BytesIO(log["text"].encode()), name, 0)])
    told = ELSE.get(name, (log["class"], log["action"]))
    assert (found.name, str(found.action)) == told, found.evidence
