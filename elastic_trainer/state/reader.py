"""DCP's reader of one directory of ours: nothing is unpickled but what was digested."""

from __future__ import annotations

import hashlib
import importlib
import io
import mmap
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from elastic_trainer.state.errors import DamagedError
from elastic_trainer.state.index import IndexUnpickler
from elastic_trainer.state.manifest import METADATA_NAME, FileEntry


class CheckpointReader(FileSystemReader):
    """Reads one directory, whose `.metadata` has a known digest.

    The caller of `read_data` has had the digests of the data files checked. DCP reads those by
    `torch.load(weights_only=True)`, but would unpickle `.metadata` without any restriction.
    """

    def __init__(self, path: Path, metadata: FileEntry) -> None:
        super().__init__(path)
        self._expected = metadata
        self._mapped: tuple[IO[bytes], mmap.mmap] | None = None
        """The data file being read."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index of the data files.

        The digest is taken of the very bytes that are unpickled: another rank's view of a shared
        file system may differ.

        Raises:
            DamagedError: other bytes than were saved.
            pickle.UnpicklingError: it asks for a class that has no place there.
        """
        raw = Path(self.path, METADATA_NAME).read_bytes()
        if hashlib.sha256(raw).hexdigest() != self._expected.sha256:
            raise DamagedError(f"{METADATA_NAME} has another sha256 than the manifest says")
        metadata = read_index(raw)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> io.RawIOBase:
        if self._mapped is None or self._mapped[0] is not file:
            self._mapped = file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        whole = memoryview(self._mapped[1])
        return _MappedEntry(whole[sinfo.offset : sinfo.offset + sinfo.length])


class _MappedEntry(io.RawIOBase):
    """One entry of a mapped data file; DCP's own view makes a system call for each read."""

    def __init__(self, raw: memoryview) -> None:
        self._raw, self._at = raw, 0

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        part = self._raw[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._raw)}[whence]
        self._at = base + offset
        return self._at

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def read_index(raw: bytes) -> Metadata:
    """Read DCP's `.metadata`, whose digest is right.

    Raises:
        DamagedError: it holds something else.
        pickle.UnpicklingError: it asks for a class that has no place there.
    """
    metadata = IndexUnpickler(
        raw, lambda module, name: getattr(importlib.import_module(module), name)
    ).load()
    if not isinstance(metadata, Metadata):
        raise DamagedError(f"{METADATA_NAME} holds a {type(metadata).__name__}, not Metadata")
    return metadata
