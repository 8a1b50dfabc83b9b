"""DCP's reader of one directory of ours: nothing is unpickled or loaded but what was digested."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from elastic_trainer.checkpoint.archive import UnusualError
from elastic_trainer.checkpoint.errors import DamagedError
from elastic_trainer.checkpoint.manifest import METADATA_NAME, FileEntry
from elastic_trainer.checkpoint.raw_read import RawFile
from elastic_trainer.checkpoint.restricted import read_index


class CheckpointReader(FileSystemReader):  # type: ignore[misc]  # torch is not followed by mypy
    """DCP's reader of one directory, for a `.metadata` with a known digest.

    Whoever calls `read_data` has had the digests of the data files checked.
    """

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
        metadata = read_index(raw)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for: plain tensors straight from the files, the rest by torch.

        Raises:
            DamagedError: a file has become shorter.
        """
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        rest: list[ReadItem] = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            packed = item.type == LoadItemType.BYTE_IO or info.transform_descriptors
            (rest if packed else by_file[info.relative_path]).append(item)
        for relative_path, items in by_file.items():
            with RawFile(Path(self.path, relative_path)) as file:
                for item in items:
                    info = self.storage_data[item.storage_index]
                    target = planner.resolve_tensor(item).detach()
                    try:
                        file.fill(target, item, info.offset, info.length)
                    except UnusualError:
                        rest.append(item)
                        continue
                    planner.commit_tensor(item, target)
        if rest:
            return super().read_data(dataclasses.replace(plan, items=rest), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _slice_file(self, file: IO[bytes], sinfo: Any) -> IO[bytes]:
        """Return one entry's bytes; torch.load is several times faster on them than on a view."""
        file.seek(sinfo.offset)
        return io.BytesIO(file.read(sinfo.length))
