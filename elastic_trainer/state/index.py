"""DCP's `.metadata`, which names every part of a checkpoint: its allowed globals. Without torch.

It is a pickle. Only the globals listed here are resolved: by `reader` to torch's own classes, and
by `check_index` to placeholders, so verifying a checkpoint without torch finds what a restore would
stumble over.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, Self

from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.manifest import METADATA_NAME, FileEntry

_METADATA_MODULE: Final = "torch.distributed.checkpoint.metadata"
_METADATA: Final = (_METADATA_MODULE, "Metadata")
_STORAGE_INFO: Final = ("torch.distributed.checkpoint.filesystem", "_StorageInfo")
_MEMORY_FORMAT: Final = (_METADATA_MODULE, "_MEM_FORMAT_ENCODING")
_GETATTR: Final = ("builtins", "getattr")
_PLAIN: Final = {("collections", "OrderedDict"): OrderedDict, ("builtins", "set"): set}
_ALLOWED: Final = frozenset(
    {
        *_PLAIN,
        *(
            (_METADATA_MODULE, name)
            for name in (
                "MetadataIndex",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "BytesStorageMetadata",
                "StorageMeta",
            )
        ),
        _METADATA,
        _MEMORY_FORMAT,
        _STORAGE_INFO,
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
    }
)
_DTYPES: Final = frozenset(
    {
        "bool",
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    }
)
"""Of `torch`, that tensors are saved in."""


class IndexUnpickler(pickle.Unpickler):
    """Resolves DCP's metadata classes, torch.Size, dtypes and layouts; nothing else.

    `resolve`: module and name of an allowed global -> its stand-in.
    """

    def __init__(self, raw: bytes, resolve: Callable[[str, str], Any]) -> None:
        super().__init__(io.BytesIO(raw))
        self._resolve = resolve

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the stand-in of an allowed global.

        Raises:
            pickle.UnpicklingError: the pickle asks for anything else.
        """
        asked = (module_name, global_name)
        if asked == _GETATTR:
            return self._member
        if asked in _ALLOWED or (module_name == "torch" and global_name in _DTYPES):
            return self._resolve(module_name, global_name)
        raise _no_place(*asked)

    def _member(self, owner: object, name: str) -> Any:
        """Return a member of the one allowed enumeration, in place of `getattr`.

        Python 3.11.2 pickles a member as getattr(class, name), others as class(value).
        """
        enumeration: type[Enum] = self._resolve(*_MEMORY_FORMAT)
        if owner is enumeration and isinstance(name, str) and name in enumeration.__members__:
            return enumeration[name]
        raise _no_place(*_GETATTR)


def check_index(raw: bytes, files: Mapping[str, FileEntry]) -> None:
    """Read `.metadata`, whose digest is right, as a restore does, without torch.

    Raises:
        DamagedError: a restore would fail: it cannot be read, or a part is not in `files`.
    """
    try:
        index = IndexUnpickler(raw, _stand_in).load()
        parts = None
        if isinstance(index, _Metadata):
            parts = [
                (str(part["relative_path"]), part["offset"] + part["length"])
                for part in index["storage_data"].values()
            ]
        wrong = next((end for _, end in parts or () if not isinstance(end, int)), None)
    except Exception as error:  # a pickle can fail with nearly any
        raise DamagedError(f"{METADATA_NAME} cannot be read: {error}") from error
    if parts is None or wrong is not None:
        raise DamagedError(f"{METADATA_NAME} holds a {type(index).__name__}, not Metadata")
    for name, end in parts:
        if name not in files:
            raise DamagedError(f"{METADATA_NAME} names {name}, which was not saved")
        if end > files[name].size_bytes:
            raise DamagedError(
                f"{METADATA_NAME} names byte {end} of {name}, which has {files[name].size_bytes}"
            )


class _Some(dict[str, Any]):
    """Stands in for an object of torch: keeps its state, unread."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __hash__(self) -> int:  # type: ignore[override]  # a key of `storage_data`
        return id(self)

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.update(state)


class _Metadata(_Some):
    """Stands for DCP's Metadata."""


class _MemoryFormat(Enum):
    TORCH_CONTIGUOUS_FORMAT = 0
    TORCH_CHANNELS_LAST = 1
    TORCH_PRESERVE_FORMAT = 2


def _stand_in(module_name: str, global_name: str) -> Any:
    asked = (module_name, global_name)
    if asked == _MEMORY_FORMAT:
        return _MemoryFormat
    return _Metadata if asked == _METADATA else _PLAIN.get(asked, _Some)


def _no_place(module_name: str, global_name: str) -> pickle.UnpicklingError:
    return pickle.UnpicklingError(
        f"{module_name}.{global_name} has no place in a checkpoint's {METADATA_NAME}"
    )
