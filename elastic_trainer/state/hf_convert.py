"""Checkpoints <-> Hugging Face safetensors: one copy, from a DCP reader to a DCP writer.

An export reads a checkpoint of any layout and writes by HuggingFaceStorageWriter, one file in
memory at a time. An import reads by HuggingFaceStorageReader (hf_source.py) and makes a run whose
board has one commit, of step 0: DCP data files with `.metadata`, one file a chunk of rows, and a
manifest with their digests. Its parameters are fp32; the first step makes the optimizer's state.

`dcp.load` and `dcp.save` hold a whole state dict. Here each tensor is read when it is written.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from elastic_trainer.board.file_board import FileBoard
from elastic_trainer.board.state import Commit, update
from elastic_trainer.model.adapters import adapter_config, file_name
from elastic_trainer.model.decoder import Decoder, build
from elastic_trainer.model.transformers_model import TransformersModel
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import Lora, ModelShape, Plugin, Transformers
from elastic_trainer.state import hf_names
from elastic_trainer.state.adapter_state import trained_names
from elastic_trainer.state.errors import CheckpointError, DamagedError, InputError
from elastic_trainer.state.hf_source import HFSource, TensorSource
from elastic_trainer.state.manifest import METADATA_NAME, Manifest, with_commit
from elastic_trainer.state.reader import CheckpointReader
from elastic_trainer.state.save import Writer
from elastic_trainer.state.state import MODEL, RNG, STEP, TRAINER
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.state.transformers_files import Conversion, TransformersSource
from elastic_trainer.storage import model_files
from elastic_trainer.storage.files import fsync
from elastic_trainer.storage.model_files import (
    kept_files,
    read_mapping,
    read_tokenizer,
    special_ids,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MAX_CHUNK_BYTES = 512 << 20
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""

_STORAGE_ERRORS = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there or raise the quota",
    errno.EFBIG: "raise the limit on the size of files",
    errno.EROFS: "mount it writable",
    errno.EACCES: "grant the permission",
    errno.EPERM: "grant the permission",
}


class Exported(NamedTuple):
    """The files of an export."""

    files: tuple[str, ...]
    size_bytes: int
    num_params: int


class Imported(NamedTuple):
    """An imported checkpoint."""

    commit: Commit
    shape: ModelShape
    files: tuple[str, ...]
    """In the checkpoint's directory, without the manifest."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read when it is written: `read(start, stop)` returns rows of dim 0."""

    size: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        item_bytes: int = self.dtype.itemsize
        return math.prod(self.size) * item_bytes


def export_hf(
    storage: CheckpointStorage,
    commit: Commit,
    shape: ModelShape,
    out_dir: Path,
    *,
    dtype: str = "float32",
    tokenizer: Path | None = None,
    beside: Path | None = None,
    context: int | None = None,
    code: str | None = None,
    max_file_bytes: int = hf_names.MAX_FILE_BYTES,
    on_progress: Progress = lambda *_: None,
) -> Exported:
    """Write `out_dir` with the parameters that `commit` names.

    Every byte of the checkpoint is digested first, the optimizer's too: they share files. `out_dir`
    must not exist; it appears whole or not at all.

    `dtype` is float32, which is exact, or bfloat16, rounded to nearest even. `tokenizer` is the
    tokenizer.json that the model was trained with: it goes along with what lies beside it. `beside`
    is a folder with what an import kept: the tokenizer where no other was used, how texts are
    generated, and the ids of special tokens. `context` is config.json's max_position_embeddings,
    tokens, unless the imported one is larger; None: hf_names.context_of. `code` is the folder of a
    job's own decoder. `max_file_bytes`, unless one tensor is larger, bounds the memory to
    twice that: the writer holds a file's tensors and their serialized form.

    Raises:
        InputError: HF321, `out_dir` exists; HF323, a file to go along cannot be read; HF327, the
            checkpoint is of another model; HF328, a job's own decoder lacks its name in
            transformers.
        ModelError: that decoder cannot be used.
        CheckpointError: HF320, the checkpoint is damaged; HF322, `out_dir` cannot be written.
    """
    form = (
        _own_form(shape) if isinstance(shape, Transformers) else _form_of(build(shape, code), shape)
    )
    with _appearing(out_dir, what="output directory", may_be_empty=False) as temp:
        special, context = _accompany(temp, tokenizer, beside, context)
        try:
            _export_weights(
                temp,
                storage,
                commit,
                form=form,
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
        text = json.dumps(form.config(dtype, special, context), indent=2) + "\n"
        (temp / form.config_name).write_text(text, encoding="utf-8")
        made = {path.name: path.stat().st_size for path in sorted(temp.iterdir())}
    return Exported(tuple(made), sum(made.values()), form.num_params)


def import_hf(
    source_dir: Path,
    run_dir: Path,
    *,
    run_id: str,
    shape: Transformers | None = None,
    on_progress: Progress = lambda *_: None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
) -> Imported:
    """Make `run_dir` with the weights of `source_dir` as its checkpoint of step 0.

    `run_dir` is new or empty; it appears whole or not at all. Its folder `hf` has the source's
    config.json, tokenizer and what else exports take along. `shape`: of transformers' own class,
    whose names and tensors they become; None: of the family that config.json names.
    `max_chunk_bytes` bounds the memory; a row is never split, nor what transformers makes of
    several tensors.

    Raises:
        InputError: the source cannot be used (see HFSource); HF321, `run_dir` is not empty.
        ModelError: transformers' class cannot be built.
        CheckpointError: HF322, `run_dir` cannot be written.
    """
    source = HFSource(source_dir) if shape is None else TransformersSource(source_dir, shape)
    with _appearing(run_dir, what="run directory", may_be_empty=True) as temp:
        storage = CheckpointStorage(temp / "checkpoints")
        storage.root.mkdir()
        name = storage.make(step=0, epoch=0)
        tensors = _first_state(source)
        # Every byte is written once and read once more for its digest.
        num_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        progress = _ByteCount(on_progress, 2 * num_bytes)
        writer = Writer(storage.root / name, single_file_per_rank=False)
        _write_tensors(writer, tensors, progress.add, max_chunk_bytes)
        manifest = Manifest(
            run_id=run_id,
            epoch=0,
            step=0,
            consumed_samples=0,
            layout=str(ParallelLayout()),
            world_size=1,
            files=storage.digest(name, rank=0, on_read=progress.add),
            model=source.shape,
        )
        digest = storage.write_manifest(name, manifest)
        commit = Commit(epoch=0, step=0, dir=name, manifest_sha256=digest)
        update(FileBoard(temp / "board"), lambda state: with_commit(state, commit, keep=1))
        (temp / model_files.KEPT).mkdir()
        kept = {model_files.CONFIG: source_dir / model_files.CONFIG, **kept_files(source_dir)}
        _copy(kept, temp / model_files.KEPT)
    size_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    return Imported(commit, source.shape, tuple(manifest.files), size_bytes)


# --- the copy ------------------------------------------------------------------------------------


def _write_tensors(
    writer: FileSystemWriter,
    tensors: Mapping[str, LazyTensor],
    on_written: Callable[[int], None],
    max_chunk_bytes: int | None,
) -> None:
    """Write `tensors`, by full name, as one rank by `writer` into its empty directory.

    These are the steps of `dcp.save(no_dist=True)`, which would wrap every error, an interrupt
    included. `max_chunk_bytes` None: a tensor is one chunk.
    """
    planner = _LazyPlanner(tensors, on_written, max_chunk_bytes)
    planner.set_up_planner({}, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


class _LazyPlanner(DefaultSavePlanner):
    """Plans chunks of tensors that are not read yet, and reads each when it is written."""

    def __init__(
        self,
        tensors: Mapping[str, LazyTensor],
        on_written: Callable[[int], None],
        max_chunk_bytes: int | None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._tensors, self._on_written = tensors, on_written
        self._max_chunk_bytes = max_chunk_bytes

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                item
                for name, tensor in self._tensors.items()
                for item in _write_items(name, tensor, self._max_chunk_bytes or tensor.num_bytes)
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
    rows = max(1, max_chunk_bytes * num_rows // tensor.num_bytes)
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


# --- the two sides -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a model is exported."""

    sizes: Mapping[str, tuple[int, ...]]
    """What a checkpoint of it holds, by our names."""
    tensors: Callable[[Callable[[str, torch.dtype, int, int], Tensor], torch.dtype], Tensors]
    """Called with what reads rows of ours, and the dtype of the files; returns what they hold."""
    config: Callable[[str, Mapping[str, Any], int | None], dict[str, Any]]
    """(dtype, ids of special tokens, context in tokens) -> the content of `config_name`."""
    num_params: int
    config_name: str = hf_names.CONFIG_NAME
    single_name: str = hf_names.SINGLE_NAME
    """Of the weights, where they are one file."""


Tensors = dict[str, LazyTensor]


def _form_of(model: Decoder, shape: ModelShape) -> Form:
    """Return how a decoder is exported: each parameter under Hugging Face's name.

    Raises:
        InputError: HF328.
    """
    if isinstance(shape, Plugin) and model.hf_config is None:
        raise InputError(
            "HF328",
            f"{shape.decoder} has no hf_config, so nothing could load an export: add the class "
            "attribute, with architectures and model_type, or read the checkpoint with DCP",
        )
    sizes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    try:
        names = {name: hf_names.to_hf(name, model.hf_names) for name in sizes}
    except KeyError as error:
        raise InputError(
            "HF328", f"{shape.decoder} has no name for {error} in hf_names: add it"
        ) from error
    return Form(
        sizes=sizes,
        tensors=lambda read, dtype: {
            names[name]: LazyTensor(size, dtype, partial(read, name, dtype))
            for name, size in sizes.items()
        },
        config=lambda dtype, special, context: hf_names.hf_config(
            shape, dtype, context, {**special, **(model.hf_config or {})}
        ),
        num_params=sum(map(math.prod, sizes.values())),
    )


def _own_form(shape: Transformers) -> Form:
    """Return how transformers' own class is exported: as its save_pretrained does."""
    model = TransformersModel(shape).theirs
    if shape.lora is not None:
        return _adapter_form(model, shape.lora)
    state = model.state_dict()
    kept = {name: each for name, each in state.items() if name not in model.all_tied_weights_keys}

    def tensors(
        read: Callable[[str, torch.dtype, int, int], Tensor], dtype: torch.dtype
    ) -> dict[str, LazyTensor]:
        given = {
            name: each.to("meta", dtype if each.is_floating_point() else each.dtype)
            for name, each in kept.items()
        }

        def load(name: str) -> Tensor:
            like = given[name]
            return read(name, like.dtype, 0, len(like) if like.ndim else 1)

        files = Conversion(model, given, load, saving=True)

        def rows(name: str, start: int, stop: int) -> Tensor:
            made = files.read(name)
            return made[start:stop] if made.ndim else made

        return {
            name: LazyTensor(tuple(each.shape), each.dtype, partial(rows, name))
            for name, each in files.made.items()
        }

    raw = json.loads(shape.config)
    return Form(
        sizes={name: tuple(each.shape) for name, each in state.items()},
        tensors=tensors,
        config=lambda dtype, special, _context: {
            **raw,
            **special,
            "architectures": [type(model).__name__],
            "dtype": dtype,
        },
        num_params=sum(param.numel() for param in model.parameters()),
    )


def _adapter_form(model: nn.Module, lora: Lora) -> Form:
    """Return how adapters are exported: as peft's save_pretrained does."""
    state, config = model.state_dict(), adapter_config(lora).to_dict()
    sizes = {name: tuple(state[name].shape) for name in sorted(trained_names(model))}
    given = {**config, "target_modules": list(lora.targets), "inference_mode": True}
    return Form(
        sizes=sizes,
        tensors=lambda read, dtype: {
            file_name(name): LazyTensor(size, dtype, partial(read, name, dtype))
            for name, size in sizes.items()
        },
        config=lambda _dtype, _special, _context: given,
        num_params=lora.params,
        config_name="adapter_config.json",
        single_name="adapter_model.safetensors",
    )


def _export_weights(
    temp: Path,
    storage: CheckpointStorage,
    commit: Commit,
    *,
    form: Form,
    dtype: torch.dtype,
    max_file_bytes: int,
    on_progress: Progress,
) -> None:
    """Verify the checkpoint and write the safetensors files, the index last."""
    manifest = storage.read_manifest(commit)
    if METADATA_NAME not in manifest.files:
        raise DamagedError(f"the manifest names no {METADATA_NAME}")
    # The index first: a wrong model shows before terabytes are digested.
    storage.verify(commit.dir, manifest, [METADATA_NAME])
    reader = CheckpointReader(storage.root / commit.dir, manifest.files[METADATA_NAME])
    metadata = reader.read_metadata()
    _check_model(metadata, form.sizes)
    source = TensorSource(reader, metadata)
    tensors = form.tensors(partial(_read_stored, source), dtype)
    sizes_bytes = {name: tensor.num_bytes for name, tensor in tensors.items()}
    checked_bytes = sum(entry.size_bytes for entry in manifest.files.values())
    progress = _ByteCount(on_progress, checked_bytes + sum(sizes_bytes.values()))
    for name, entry in manifest.files.items():
        storage.verify(commit.dir, manifest, [name])
        progress.add(entry.size_bytes)
    file_of = hf_names.pack(sizes_bytes, max_file_bytes)
    writer = HuggingFaceStorageWriter(str(temp), fqn_to_index_mapping=file_of)
    _write_tensors(writer, tensors, progress.add, max_chunk_bytes=None)
    for file in temp.glob("*.safetensors"):
        _drop_dcp_metadata(file)
    if max(file_of.values()) == 1:  # transformers has another name and no index for one file
        (temp / hf_names.INDEX_NAME).unlink()
        (only,) = temp.glob("model-*.safetensors")
        only.rename(temp / form.single_name)


def _drop_dcp_metadata(path: Path) -> None:
    """Leave only transformers' own key in a file's metadata.

    DCP's keys say how a tensor is sharded, here that it is not; and safetensors writes several keys
    in a random order, so equal exports differed.
    """
    with path.open("r+b") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        header["__metadata__"] = {"format": "pt"}
        file.seek(8)
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        file.write(text.encode().ljust(length))  # spaces at the end are part of the format


def _read_stored(
    source: TensorSource, name: str, dtype: torch.dtype, start: int, stop: int
) -> Tensor:
    try:
        return source.read(f"{MODEL}.{name}", start, stop, dtype)
    except OSError as error:
        raise DamagedError(f"{error.filename}: {error.strerror}") from error


def _check_model(metadata: Metadata, sizes: Mapping[str, tuple[int, ...]]) -> None:
    stored = {
        name.removeprefix(f"{MODEL}."): tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
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


def _size(size: tuple[int, ...] | None) -> str:
    return "absent" if size is None else str(list(size))


def _first_state(source: HFSource) -> dict[str, LazyTensor]:
    """Return the tensors of a checkpoint of step 0, by the names of state.py."""
    tensors = {
        f"{MODEL}.{name}": LazyTensor(size, source.dtypes[name], partial(source.read, name))
        for name, size in source.sizes.items()
    }
    if (
        source.shape.tie_embeddings and hf_names.EMBEDDING in source.sizes
    ):  # as the trainer's own checkpoints have it
        tensors[f"{MODEL}.{hf_names.HEAD}"] = tensors[f"{MODEL}.{hf_names.EMBEDDING}"]
    rng = torch.Generator().manual_seed(0).get_state()
    tensors[f"{TRAINER}.{STEP}"] = LazyTensor((), torch.int64, lambda *_: torch.tensor(0))
    tensors[f"{TRAINER}.{RNG}"] = LazyTensor(
        tuple(rng.size()), rng.dtype, lambda start, stop: rng[start:stop]
    )
    return tensors


def _accompany(
    out: Path, tokenizer: Path | None, beside: Path | None, context: int | None
) -> tuple[dict[str, Any], int | None]:
    """Copy what goes along with an export's weights; `export_hf` has the arguments.

    Returns:
        config.json's ids of special tokens, as far as they are known, and its context.
    """
    files = {} if beside is None else kept_files(beside)
    config, special = {}, dict[str, Any]()
    try:
        if beside is not None:
            config = read_mapping(beside / model_files.CONFIG)
            special = special_ids(config)
        if tokenizer is not None:
            theirs = files.get(model_files.TOKENIZER)
            if theirs is None or theirs.read_bytes() != tokenizer.read_bytes():
                # Another one: what is left of the model is how texts are generated.
                files = {name: files[name] for name in files.keys() & {model_files.GENERATION}}
                special |= _ids_of(tokenizer)
            own = kept_files(tokenizer.parent)
            files |= {name: own[name] for name in own.keys() & set(model_files.TOKENIZER_FILES)}
            files[model_files.TOKENIZER] = tokenizer
    except OSError as error:
        raise InputError("HF323", f"{error.filename} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise InputError("HF323", f"{error}: import the model again") from error
    _copy(files, out)
    known = config.get("max_position_embeddings")
    return special, max(known, context or 0) if isinstance(known, int) else context


def _ids_of(tokenizer: Path) -> dict[str, int]:
    """Return config.json's ids of special tokens by a tokenizer; none of one that is of no use."""
    try:
        return {f"{role}_id": number for role, number in read_tokenizer(tokenizer).roles.items()}
    except ValueError:
        return {}


def _copy(files: Mapping[str, Path], folder: Path) -> None:
    for name, source in files.items():
        try:
            shutil.copyfile(source, folder / name)
        except OSError as error:
            if error.filename != str(source):
                raise
            raise InputError(
                "HF323",
                f"{source} cannot be read ({error.strerror}): bring it there, or grant the "
                "permission",
            ) from error


# --- a target that appears whole -----------------------------------------------------------------


class _ByteCount:
    """Adds up bytes and reports at most the total: files have headers besides."""

    def __init__(self, report: Progress, total_bytes: int) -> None:
        self._report, self._total_bytes, self._done_bytes = report, total_bytes, 0

    def add(self, size_bytes: int) -> None:
        self._done_bytes = min(self._total_bytes, self._done_bytes + size_bytes)
        self._report(self._done_bytes, self._total_bytes)


@contextmanager
def _appearing(target: Path, *, what: str, may_be_empty: bool) -> Iterator[Path]:
    """Yield a directory to fill beside `target`; at the end it becomes `target`, fsynced.

    When the body raises, it is removed. A killed process leaves a directory `.NAME.partial-...`,
    which nothing reads. `what` names `target` in messages.

    Raises:
        InputError: HF321, `target` exists.
        CheckpointError: HF322, it cannot be written.
    """
    target = target.absolute()
    _refuse_existing(target, what, may_be_empty=may_be_empty)
    temp = target.parent / f".{target.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temp.mkdir()
        yield temp
        for directory, _, files in os.walk(temp):  # follows no link
            for file in files:
                fsync(Path(directory, file))
            fsync(Path(directory))
        _refuse_existing(target, what, may_be_empty=may_be_empty)  # made meanwhile
        temp.rename(target)
        fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(temp, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _STORAGE_ERRORS:
            raise CheckpointError(
                "HF322",
                f"{target} cannot be written ({error.strerror or error}): "
                f"{_STORAGE_ERRORS[error.errno]}, or choose another place",
            ) from error
        raise


def _refuse_existing(target: Path, what: str, *, may_be_empty: bool) -> None:
    if not os.path.lexists(target):
        return
    if may_be_empty and target.is_dir() and not any(target.iterdir()):
        return
    state = "is not an empty directory" if may_be_empty else "is there already"
    raise InputError("HF321", f"{what}: {target} {state}: name a new one; nothing was changed")
