"""Hugging Face safetensors -> a run whose board has one commit, of step 0.

The run directory gets `board/` and `checkpoints/step-000000000-e000000/`, in the
format that the trainer writes: DCP data files with `.metadata`, and a manifest
with their digests. The parameters are fp32. There is no optimizer state: the
first step makes it. Any layout can restore it.

Tensors are written in chunks of rows, one file a chunk, and only one chunk is
in memory at a time. Chunks also spare a rank that needs a few rows the rest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from elastic_trainer.agent.boards.board import Commit, update
from elastic_trainer.agent.boards.file_board import FileBoard
from elastic_trainer.checkpoint.hf_names import EMBEDDING, HEAD, param_sizes
from elastic_trainer.checkpoint.hf_source import HFSource
from elastic_trainer.checkpoint.manifest import FileEntry, Manifest, with_commit
from elastic_trainer.checkpoint.staging import ByteCount, Progress, appearing
from elastic_trainer.checkpoint.state import MODEL, RNG, STEP, TRAINER
from elastic_trainer.checkpoint.storage import CheckpointStorage
from elastic_trainer.layout import ParallelLayout
from elastic_trainer.models import ModelShape

MAX_CHUNK_BYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import made."""

    commit: Commit
    shape: ModelShape
    files: tuple[str, ...]
    """In the checkpoint's directory, manifest apart."""
    size_bytes: int
    """Of those files."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when it is written: `read(start, stop)` returns rows of dim 0."""

    size: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]


def import_hf(
    source_dir: Path,
    run_dir: Path,
    *,
    run_id: str,
    on_progress: Progress = lambda *_: None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Imported:
    """Make `run_dir` with the weights of `source_dir` as its checkpoint of step 0.

    Args:
        source_dir: config.json and safetensors, in one file or several with an index.
        run_dir: new or empty. It appears whole or not at all.
        run_id: goes into the manifest.
        on_progress: hears of every chunk written and of every file digested.
        max_chunk_bytes: bounds the memory; a row is never split.

    Raises:
        InputError: the source cannot be used (see HFSource); HF321, `run_dir` is
            not empty.
        CheckpointError: HF322, `run_dir` cannot be written.
    """
    source = HFSource(source_dir)
    with appearing(run_dir, what="run directory", may_be_empty=True) as temp:
        storage = CheckpointStorage(temp / "checkpoints")
        storage.root.mkdir()
        name = storage.make(step=0, epoch=0)
        tensors = _tensors(source)
        # Every byte is written once and read once more for its digest.
        progress = ByteCount(on_progress, 2 * sum(map(_nbytes, tensors.values())))
        write_tensors(storage.root / name, tensors, progress.add, max_chunk_bytes)
        files = dict(_digests(storage.root / name, progress.add))
        manifest = _manifest(run_id, source.shape, files)
        digest = storage.write_manifest(name, manifest)
        commit = Commit(epoch=0, step=0, dir=name, manifest_sha256=digest)
        update(FileBoard(temp / "board"), lambda state: with_commit(state, commit, keep=1))
    size_bytes = sum(entry.size_bytes for entry in files.values())
    return Imported(commit, source.shape, tuple(files), size_bytes)


def write_tensors(
    directory: Path,
    tensors: dict[str, LazyTensor],
    on_written: Callable[[int], None],
    max_chunk_bytes: int,
) -> None:
    """Write `tensors` into the empty `directory` as a DCP checkpoint of one rank.

    These are the steps of `dcp.save(no_dist=True)`, which would wrap every
    error, an interrupt included.

    Args:
        directory: exists.
        tensors: full name -> what to write.
        on_written: called with the bytes of each chunk.
        max_chunk_bytes: largest chunk, unless a row is larger.
    """
    planner = _LazyPlanner(tensors, on_written, max_chunk_bytes)
    writer = _Writer(directory, single_file_per_rank=False, overwrite=False)
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    try:
        results = writer.write_data(plan, planner).wait()
    except RuntimeError as error:
        # torch.save, closing its archive, covers up why it could not be written.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
    writer.finish(metadata, [results])


class _Writer(FileSystemWriter):  # type: ignore[misc]  # torch is not followed by mypy
    """DCP's writer without the absolute path in the index."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class _LazyPlanner(DefaultSavePlanner):  # type: ignore[misc]  # torch is not followed by mypy
    """Plans chunks of tensors that are not there yet, and reads each when it is written."""

    def __init__(
        self,
        tensors: dict[str, LazyTensor],
        on_written: Callable[[int], None],
        max_chunk_bytes: int,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._on_written = tensors, on_written
        self._max_chunk_bytes = max_chunk_bytes

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                item
                for name, tensor in self._tensors.items()
                for item in _write_items(name, tensor, self._max_chunk_bytes)
            ]
        )
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor, chunk = self._tensors[write_item.index.fqn], write_item.tensor_data.chunk
        start = chunk.offsets[0] if chunk.offsets else 0
        data = tensor.read(start, start + chunk.sizes[0] if chunk.sizes else 1)
        assert data.size() == chunk.sizes, f"{write_item.index}: {data.size()}"
        assert data.dtype == tensor.dtype, f"{write_item.index}: {data.dtype}"
        self._on_written(data.nbytes)
        return data


def _write_items(name: str, tensor: LazyTensor, max_chunk_bytes: int) -> Iterator[WriteItem]:
    properties = TensorProperties(dtype=tensor.dtype)
    size = torch.Size(tensor.size)
    num_rows = tensor.size[0] if tensor.size else 1
    rows = max(1, max_chunk_bytes * num_rows // _nbytes(tensor))
    for start in range(0, num_rows, rows):
        offsets, sizes = torch.Size([0] * len(size)), size
        if size:
            offsets = torch.Size([start, *offsets[1:]])
            sizes = torch.Size([min(rows, num_rows - start), *size[1:]])
        yield WriteItem(
            index=MetadataIndex(name, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=properties,
                size=size,
            ),
        )


def _nbytes(tensor: LazyTensor) -> int:
    item_bytes: int = tensor.dtype.itemsize
    return math.prod(tensor.size) * item_bytes


def _tensors(source: HFSource) -> dict[str, LazyTensor]:
    """Return what a checkpoint of step 0 holds, by the names of state.py."""
    sizes = param_sizes(source.shape)
    tensors = {
        f"{MODEL}.{name}": LazyTensor(size, torch.float32, partial(source.read, name))
        for name, size in sizes.items()
    }
    if source.shape.tie_embeddings:  # as the trainer's own checkpoints have it
        tensors[f"{MODEL}.{HEAD}"] = tensors[f"{MODEL}.{EMBEDDING}"]
    rng = torch.Generator().manual_seed(0).get_state()
    tensors[f"{TRAINER}.{STEP}"] = LazyTensor((), torch.int64, lambda *_: torch.tensor(0))
    tensors[f"{TRAINER}.{RNG}"] = LazyTensor(
        tuple(rng.size()), rng.dtype, lambda start, stop: rng[start:stop]
    )
    return tensors


def _digests(directory: Path, on_read: Callable[[int], None]) -> Iterator[tuple[str, FileEntry]]:
    """Yield name and entry of every file; `on_read` hears of the bytes of data files."""
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            size_bytes = file.tell()
        on_read(size_bytes)
        yield path.name, FileEntry(size_bytes=size_bytes, sha256=digest.hexdigest())


def _manifest(run_id: str, shape: ModelShape, files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        run_id=run_id,
        epoch=0,
        step=0,
        consumed_samples=0,
        layout=str(ParallelLayout()),
        world_size=1,
        files=files,
        model=shape,
    )
