from __future__ import annotations

import os

import pytest
import torch
from test_script_checkpointer import checkpointer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from elastic_trainer.train.script_state import _encoded
from elastic_trainer.worker.progress import ApiError


@pytest.fixture(autouse=True)
def _alone(one_rank, monkeypatch):
    monkeypatch.setattr("signal.signal", lambda *_: None)


class Position:
    """As a data loader's: where it is."""

    def __init__(self, at=0):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Script:
    """Two optimizers, each with a scheduler, and a loader."""

    def __init__(self, root):
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        first, second = self.model
        self.optimizers = (
            torch.optim.AdamW(first.parameters(), lr=0.1),
            torch.optim.SGD(second.parameters(), lr=0.2, momentum=0.9),
        )
        self.objects = {
            "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizers[0], 20),
            "steps": torch.optim.lr_scheduler.MultiStepLR(self.optimizers[1], [3, 5]),
            "samples": torch.zeros((), dtype=torch.int64),
        }
        self.loader = Position()
        self.state = checkpointer(root)

    def load(self, **given):
        wanted = {"extra": self.objects, "per_rank": {"loader": self.loader}, **given}
        return self.state.load(
            self.model,
            self.optimizers,
            wanted["extra"],
            per_rank=wanted["per_rank"],
            sharding=wanted.get("sharding"),
        )

    def step(self):
        self.model(torch.ones(3, 4)).square().sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.objects["cosine"].step()
        self.objects["steps"].step()
        self.objects["samples"] += 3
        self.loader.at += 7

    def everything(self):
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        weights = [value.tolist() for value in self.model.state_dict().values()]
        return rates, weights, self.objects["samples"].item(), self.loader.at


def saved(root, steps):
    script = Script(root)
    assert script.load() == 0
    for _ in range(steps):
        script.step()
    assert script.state.checkpoints.save(steps, wait=True)
    script.state.close()
    return script


def test_optimizers_schedulers_and_a_loader_continue_where_they_were(tmp_path):
    before = saved(tmp_path, 4)
    after = Script(tmp_path)
    assert after.load() == 4
    assert after.everything() == before.everything()
    for script in (before, after):
        for _ in range(3):
            script.step()
    assert after.everything() == before.everything()
    after.state.close()


def test_an_object_that_was_not_kept_or_does_not_fit_is_an_error_of_its_own(tmp_path):
    saved(tmp_path, 1)
    script = Script(tmp_path)
    with pytest.raises(ApiError, match=r"HF533 .*more"):
        script.load(extra={**script.objects, "more": Position()})
    script.state.close()
    script = Script(tmp_path)
    script.loader.load_state_dict = lambda state: state["index"]
    with pytest.raises(ApiError, match="HF533 loader"):
        script.load()
    script.state.close()


@pytest.mark.parametrize("state", [{"at": Position()}, {"at": os.getcwd}])
def test_what_would_run_code_when_it_is_loaded_is_refused_at_the_start(tmp_path, state):
    script = Script(tmp_path)
    script.loader.state_dict = lambda: state
    with pytest.raises(ApiError, match="HF534"):
        script.load()
    script.state.close()


def test_a_state_may_grow_up_to_its_room(tmp_path):
    script = Script(tmp_path)
    script.load()
    live = script.state.checkpoints._state.live
    small = live(1, speaks=True)["trainer"]["rank.0"]
    script.loader.at = "x" * 1000
    grown = live(2, speaks=True)["trainer"]["rank.0"]
    assert grown.shape == small.shape
    assert len(_encoded({"loader": script.loader.state_dict()})) < grown.numel()
    script.loader.at = "x" * grown.numel()
    with pytest.raises(ApiError, match="HF534"):
        live(3, speaks=True)
    script.state.close()


def test_plain_parts_are_kept_as_what_they_are_a_part_of(tmp_path):
    """As of tensor parallelism without DTensor; here over one rank."""
    mesh = init_device_mesh("cpu", (1,))

    def sharding(name):
        return (mesh, [Shard(0)]) if name == "0.weight" else None

    script = Script(tmp_path)
    assert script.load(sharding=sharding) == 0
    script.step()
    live = script.state.checkpoints._state.live(1, speaks=True)
    parts = {n for s in ("model", "optim") for n, t in live[s].items() if hasattr(t, "placements")}
    assert parts == {"0.weight", "state.0.weight.exp_avg", "state.0.weight.exp_avg_sq"}
    assert script.state.checkpoints.save(1, wait=True)
    script.state.close()
    again = Script(tmp_path)
    assert again.load(sharding=sharding) == 1
    assert again.everything() == script.everything()
    again.state.close()


class Counting(torch.optim.SGD):
    """Keeps its steps as plain numbers, as Adafactor of transformers does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("square", torch.zeros_like(param))
                state["step"] = state.get("step", 0) + 1
        return super().step(closure)


def test_what_an_optimizer_counts_in_plain_numbers_is_kept(tmp_path):
    scripts = [Script(tmp_path), Script(tmp_path)]
    for script in scripts:
        script.optimizers = tuple(
            Counting(part.parameters(), lr=0.1, momentum=0.9) for part in script.model
        )
        script.objects = {}
    before, after = scripts
    before.load()
    for _ in range(3):
        before.model(torch.ones(3, 4)).square().sum().backward()
        for optimizer in before.optimizers:
            optimizer.step()
    assert before.state.checkpoints.save(3, wait=True)
    before.state.close()
    assert after.load() == 3
    counts = [state["step"] for each in after.optimizers for state in each.state.values()]
    assert counts == [3, 3, 3, 3]
