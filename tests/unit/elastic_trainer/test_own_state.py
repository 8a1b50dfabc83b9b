from __future__ import annotations

import dataclasses
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from elastic_trainer.agent.boards.board import Commit, update
from elastic_trainer.agent.boards.file_board import FileBoard
from elastic_trainer.events import Event
from elastic_trainer.heartbeat import Request
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.own_state import OwnState


@pytest.fixture(autouse=True)
def _alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def own_state(root, **more):
    env = {
        "HOLDFAST_RECORD_DIR": str(root),
        "HOLDFAST_EPOCH": "0",
        "HOLDFAST_NODE": "n1",
        "TORCHELASTIC_RUN_ID": "r1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        **more,
    }
    return OwnState(env, ParallelLayout(), {"every_s": 50.0})


def test_every_part_of_a_recovery_is_on_record_once(tmp_path):
    state = own_state(tmp_path, HOLDFAST_BORN=str(time.monotonic() - 5.0))
    model = nn.Linear(2, 2)
    state.restore(model, torch.optim.AdamW(model.parameters()), {})
    for step in (1, 2):
        state.record(step, 0.5, 0.25, None)
    state.close()
    lines = (tmp_path / "events" / "worker-n1-0.jsonl").read_text().splitlines()
    events = [event for event in map(Event.decode, lines) if event.event == "recovery.phase"]
    assert [event.fields["phase"] for event in events] == [
        "process_group", "model", "restore", "first_step",
    ]  # fmt: skip
    seconds = [event.fields["seconds"] for event in events]
    assert all(value > 0 for value in seconds)
    assert seconds[0] >= 5.0, "from the fork on"


@pytest.mark.parametrize(("ago_s", "due"), [(0.0, False), (60.0, True)])
def test_the_clock_of_saves_goes_on_from_when_the_agent_began(tmp_path, ago_s, due):
    old = Commit(epoch=0, step=1, dir="d", manifest_sha256="0", t_unix=time.time() - 1000)
    model = nn.Linear(2, 2)
    state = own_state(tmp_path, HOLDFAST_SINCE=str(time.monotonic() - ago_s))
    state.restore(model, torch.optim.AdamW(model.parameters()), {})
    update(FileBoard(tmp_path / "board"), lambda b: dataclasses.replace(b, commits=(old,)))
    asked, _ = state.agree(2, Request.NONE, time.monotonic())
    assert bool(asked) == due
    state.close()
