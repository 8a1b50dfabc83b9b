"""Reads DCP's `.metadata`, a pickle, only after its digest and only into known classes."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.manifest import METADATA_NAME, FileEntry

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    {
        *(
            (_METADATA_MODULE, name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "BytesStorageMetadata",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("builtins", "set"),
    }
)


class RestrictedUnpickler(pickle.Unpickler):
    """Resolves DCP's metadata classes, torch.Size, dtypes and layouts; nothing else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return an allowed global.

        Raises:
            pickle.UnpicklingError: the pickle asks for anything else.
        """
        if (module_name, global_name) in _ALLOWED:
            return super().find_class(module_name, global_name)
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        raise pickle.UnpicklingError(
            f"{module_name}.{global_name} has no place in a checkpoint's {METADATA_NAME}"
        )


class CheckpointReader(FileSystemReader):  # type: ignore[misc]  # torch is not followed by mypy
    """DCP's reader of one directory, for a `.metadata` with a known digest."""

    def __init__(self, path: Path, metadata: FileEntry) -> None:
        super().__init__(path)
        self._expected = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index of the data files.

        The digest is taken of the very bytes that are unpickled, since another
        rank's view of a shared file system may differ.

        Raises:
            DamagedError: the bytes are not those that were saved.
        """
        raw = Path(self.path, METADATA_NAME).read_bytes()
        if hashlib.sha256(raw).hexdigest() != self._expected.sha256:
            raise DamagedError(f"{METADATA_NAME} has another sha256 than the manifest says")
        metadata = RestrictedUnpickler(io.BytesIO(raw)).load()
        if not isinstance(metadata, Metadata):
            raise DamagedError(f"{METADATA_NAME} holds a {type(metadata).__name__}, not Metadata")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Return one entry's bytes; torch.load is several times faster on them than on a view."""
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))
