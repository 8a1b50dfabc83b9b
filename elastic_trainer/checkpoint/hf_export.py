"""A checkpoint, written by any layout -> Hugging Face safetensors, one file in memory at a time.

Only `model.*` is exported. Every byte of the checkpoint is digested first, the
optimizer's too: they share files. See hf_names.py for what is written.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from elastic_trainer.agent.boards.board import Commit
from elastic_trainer.checkpoint import hf_names
from elastic_trainer.checkpoint.errors import CheckpointError, DamagedError, InputError
from elastic_trainer.checkpoint.manifest import METADATA_NAME
from elastic_trainer.checkpoint.reader import CheckpointReader
from elastic_trainer.checkpoint.staging import (
    ByteCount,
    Progress,
    appearing,
    fsync,
    not_writable,
)
from elastic_trainer.checkpoint.state import MODEL
from elastic_trainer.checkpoint.storage import CheckpointStorage
from elastic_trainer.models import ModelShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export made."""

    files: tuple[str, ...]
    size_bytes: int
    """Of those files."""
    num_params: int


def export_hf(
    storage: CheckpointStorage,
    commit: Commit,
    shape: ModelShape,
    out_dir: Path,
    *,
    dtype: str = "float32",
    tokenizer: Path | None = None,
    context: int | None = None,
    max_file_bytes: int = hf_names.MAX_FILE_BYTES,
    on_progress: Progress = lambda *_: None,
) -> Exported:
    """Write `out_dir` with the parameters that `commit` names.

    Args:
        storage: where the checkpoint is.
        commit: names the directory and the manifest's sha256.
        shape: of the model that wrote it.
        out_dir: must not exist. It appears whole or not at all.
        dtype: float32, which is exact, or bfloat16, rounded to nearest even.
        tokenizer: a tokenizer.json to put beside the weights.
        context: config.json's max_position_embeddings, tokens; None: hf_names.context_of.
        max_file_bytes: largest file; one tensor may be larger. Bounds the memory.
        on_progress: hears of every file digested and every tensor copied.

    Raises:
        InputError: HF321, `out_dir` is there; HF323, the tokenizer cannot be read;
            HF327, the checkpoint is of another model.
        CheckpointError: HF320, the checkpoint is damaged; HF322, `out_dir` cannot
            be written.
    """
    sizes = hf_names.param_sizes(shape)
    num_params = sum(map(math.prod, sizes.values()))
    assert num_params == shape.num_params(), f"{num_params} parameters, {shape}"
    with appearing(out_dir, what="output directory", may_be_empty=False) as temp:
        if tokenizer is not None:
            _copy_tokenizer(tokenizer, temp)
        try:
            _write_weights(
                temp,
                storage,
                commit,
                sizes=sizes,
                dtype=DTYPES[dtype],
                max_file_bytes=max_file_bytes,
                on_progress=on_progress,
            )
        except DamagedError as error:
            raise CheckpointError(
                "HF320",
                f"{storage.root / commit.dir}: {error}: bring back what was saved, or export "
                "another checkpoint of the run",
            ) from error
        _write_json(temp / hf_names.CONFIG_NAME, hf_names.hf_config(shape, dtype, context))
        made = {path.name: path.stat().st_size for path in sorted(temp.iterdir())}
    return Exported(tuple(made), sum(made.values()), num_params)


class TensorReader:
    """Reads whole tensors, one at a time, out of what the ranks of any layout wrote."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._metadata: Metadata = reader.read_metadata()
        reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def check(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """See that the checkpoint holds these parameters and no others.

        Raises:
            InputError: HF327.
        """
        stored = {
            name.removeprefix(f"{MODEL}."): tuple(entry.size)
            for name, entry in self._metadata.state_dict_metadata.items()
            if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
        }
        if hf_names.HEAD not in sizes:  # tied: a copy of the embedding
            stored.pop(hf_names.HEAD, None)
        wrong = [
            f"{name}: {_size(stored.get(name))} in the checkpoint, {_size(sizes.get(name))} in "
            "the model's dimensions"
            for name in [*sizes, *(stored.keys() - sizes.keys())]
            if stored.get(name) != sizes.get(name)
        ]
        if wrong:
            more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
            raise InputError(
                "HF327",
                f"the checkpoint is of another model: {wrong[0]}{more}; give the dimensions that "
                "the run's job.json has",
            )

    def read(self, name: str, size: tuple[int, ...]) -> Tensor:
        """Return our parameter `name` as fp32.

        Raises:
            DamagedError: a file cannot be read any more.
        """
        full_name = f"{MODEL}.{name}"
        tensor = torch.empty(size, dtype=torch.float32)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({full_name: tensor}, self._metadata, is_coordinator=True)
        plan = planner.create_global_plan([planner.create_local_plan()])[0]
        try:
            self._reader.read_data(planner.finish_plan(plan), planner).wait()
        except OSError as error:
            raise DamagedError(f"{error.filename}: {error.strerror}") from error
        return tensor


def _write_weights(
    temp: Path,
    storage: CheckpointStorage,
    commit: Commit,
    *,
    sizes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_file_bytes: int,
    on_progress: Progress,
) -> None:
    """Verify the checkpoint and write the safetensors files, the index last."""
    sizes_bytes = {name: math.prod(size) * dtype.itemsize for name, size in sizes.items()}
    output_bytes = sum(sizes_bytes.values())
    manifest = storage.read_manifest(commit)
    checked_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    progress = ByteCount(on_progress, checked_bytes + output_bytes)
    if METADATA_NAME not in manifest.files:
        raise DamagedError(f"the manifest names no {METADATA_NAME}")
    # The index first: a wrong model shows before terabytes are digested.
    rest = [name for name in manifest.files if name != METADATA_NAME]
    storage.verify(commit.dir, manifest, [METADATA_NAME])
    path = storage.root / commit.dir
    reader = TensorReader(CheckpointReader(path, manifest.files[METADATA_NAME]))
    reader.check(sizes)
    progress.add(manifest.files[METADATA_NAME].size_bytes)
    for name in rest:
        storage.verify(commit.dir, manifest, [name])
        progress.add(manifest.files[name].size_bytes)
    groups = hf_names.pack(sizes_bytes, max_file_bytes)
    files = hf_names.file_names(len(groups))
    for file, names in zip(files, groups, strict=True):
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensor = reader.read(name, sizes[name]).to(dtype)
            tensors[hf_names.to_hf(name)] = tensor
            progress.add(tensor.nbytes)
        _write_file(temp / file, tensors)
    if len(files) > 1:
        theirs = [[hf_names.to_hf(name) for name in names] for names in groups]
        index = hf_names.index_of(zip(files, theirs, strict=True), output_bytes)
        _write_json(temp / hf_names.INDEX_NAME, index)


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write one file durably."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        number = re.search(r"os error ([0-9]+)", str(error))
        raise not_writable(path, str(error), int(number[1]) if number else None) from error
    # The library makes it for the owner alone; give it the mode of any new file here.
    path.chmod(path.parent.stat().st_mode & 0o666)
    fsync(path)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _copy_tokenizer(source: Path, temp: Path) -> None:
    try:
        shutil.copyfile(source, temp / hf_names.TOKENIZER_NAME)
    except OSError as error:
        if error.filename != str(source):
            raise
        raise InputError(
            "HF323",
            f"the tokenizer {source} cannot be read ({error.strerror}): name a tokenizer.json, "
            "or leave it out",
        ) from error


def _size(size: tuple[int, ...] | None) -> str:
    return "absent" if size is None else str(list(size))
