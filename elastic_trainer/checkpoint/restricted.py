"""Pickles of checkpoints, read into torch's classes: only after their digest, only known ones."""

from __future__ import annotations

import importlib
import io
import pickle
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from elastic_trainer.checkpoint.archive import UnusualError
from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.index import IndexUnpickler
from elastic_trainer.checkpoint.manifest import METADATA_NAME


def read_index(raw: bytes) -> Metadata:
    """Read DCP's `.metadata`, whose digest has been found right.

    Raises:
        DamagedError: it holds something else.
        pickle.UnpicklingError: it asks for a class that has no place there.
    """
    metadata = IndexUnpickler(raw, _of_torch).load()
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"{METADATA_NAME} holds a {type(metadata).__name__}, not Metadata")
    return metadata


def _of_torch(module_name: str, global_name: str) -> Any:
    return getattr(importlib.import_module(module_name), global_name)


_STORAGES: Final = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
"""Classes by which torch.save names dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What torch.save wrote about one plain CPU tensor; numbers in elements."""

    dtype: torch.dtype
    storage: str
    """Key of its storage in the archive."""
    storage_numel: int
    offset: int
    """Of its first element in the storage."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class _Rebuilt(NamedTuple):
    """Stands for torch._utils._rebuild_tensor_v2: its arguments, and nothing is called."""

    storage: Any
    offset: Any
    sizes: Any
    strides: Any
    requires_grad: Any
    hooks: Any


class _HeaderUnpickler(pickle.Unpickler):
    """Reads the pickle of one plain tensor without making it; anything else is an error."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return what stands for a global of torch.save's."""
        if (module_name, global_name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Rebuilt
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict
        if module_name == "torch" and global_name in _STORAGES:
            return _STORAGES[global_name]
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is of no plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        """Return the description of a storage as it is."""
        return pid


def tensor_header(raw: bytes) -> TensorHeader:
    """Read `data.pkl` of an archive whose file's digest has been found right.

    Raises:
        UnusualError: it is not of one plain tensor on the CPU.
    """
    try:
        found = _HeaderUnpickler(io.BytesIO(raw)).load()
    except Exception as error:  # a pickle can fail with nearly any
        raise UnusualError(str(error)) from error
    match found:
        case _Rebuilt(
            storage=("storage", torch.dtype() as dtype, str() as key, "cpu", int() as numel),
            offset=int() as offset,
            sizes=tuple() as sizes,
            strides=tuple() as strides,
            requires_grad=False,
            hooks=dict(),
        ) if (
            not found.hooks
            and len(sizes) == len(strides)
            and _natural(numel, offset, *sizes, *strides)
        ):
            return TensorHeader(
                dtype=dtype,
                storage=key,
                storage_numel=numel,
                offset=offset,
                sizes=sizes,
                strides=strides,
            )
    raise UnusualError(f"a {type(found).__name__} that is no plain tensor")


def _natural(*numbers: object) -> bool:
    """Return whether all are whole numbers and not negative."""
    return all(type(number) is int and number >= 0 for number in numbers)
