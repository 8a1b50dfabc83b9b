"""Reading past torch.load: the same values, or left to torch."""

from __future__ import annotations

import io
import os
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from elastic_trainer.checkpoint import reader as reader_module
from elastic_trainer.checkpoint.archive import EDGE_BYTES, Archive, UnusualError
from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.load import read_into
from elastic_trainer.checkpoint.manifest import METADATA_NAME
from elastic_trainer.checkpoint.raw_read import RawFile
from elastic_trainer.checkpoint.reader import CheckpointReader
from elastic_trainer.checkpoint.restricted import tensor_header
from elastic_trainer.checkpoint.save import _Writer
from elastic_trainer.checkpoint.storage import CheckpointStorage

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
BEFORE = b"what another entry holds"


def numbers(sizes, dtype=torch.float32):
    count = torch.Size(sizes).numel()
    return (torch.arange(count) % 97).reshape(sizes).to(dtype)


def saved(value) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def item_of(offsets, lengths) -> ReadItem:
    index = MetadataIndex("t", torch.Size(offsets))
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size(offsets),
        storage_index=index,
        storage_offsets=torch.Size(offsets),
        lengths=torch.Size(lengths),
    )


def fill(path, raw, target, offsets, *, cut=0):
    """Put `raw` behind something else in a file and read a box of it into `target`."""
    path.write_bytes(BEFORE + raw)
    if cut:
        os.truncate(path, len(BEFORE) + len(raw) - cut)
    with RawFile(path) as file:
        file.fill(target, item_of(offsets, target.shape), len(BEFORE), len(raw))
    return target


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_read(tmp_path, dtype):
    whole = numbers((6, 8), dtype)
    for value in (whole, whole[2:4], whole[0, 0]):
        target = torch.zeros(value.shape, dtype=dtype)
        assert torch.equal(fill(tmp_path / "f", saved(value), target, [0] * value.dim()), value)


def boxes():
    """(sizes, offsets, lengths) of a box in a tensor of up to three dims, empty ones too."""
    dim = st.integers(0, 9).flatmap(
        lambda size: st.tuples(st.just(size), st.integers(0, size), st.integers(0, size)).map(
            lambda d: (d[0], min(d[1:]), max(d[1:]) - min(d[1:]))
        )
    )
    return st.lists(dim, max_size=3).map(lambda dims: [list(x) for x in zip(*dims, strict=True)])


@settings(max_examples=150, deadline=None)
@given(box=boxes(), wider=st.booleans(), strided=st.booleans())
def test_any_box_of_any_tensor_is_read_into_any_target(tmp_path_factory, box, wider, strided):
    sizes, offsets, lengths = box or [[], [], []]
    value = numbers(sizes)
    target = torch.zeros(lengths, dtype=torch.float64 if wider else torch.float32)
    if strided and lengths:
        target = torch.zeros([*lengths[:-1], 2 * lengths[-1] + 1])[..., 1::2]
    expected = value
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        expected = expected.narrow(dim, offset, length)
    path = tmp_path_factory.getbasetemp() / "any-box"
    read = fill(path, saved(value), target, offsets)
    assert torch.equal(read, expected.to(read.dtype))


UNUSUAL = {
    "transposed": lambda: numbers((4, 6)).t(),
    "every other": lambda: numbers((4, 6))[:, ::2],
    "expanded": lambda: numbers((1, 6)).expand(4, 6),
    "parameter": lambda: torch.nn.Parameter(numbers((4, 6))),
    "wants gradient": lambda: numbers((4, 6)).requires_grad_(),
    "complex": lambda: numbers((4, 6), torch.complex64),
    "sparse": lambda: numbers((4, 6)).to_sparse(),
    "two": lambda: [numbers((4, 6)), numbers((4, 6))],
    "other sizes": lambda: numbers((4, 5)),
    "other dims": lambda: numbers((24,)),
    "no tensor": lambda: {"a": 1},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_left_to_torch(tmp_path, name):
    target = torch.full((4, 6), -7.0)
    with pytest.raises(UnusualError):
        fill(tmp_path / "f", saved(UNUSUAL[name]()), target, [0, 0])
    assert torch.equal(target, torch.full((4, 6), -7.0))


def test_no_archive_is_left_to_torch(tmp_path):
    old = io.BytesIO()
    torch.save(numbers((4, 6)), old, _use_new_zipfile_serialization=False)
    for raw in (old.getvalue(), b"", b"x" * 3000, pickle.dumps([1])):
        with pytest.raises(UnusualError):
            fill(tmp_path / "f", raw, torch.zeros(4, 6), [0, 0])


def test_a_file_that_became_shorter_is_damaged(tmp_path):
    raw = saved(numbers((600,)))
    for cut in (1, EDGE_BYTES, len(raw) - 10):
        with pytest.raises(DamagedError, match="f has become shorter"):
            fill(tmp_path / "f", raw, torch.zeros(600), [0], cut=cut)


def test_shorter_between_two_reads_is_damaged(tmp_path):
    raw, path = saved(numbers((5000,))), tmp_path / "f"
    path.write_bytes(raw)
    with RawFile(path) as file:
        file.fill(torch.zeros(10), item_of([0], [10]), 0, len(raw))
        os.truncate(path, 2000)
        with pytest.raises(DamagedError, match="f has become shorter"):
            file.fill(torch.zeros(4000), item_of([0], [4000]), 0, len(raw))


class Evil:
    def __reduce__(self):
        return (os.system, ("exit 3",))


def test_nothing_is_called_by_a_header():
    for value in (Evil(), [Evil()], os.system, torch.nn.Linear):
        with pytest.raises(UnusualError):
            tensor_header(pickle.dumps(value, protocol=2))
    for raw in (b"", b".", b"\x80\x02", b"\x80\x02}q\x00b.", b"ctorch\nFloatStorage\n)R."):
        with pytest.raises(UnusualError):
            tensor_header(raw)


RAW = saved(numbers((300,)))


@settings(max_examples=400, deadline=None)
@given(
    at=st.integers(0, len(RAW) - 1),
    byte=st.integers(0, 255),
    near_an_edge=st.sampled_from([0, 1, -1]),
)
def test_damage_reads_nothing_outside_the_entry(tmp_path_factory, at, byte, near_an_edge):
    """A digest has found such damage before; here it must do no harm either."""
    at = {0: at, 1: at % 700, -1: len(RAW) - 1 - at % 600}[near_an_edge]
    raw = bytearray(RAW)
    raw[at] = byte
    target = torch.full((300,), -7.0)
    path = tmp_path_factory.getbasetemp() / "damaged"
    try:
        fill(path, bytes(raw), target, [0])
    except UnusualError:
        assert torch.equal(target, torch.full((300,), -7.0))
    else:
        assert target.view(torch.uint8).numpy().tobytes() in bytes(raw)


def test_the_record_of_elements_is_where_torch_says():
    raw = bytearray(saved(numbers((700,))))
    archive = Archive(bytes(raw[:EDGE_BYTES]), bytes(raw[-EDGE_BYTES:]), len(raw))
    record = archive.record("archive/data/0")
    assert torch.equal(
        torch.frombuffer(raw[record.at : record.at + record.num_bytes], dtype=torch.float32),
        numbers((700,)),
    )
    with pytest.raises(UnusualError, match="no archive/data/1"):
        archive.record("archive/data/1")


def state():
    return {
        "model": {
            "plain": numbers((40, 30)),
            "scalar": torch.tensor(5.0),
            "transposed": numbers((40, 30)).t(),
            "complex": numbers((4,), torch.complex64),
            "empty": torch.zeros(0, 3),
        }
    }


def stored(path):
    """Save `state()` by DCP and return a reader of it."""
    with warnings.catch_warnings(action="ignore"):  # that there is no process group
        dcp.save(state(), storage_writer=_Writer(path / "c", lambda _: None), no_dist=True)
    entries = CheckpointStorage(path).digest("c", 0)
    return CheckpointReader(path / "c", entries[METADATA_NAME])


def test_a_checkpoint_of_both_kinds_is_read(tmp_path, monkeypatch):
    reader = stored(tmp_path)
    by_torch = []
    parent = reader_module.FileSystemReader.read_data

    def noted(self, plan, planner):
        by_torch.extend(item.storage_index.fqn for item in plan.items)
        return parent(self, plan, planner)

    monkeypatch.setattr(reader_module.FileSystemReader, "read_data", noted)
    target = {"model": {name: torch.zeros_like(value) for name, value in state()["model"].items()}}
    read_into(target, reader, reader.read_metadata())
    for name, value in state()["model"].items():
        assert torch.equal(target["model"][name], value), name
    assert sorted(by_torch) == ["model.complex", "model.transposed"]
