from __future__ import annotations

import hashlib
import io
import os
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.manifest import FileEntry
from elastic_trainer.checkpoint.reader import CheckpointReader
from elastic_trainer.checkpoint.restricted import RestrictedUnpickler
from elastic_trainer.checkpoint.state import Stager, create_optimizer_state, live_tensors


def trained(model: nn.Module, make=torch.optim.AdamW, **kwargs):
    optimizer = make(model.parameters(), lr=0.1, **kwargs)
    for index, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, index + 1.0)
    optimizer.step()
    return optimizer


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))


def wrapped() -> nn.Module:
    model = small()
    model[0] = checkpoint_wrapper(model[0])
    model[2] = torch.compile(model[2], backend="eager")
    return model


@pytest.mark.parametrize("make", [small, wrapped])
def test_names_and_tensors_are_those_of_torch(make):
    model = make()
    optimizer = trained(model)
    params, state = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    live = live_tensors(model, optimizer)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for ours, theirs in ((live["model"], params), (live["optim"], tensors)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_staged_copies_share_no_memory_and_buffers_are_used_again():
    model = small()
    optimizer = trained(model)
    live = live_tensors(model, optimizer)
    stager = Stager()
    staged = stager.stage(live)
    pairs = [(live[s][n], staged[s][n]) for s in live for n in live[s]]
    assert len(pairs) == 5 + 15
    for tensor, copy in pairs:
        assert torch.equal(tensor, copy)
        assert tensor.untyped_storage().data_ptr() != copy.untyped_storage().data_ptr()
    before = {n: t.clone() for n, t in staged["model"].items()}
    optimizer.step()
    assert all(torch.equal(staged["model"][n], before[n]) for n in before)
    again = stager.stage(live_tensors(model, optimizer))
    assert all(again["model"][n].data_ptr() == staged["model"][n].data_ptr() for n in before)
    assert not all(torch.equal(again["model"][n], before[n]) for n in before)


@pytest.mark.parametrize(
    ("make", "kwargs"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
    ],
)
def test_created_state_is_what_the_optimizer_would_have(make, kwargs):
    model = small()
    reference = live_tensors(model, trained(model, make, **kwargs))["optim"]
    fresh = make(model.parameters(), lr=0.1, **kwargs)
    create_optimizer_state(
        model, fresh, {f"optim.{n}": (t.shape, t.dtype) for n, t in reference.items()}
    )
    created = live_tensors(model, fresh)["optim"]
    assert created.keys() == reference.keys()
    for name, tensor in created.items():
        like = reference[name]
        assert (tensor.shape, tensor.dtype, tensor.device) == (like.shape, like.dtype, like.device)
        tensor.copy_(like)
    fresh.step()


class Evil:
    def __reduce__(self):
        return (os.system, ("true",))


def test_unpickler_refuses_what_has_no_place_in_metadata(tmp_path):
    for value in (Evil(), {"a": Evil()}, io.BytesIO, nn.Linear(1, 1)):
        with pytest.raises(pickle.UnpicklingError, match="has no place"):
            RestrictedUnpickler(io.BytesIO(pickle.dumps(value))).load()


def read(path, raw: bytes, digest: str) -> Metadata:
    (path / ".metadata").write_bytes(raw)
    return CheckpointReader(path, FileEntry(len(raw), digest)).read_metadata()


def test_metadata_is_digested_before_it_is_unpickled(tmp_path):
    raw = pickle.dumps(Evil())
    with pytest.raises(DamagedError, match="another sha256"):
        read(tmp_path, raw, "0" * 64)
    with pytest.raises(pickle.UnpicklingError, match="system"):
        read(tmp_path, raw, hashlib.sha256(raw).hexdigest())
    raw = pickle.dumps({"no": "metadata"})
    with pytest.raises(DamagedError, match="holds a dict"):
        read(tmp_path, raw, hashlib.sha256(raw).hexdigest())
