from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from tiny_run import events
from torch import nn

from elastic_trainer import api
from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Commit, update
from elastic_trainer.plan.ladder import Ladder
from elastic_trainer.record.events import Event
from elastic_trainer.state.manager import CheckpointManager
from elastic_trainer.state.snapshot_restore import Restored
from elastic_trainer.state.state import TrainingState
from elastic_trainer.train.script_checkpointer import ScriptCheckpointer, device_of
from elastic_trainer.worker import progress
from elastic_trainer.worker.heartbeat import Heartbeat, Request
from elastic_trainer.worker.progress import ApiError, StepCounter


@pytest.fixture(autouse=True)
def _alone(one_rank):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():  # a worker leaves them to its agent
        signal.signal(number, handler)


def environment(root, **more):
    (rung,) = Ladder.data_parallel(max_nodes=1, min_nodes=1, workers=1).rungs
    return {
        "HOLDFAST_RECORD_DIR": str(root),
        "HOLDFAST_EPOCH": "0",
        "HOLDFAST_NODE": "n1",
        "TORCHELASTIC_RUN_ID": "r1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "HOLDFAST_RUNG": json.dumps(rung.to_dict()),
        "HOLDFAST_HEARTBEAT": str(root / "heartbeat"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        **more,
    }


def checkpointer(root, *, training=None, before=None, **more):
    env = environment(root, **more)
    return ScriptCheckpointer(env, {"every_s": 50.0}, training=training, before=before)


def test_every_part_of_a_recovery_is_on_record_once(tmp_path):
    state = checkpointer(tmp_path, HOLDFAST_BORN=str(time.monotonic() - 5.0))
    model = nn.Linear(2, 2)
    state.load(model, (torch.optim.AdamW(model.parameters()),), {}, per_rank={}, sharding=None)
    for step in (1, 2):
        state.record("step.completed", step, committed=None, loss=0.5, step_s=0.25)
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
    state = checkpointer(tmp_path, HOLDFAST_SINCE=str(time.monotonic() - ago_s))
    state.load(model, (torch.optim.AdamW(model.parameters()),), {}, per_rank={}, sharding=None)
    update(FileBoard(tmp_path / "board"), lambda b: dataclasses.replace(b, commits=(old,)))
    assert bool(state.agree(2, Request.NONE)[0].requests) == due
    state.close()


@pytest.mark.parametrize("committed", [(), (3,), (2, 3)])
def test_what_came_from_memory_is_on_storage_only_if_it_was_committed(
    committed, tmp_path, monkeypatch
):
    """The last step's state would else be lost with the nodes' memory, when the job ends."""
    commits = tuple(
        Commit(epoch=0, step=step, dir=f"d{step}", manifest_sha256="0") for step in committed
    )
    update(FileBoard(tmp_path / "board"), lambda b: dataclasses.replace(b, commits=commits))
    found = Restored(3, 0, (), ())
    monkeypatch.setattr(CheckpointManager, "_restore_from_memory", lambda *_: found)
    model = nn.Linear(2, 2)
    session = checkpointer(tmp_path)
    assert session.restore(TrainingState(model, (torch.optim.AdamW(model.parameters()),), {})) == 3
    assert session.checkpoints.saved_step == (3 if 3 in committed else -1)
    session.close()


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_a_script_may_name_any_back_end(backend, monkeypatch):
    if backend is None and dist.is_nccl_available():
        pytest.skip("a build of torch for CUDA takes NCCL, which wants a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    told = dist.get_backend_config()
    assert device_of(told, 1) == torch.device("cpu")


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "cuda:nccl"])
def test_a_script_with_nccl_computes_on_its_gpu(backend, monkeypatch):
    told = str(dist.BackendConfig(dist.Backend(backend)))
    assert device_of(told, 1) == torch.device("cpu")  # torch's build for CUDA, no GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of(told, 1) == torch.device("cuda:1")


def begun(session, value, *, kept=None):
    """Restore into a model that is all `value`; return it and the step."""
    model = nn.Linear(2, 2)
    nn.init.constant_(model.weight, value)
    optimizers = (torch.optim.AdamW(model.parameters()),)
    return model, session.load(model, optimizers, kept or {}, per_rank={}, sharding=None)


def test_each_training_of_a_process_has_its_own_state(tmp_path):
    """The second begins with what the script gives it, and a restart finds either."""
    first = checkpointer(tmp_path)
    model, step = begun(first, 1.0)
    assert step == 0
    assert first.finish(first.base + 10)
    first.close()
    second = checkpointer(tmp_path, before=first)
    model, step = begun(second, 2.0)
    assert (step, second.base, model.weight[0, 0].item()) == (0, 10, 2.0)
    assert second.checkpoints.save(second.base + 4, wait=True)
    second.close()

    first = checkpointer(tmp_path)
    model, step = begun(first, 0.0)
    assert (step, first.finished, model.weight[0, 0].item()) == (10, True, 1.0)
    first.close()
    second = checkpointer(tmp_path, before=first)
    model, step = begun(second, 0.0)
    assert (step, second.finished, model.weight[0, 0].item()) == (4, False, 2.0)
    second.close()


def test_a_training_whose_end_is_not_kept_is_not_taken_for_finished(tmp_path):
    first = checkpointer(tmp_path, training="sft")
    begun(first, 1.0)
    assert first.checkpoints.save(7, wait=True)
    first.close()
    with pytest.raises(ApiError, match="HF538"):
        begun(checkpointer(tmp_path, training="dpo"), 2.0)
    again = checkpointer(tmp_path, training="sft")
    assert begun(again, 0.0)[1] == 7
    assert not again.finished
    again.close()


def test_a_step_of_a_finished_training_is_refused(tmp_path, monkeypatch):
    """Whose loop does not ask `not run.finished`: the model is its last state, and stays that."""
    heartbeat = Heartbeat(tmp_path / "heartbeat", create=True)
    monkeypatch.setattr(progress, "_counter", (os.getpid(), StepCounter(heartbeat)))
    for begins, finished in ((0, False), (3, True)):
        model = nn.Linear(2, 2)
        run = api.WorkerRun(environment(tmp_path), {"memory_every_steps": 0}, name="sft")
        assert run.restore(model, torch.optim.AdamW(model.parameters())) == begins
        assert run.finished is finished
        if finished:
            with pytest.raises(ApiError, match=r"HF539 step 4\b.*'sft'.*step 3\b"):
                run.completed(4)
        else:
            for step in (1, 2, 3):
                assert not run.completed(step)
        run.finish()
    done = [e["step"] for e in events(tmp_path, "step.completed")]
    assert done == [1, 2, 3]
    heartbeat.close()


def test_a_training_that_has_ended_holds_no_memory(tmp_path):
    session = checkpointer(tmp_path)
    model, _ = begun(session, 1.0)
    held = weakref.ref(model)
    assert session.finish(session.base + 1)
    session.close()
    del model
    gc.collect()
    assert held() is None
    assert (session.base, session.finished, session.restored) == (0, False, True)
