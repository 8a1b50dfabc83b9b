from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import warnings
from enum import Enum

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from elastic_trainer.state.collective import describe
from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.index import check_index
from elastic_trainer.state.manifest import FileEntry
from elastic_trainer.state.reader import CheckpointReader, read_index
from elastic_trainer.state.save import Writer
from elastic_trainer.state.state import Stager, create_optimizer_state, live_tensors, read_into


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


def stored(folder, state) -> CheckpointReader:
    """Save `state` by DCP and return a reader of it."""
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(state, storage_writer=Writer(folder, lambda _: None), no_dist=True)
    raw = (folder / ".metadata").read_bytes()
    return CheckpointReader(folder, FileEntry(len(raw), hashlib.sha256(raw).hexdigest()))


def index_of(path) -> bytes:
    """Return the `.metadata` that this Python and this torch write."""
    stored(path, {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)})
    return (path / ".metadata").read_bytes()


class ByName(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class ByValue(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.7 and newer ones do."""

    def reducer_override(self, value):
        return (type(value), (value.value,)) if isinstance(value, Enum) else NotImplemented


def pickled(make: type[pickle.Pickler], value: object) -> bytes:
    buffer = io.BytesIO()
    make(buffer).dump(value)
    return buffer.getvalue()


@pytest.mark.parametrize("make", [ByName, ByValue])
def test_the_index_is_read_whichever_python_wrote_it(tmp_path, make):
    own = index_of(tmp_path)
    files = {"__0_0.distcp": FileEntry((tmp_path / "__0_0.distcp").stat().st_size, "0" * 64)}
    metadata = read_index(own)
    raw = pickled(make, metadata)
    assert (b"getattr" in raw) == (make is ByName)
    assert read_index(raw) == metadata
    for index in (own, raw):
        check_index(index, files)


class Reduced:
    """What a pickle would call, and with what."""

    def __init__(self, *call):
        self._call = call

    def __reduce__(self):
        return self._call[0], self._call[1:]


MEMORY_FORMAT = TensorProperties.__getstate__(TensorProperties())[3].__class__


@pytest.mark.parametrize(
    "value",
    [
        Reduced(os.system, "true"),
        {"a": Reduced(os.system, "true")},
        io.BytesIO,
        nn.Linear(1, 1),
        getattr,
        Reduced(getattr, MEMORY_FORMAT, "__init_subclass__"),
        Reduced(getattr, MEMORY_FORMAT, "mro"),
        Reduced(getattr, Metadata, "__init__"),
        Reduced(getattr, torch.Size, "numel"),
        Reduced(getattr, "text", "format"),
        Reduced(MEMORY_FORMAT, 7),
    ],
)
def test_what_has_no_place_in_an_index_is_refused_with_torch_and_without(value):
    raw = pickle.dumps(value)
    with pytest.raises((pickle.UnpicklingError, DamagedError, ValueError)):
        read_index(raw)
    with pytest.raises(DamagedError):
        check_index(raw, {})


def test_verification_finds_parts_that_are_not_there(tmp_path):
    raw = index_of(tmp_path)
    size_bytes = (tmp_path / "__0_0.distcp").stat().st_size
    with pytest.raises(DamagedError, match=r"__0_0\.distcp"):
        check_index(raw, {})
    with pytest.raises(DamagedError, match=rf"\b{size_bytes} .*\b__0_0.*\b{size_bytes - 1}\b"):
        check_index(raw, {"__0_0.distcp": FileEntry(size_bytes - 1, "0" * 64)})
    with pytest.raises(DamagedError) as caught:
        check_index(raw[:-9], {})
    assert caught.value.__cause__ is not None, "it was not unpickled"


def read(path, raw: bytes, digest: str) -> Metadata:
    (path / ".metadata").write_bytes(raw)
    return CheckpointReader(path, FileEntry(len(raw), digest)).read_metadata()


def test_metadata_is_digested_before_it_is_unpickled(tmp_path):
    raw = pickle.dumps(Reduced(os.system, "true"))
    with pytest.raises(DamagedError, match="sha256"):
        read(tmp_path, raw, "0" * 64)
    with pytest.raises(pickle.UnpicklingError, match="system"):
        read(tmp_path, raw, hashlib.sha256(raw).hexdigest())
    raw = pickle.dumps({"no": "metadata"})
    with pytest.raises(DamagedError, match=r"\bdict\b"):
        read(tmp_path, raw, hashlib.sha256(raw).hexdigest())


WHERE = "/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("[enforce fail at inline_container.cc:672] . unexpected pos 7", "unexpected pos 7"),
        ("[enforce fail at /b/serialize/inline_container.cc:672] . x", "x"),
        (f"[{WHERE}] Connection closed", "Connection closed"),
        (f"bad\nException raised from f at {WHERE} (most recent call first):\nframe #0: x", "bad"),
    ],
)  # fmt: skip
def test_errors_of_torch_come_without_the_paths_of_its_build(said, expected):
    assert describe(RuntimeError(said)) == f"RuntimeError: {expected}"


def test_the_systems_error_behind_one_of_torch_is_told():
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 7 vs 5")
    error.__context__ = full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert describe(error) == f"OSError: {full}"


def test_a_load_reads_every_kind_of_tensor_and_any_box(tmp_path):
    whole = torch.arange(1200.0).reshape(40, 30)
    state = {
        "model": {
            **{str(dtype): (whole % 97).to(dtype) for dtype in (torch.bfloat16, torch.int8)},
            "scalar": torch.tensor(5.0),
            "transposed": whole.t(),
            "complex": whole[:2].to(torch.complex64),
            "empty": torch.zeros(0, 3),
        }
    }
    reader = stored(tmp_path, state)
    target = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    read_into(target, reader, reader.read_metadata())
    for name, value in state["model"].items():
        assert torch.equal(target["model"][name], value), name


def test_a_load_calls_nothing_that_a_data_file_names(tmp_path):
    reader = stored(tmp_path, {"model": {"a": torch.ones(3)}})
    metadata = reader.read_metadata()
    (info,) = metadata.storage_data.values()
    buffer = io.BytesIO()
    torch.save(Reduced(os.mkdir, str(tmp_path / "called")), buffer)
    (tmp_path / info.relative_path).write_bytes(buffer.getvalue())
    info.offset, info.length = 0, len(buffer.getvalue())
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        read_into({"model": {"a": torch.zeros(3)}}, reader, metadata)
    assert not (tmp_path / "called").exists()
