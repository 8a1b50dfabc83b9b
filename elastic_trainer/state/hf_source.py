"""A directory in Hugging Face's format: checked, and read tensor by tensor.

Source of the format: https://huggingface.co/docs/safetensors (header with name, dtype, size and
offsets of every tensor; opening checks that they cover the file) and transformers'
`model.safetensors.index.json` for several files.

torch's HuggingFaceStorageReader reads headers and values. It ignores the index (it opens every
.safetensors in the directory), does not know which model the files must hold, and names no file in
errors.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, StorageReader
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from elastic_trainer.model.decoder import build
from elastic_trainer.plan.hf_config import ConfigError, parse_hf_config
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.state.errors import InputError
from elastic_trainer.state.hf_names import (
    CONFIG_NAME,
    EMBEDDING,
    HEAD,
    INDEX_NAME,
    SINGLE_NAME,
    is_derived,
    to_hf,
)
from elastic_trainer.storage.files import open_regular, read_regular
from elastic_trainer.storage.typed import parse_json

DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
"""That become fp32 without loss."""
_PIECE_BYTES = 256 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The format's limit (huggingface.co/docs/safetensors)."""


class TensorSource:
    """Reads rows of single tensors through one of DCP's readers."""

    def __init__(self, reader: StorageReader, metadata: Metadata) -> None:
        self._reader, self._metadata = reader, metadata
        reader.set_up_storage_reader(metadata, is_coordinator=True)

    def read(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return rows `start` to `stop` of tensor `name` as `dtype`.

        Raises:
            OSError: a file cannot be read any more.
        """
        entry = self._metadata.state_dict_metadata[name]
        sizes = torch.Size([stop - start, *entry.size[1:]] if entry.size else [])
        offsets = torch.Size([start, *(0 for _ in entry.size[1:])] if entry.size else [])
        target = torch.empty(sizes, dtype=dtype)
        chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        items = create_read_items_for_chunk_list(name, entry, [chunk])
        self._reader.read_data(LoadPlan(items), _Into(target)).wait()
        return target


class _Into(DefaultLoadPlanner):
    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, _: MetadataIndex) -> Tensor:
        return self._target


class _OneFile(FileSystem):
    """A directory in which HuggingFaceStorageReader sees one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def ls(self, _: object) -> list[str]:
        return [str(self._path)]


class HFSource:
    """A model in Hugging Face's format, checked but for the values.

    `sizes` has our parameters by name, in the order of the layers, without the head where it is
    tied; `dtypes` what they are read as.

    Raises:
        InputError: HF021, HF022, HF023, the config; HF323, files are missing or cannot be read;
            HF324, a file is damaged; HF325, a tensor is missing, unknown or of another size; HF326,
            of another dtype.
    """

    def __init__(self, directory: Path) -> None:
        self._dir = directory
        self.shape = self._read_config()
        model = build(self.shape)
        self.sizes = {name: tuple(param.shape) for name, param in model.named_parameters()}
        self.dtypes = dict.fromkeys(self.sizes, torch.float32)
        self._theirs = {name: to_hf(name, model.hf_names) for name in (*self.sizes, HEAD)}
        self._file_of: dict[str, Path] = {}
        """By Hugging Face's tensor name."""
        self._metadata = self._read_headers()
        found = dict(self._metadata.state_dict_metadata)
        tied_head = found.pop(self._theirs[HEAD], None) if self.shape.tie_embeddings else None
        self._check(found)
        self._source = TensorSource(HuggingFaceStorageReader(str(directory)), self._metadata)
        if tied_head is not None:
            self._check_tied(tied_head)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of our parameter `name`, as fp32; nothing else is read.

        Raises:
            InputError: HF323, HF324, the file changed since it was checked.
        """
        return self._rows(self._theirs[name], start, stop)

    def _rows(self, theirs: str, start: int, stop: int) -> Tensor:
        with self._opened(self._file_of[theirs]):
            return self._source.read(theirs, start, stop, torch.float32)

    @contextmanager
    def _opened(self, path: Path) -> Iterator[None]:
        """Name the file in errors; a header may say anything, such as unknown dtypes."""
        try:
            yield
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                "HF324",
                f"{path} is damaged or no safetensors file ({error}): download or copy it again "
                "and compare its sha256 with the one published",
            ) from error
        except OSError as error:
            raise self._unreadable(path.name, error) from error

    def _unreadable(self, name: str, error: OSError) -> InputError:
        return InputError(
            "HF323",
            f"{self._dir / name} cannot be read ({error.strerror or error}): bring the file "
            "there, or grant the permission",
        )

    def _read_text(self, name: str) -> str:
        path = self._dir / name
        try:
            return read_regular(path).decode()
        except OSError as error:
            raise self._unreadable(name, error) from error
        except UnicodeDecodeError as error:
            raise InputError("HF323", f"{path} is not UTF-8 text: download it again") from error

    def _read_config(self) -> ModelShape:
        try:
            shape = parse_hf_config(self._read_text(CONFIG_NAME))
        except ConfigError as error:
            raise InputError(error.code, f"{self._dir / CONFIG_NAME}: {error}") from error
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        if heads % kv_heads or shape.head_size % 2 or not shape.head_size:
            raise InputError(
                "HF023",
                f"{self._dir / CONFIG_NAME}: num_attention_heads {heads} must be a multiple of "
                f"num_key_value_heads {kv_heads}, and the head size {shape.head_size} even and "
                "above 0: fix the config",
            )
        return shape

    def _read_headers(self) -> Metadata:
        if (self._dir / SINGLE_NAME).exists():
            return self._read_header(SINGLE_NAME)
        if not (self._dir / INDEX_NAME).exists():
            raise InputError(
                "HF323",
                f"{self._dir} has neither {SINGLE_NAME} nor {INDEX_NAME}: name the directory "
                "that has them. Pickled weights (.bin, .pt) are not read: load them in "
                "transformers and save_pretrained them",
            )
        weight_map = self._read_index()
        found = Metadata({}, storage_data={})
        for file in sorted(set(weight_map.values())):
            part = self._read_header(file)
            for name in part.state_dict_metadata:
                if weight_map.get(name) != file:
                    place = weight_map.get(name, "no file")
                    raise InputError(
                        "HF325",
                        f"{self._dir / file} holds {name}, which {INDEX_NAME} places in {place}: "
                        "the files are not of one model; download them all again",
                    )
            found.state_dict_metadata.update(part.state_dict_metadata)
            found.storage_data.update(part.storage_data)
        if lost := sorted(weight_map.keys() - found.state_dict_metadata.keys()):
            raise InputError(
                "HF325",
                f"{self._dir / weight_map[lost[0]]} lacks {_some(lost)}, which {INDEX_NAME} "
                "places there: download it again",
            )
        return found

    def _read_header(self, name: str) -> Metadata:
        path = self._dir / name
        reader = HuggingFaceStorageReader(str(self._dir))
        reader.fs = _OneFile(path)
        with self._opened(path):
            with open_regular(path) as file:
                (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
            if not 0 < length <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            metadata = reader.read_metadata()
        self._file_of.update(dict.fromkeys(metadata.state_dict_metadata, path))
        return metadata

    def _read_index(self) -> dict[str, str]:
        """Return Hugging Face's tensor name -> file name."""
        path = self._dir / INDEX_NAME
        try:
            raw = parse_json(self._read_text(INDEX_NAME))
        except ValueError as error:
            raise InputError("HF324", f"{path} is not JSON ({error}): download it again") from error
        weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError("HF324", f"{path} has no weight_map: download it again")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
                raise InputError(
                    "HF324",
                    f"{path} places {name} in {file!r}, not a plain file name: fix the index",
                )
        return weight_map

    def _check(self, found: Mapping[str, TensorStorageMetadata]) -> None:
        expected = {self._theirs[name]: size for name, size in self.sizes.items()}
        extra = [key for key in found if key not in expected and not is_derived(key)]
        if missing := [theirs for theirs in expected if theirs not in found]:
            # Beside another head, as a classifier's, it is not the embedding.
            tied = missing == [self._theirs[HEAD]] and not extra
            raise InputError(
                "HF325",
                f"{self._dir} lacks {_some(missing)}: "
                + (
                    "if the model ties its embeddings, set tie_word_embeddings: true in "
                    f"{CONFIG_NAME}"
                    if tied
                    else f"bring all files of the model, and the {CONFIG_NAME} that belongs to them"
                ),
            )
        if extra:
            raise InputError(
                "HF325",
                f"{self._dir} holds {_some(extra)}, for which a {self.shape.family} of "
                f"{CONFIG_NAME}'s dimensions has no place: use the config that belongs to the "
                "files, or a plain checkpoint (adapters merged, not quantized)",
            )
        for theirs, size in expected.items():
            self._check_entry(theirs, found[theirs], size)

    def _check_entry(
        self, theirs: str, entry: TensorStorageMetadata, size: tuple[int, ...]
    ) -> None:
        where = f"{self._file_of[theirs]}: {theirs}"
        if tuple(entry.size) != size:
            raise InputError(
                "HF325",
                f"{where} has size {list(entry.size)}, {CONFIG_NAME} makes it {list(size)}: use "
                "the config that belongs to the files",
            )
        if entry.properties.dtype not in DTYPES:
            raise InputError(
                "HF326",
                f"{where} is {_text(entry.properties.dtype)}; read are "
                f"{', '.join(map(_text, DTYPES))}: convert it with "
                "transformers, or use the published weights before quantization",
            )

    def _check_tied(self, head: TensorStorageMetadata) -> None:
        """Refuse a head that differs from the embedding where config.json ties them."""
        size, theirs = self.sizes[EMBEDDING], self._theirs[HEAD]
        self._check_entry(theirs, head, size)
        rows = max(1, _PIECE_BYTES // (4 * self.shape.dim))
        for start in range(0, size[0], rows):
            stop = min(start + rows, size[0])
            if not torch.equal(self._rows(theirs, start, stop), self.read(EMBEDDING, start, stop)):
                raise InputError(
                    "HF325",
                    f"{self._file_of[theirs]}: {theirs} differs from the embedding, while "
                    f"{CONFIG_NAME} ties the two: set tie_word_embeddings: false to keep both, or "
                    "remove it from the file",
                )


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
