"""One save to storage, in the thread of the save, together on all ranks.

The order makes it safe: data into a new directory, fsync, digests, manifest, fsync, and only then
the swap of the board. A death in between leaves a directory that does not count and that a later
save removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
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
from torch.distributed.checkpoint.storage import WriteResult

from elastic_trainer.board.state import Board, BoardBusyError, BoardState, Commit, Origin, update
from elastic_trainer.plan.config import CheckpointSection, StartFrom, TrainConfig
from elastic_trainer.plan.layout import ParallelLayout
from elastic_trainer.plan.models import ModelShape
from elastic_trainer.state.collective import Collective, StepFailedError, describe
from elastic_trainer.state.errors import SaveFailedError, UncertainError
from elastic_trainer.state.manifest import FileEntry, Manifest, with_commit
from elastic_trainer.state.state import NamedTensors
from elastic_trainer.state.storage import CheckpointStorage
from elastic_trainer.worker.torch_private import _StorageInfo, _StoragePrefix

WritePoint = Callable[[str], None]
"""Called at `made`, `data`, `written`, `manifest`, `committed`; tests kill or fail there."""

_WAYS_OUT = {
    "No space left": "free space there; the next save tries again",
    "unexpected pos": "a file could not be written whole: see that there is space; the next save "
    "tries again",
    "Disk quota": "free space there or raise the quota; the next save tries again",
    "Read-only": "mount it writable, or save and restart with another checkpoint.dir",
    "Permission denied": "grant the permission; the next save tries again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPolicy:
    """The job and epoch of a saved state."""

    run_id: str
    epoch: int
    """The board refuses commits of other epochs."""
    section: CheckpointSection
    ceiling_s: float
    """How long ranks wait for each other while a save is written."""
    layout: str = ""
    """For the manifest; any layout can read the checkpoint."""
    global_batch: int = 0
    """Samples a step; 0: not counted."""
    model: ModelShape | None = None
    start_from: StartFrom | None = None
    training: str = "1"
    """Name of the training within the run; the trainer has one."""
    number: int = 1
    """Number of that training among those of this process."""

    @classmethod
    def of(cls, config: TrainConfig, *, epoch: int, layout: ParallelLayout) -> CheckpointPolicy:
        """Take it from job.json."""
        return cls(
            run_id=config.run_id,
            epoch=epoch,
            section=config.checkpoint,
            ceiling_s=config.elastic.start_ceiling_s,
            layout=str(layout),
            global_batch=config.train.global_batch,
            model=config.model,
            start_from=config.start_from,
        )

    def manifest(self, step: int, world_size: int, files: dict[str, FileEntry]) -> Manifest:
        """Return the manifest of a save of `step` by so many ranks."""
        return Manifest(
            run_id=self.run_id,
            epoch=self.epoch,
            step=step,
            consumed_samples=step * self.global_batch,
            layout=self.layout,
            world_size=world_size,
            files=files,
            model=self.model,
        )


def how_to_fix(reason: str, root: Path) -> str:
    """Return `reason`, the directory concerned, and the way out."""
    advice = next((text for mark, text in _WAYS_OUT.items() if mark in reason), None)
    return f"{reason}. In {root}: {advice}" if advice else reason


class Writer(dcp.FileSystemWriter):
    """DCP's writer without the absolute path and with a write point between data and index."""

    def __init__(
        self, path: Path, at: WritePoint = lambda _: None, *, single_file_per_rank: bool = True
    ) -> None:
        super().__init__(path, single_file_per_rank=single_file_per_rank, overwrite=False)
        self._at = at

    def storage_meta(self) -> StorageMeta:
        """Return what `.metadata` says of the save: not where it is."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write the data files.

        Raises:
            OSError: what the disk said, which torch hides.
        """
        try:
            written = super().write_data(*args, **kwargs)
        except RuntimeError as error:
            # torch's archive only says where in its file it stood; the disk has said why.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        self._at("data")
        return written


def write_checkpoint(
    policy: CheckpointPolicy,
    step: int,
    staged: NamedTensors,
    *,
    origin: Origin | None,
    storage: CheckpointStorage,
    board: Board,
    group: Collective,
    at: WritePoint,
) -> Commit:
    """Write, digest and commit one checkpoint; collective.

    `origin`: where the epoch began; None before a restore.

    Raises:
        SaveFailedError: on every rank. The partial directory is removed, or left to the next save
            where its commit is uncertain.
        Exception: the group broke.
    """
    name = ""

    def make() -> str:
        made = storage.make(step, policy.epoch)
        at("made")
        return made

    def digest() -> dict[str, Any]:
        at("written")
        entries = storage.digest(name, group.rank)
        return {file: dataclasses.asdict(entry) for file, entry in entries.items()}

    def commit() -> dict[str, Any]:
        """Write the manifest, swap the board, then remove what no longer counts."""
        files = {file: FileEntry(**entry) for part in digests for file, entry in part.items()}
        sha256 = storage.write_manifest(name, policy.manifest(step, group.world_size, files))
        at("manifest")
        made = Commit(
            epoch=policy.epoch,
            step=step,
            dir=name,
            manifest_sha256=sha256,
            t_unix=round(time.time(), 3),
        )
        state = _swap(board, made, policy.section.keep, origin)
        at("committed")
        with contextlib.suppress(OSError):  # housekeeping; the next commit tries again
            storage.retire(
                state.kept, epoch=policy.epoch, keep_every_steps=policy.section.keep_every_steps
            )
        return dataclasses.asdict(made)

    try:
        name = group.by_first(make)
        _write_data(staged, Writer(storage.root / name, at), group)
        digests = group.gather(digest)
        return Commit(**group.by_first(commit))
    except StepFailedError as error:
        reason = describe(error)
        if group.rank == 0 and name and not isinstance(error.__cause__, UncertainError):
            try:
                storage.remove(name)
            except OSError as again:
                reason += f" (its directory {name} stays for now: {again.strerror})"
        raise SaveFailedError(how_to_fix(reason, storage.root)) from error


def _write_data(staged: NamedTensors, writer: Writer, group: Collective) -> None:
    """Write the data files and their index, as `dcp.save` does on a group of all ranks; collective.

    Raises:
        StepFailedError: on every rank, when it failed on any.
    """
    planner, is_first = DefaultSavePlanner(), group.rank == 0
    local: list[SavePlan] = []
    index: list[Metadata] = []

    def propose() -> list[Any]:
        planner.set_up_planner(dict(staged), writer.storage_meta(), is_first)
        writer.set_up_storage_writer(is_first)
        local.append(writer.prepare_local_plan(planner.create_local_plan()))
        return [_item_row(item) for item in local[0].items]

    def divide() -> list[list[int | None]]:
        """Return for each rank's items their place among the tensor's parts; None: not written."""
        plans = [_plan(rows) for rows in proposed]
        chosen, metadata = planner.create_global_plan(plans)
        index.append(metadata)
        places = [{_key(item.index): item.index.index for item in plan.items} for plan in chosen]
        return [
            [place.get(_key(item.index)) for item in plan.items]
            for plan, place in zip(plans, places, strict=True)
        ]

    def write(places: list[int | None]) -> list[Any]:
        items = [
            dataclasses.replace(item, index=dataclasses.replace(item.index, index=place))
            for item, place in zip(local[0].items, places, strict=True)
            if place is not None
        ]
        prefix = _StoragePrefix(f"__{group.rank}_")
        plan = dataclasses.replace(local[0], items=items, storage_data=prefix)
        results = writer.write_data(planner.finish_plan(plan), planner)
        results.wait()
        return [_result_row(result) for result in results.value()]

    proposed = group.gather(propose)
    places = group.scatter(divide)
    written = group.gather(lambda: write(places))
    group.by_first(
        lambda: writer.finish(index[0], [[_result(row) for row in rows] for rows in written])
    )


def _key(index: MetadataIndex) -> tuple[str, tuple[int, ...]]:
    return index.fqn, tuple(index.offset)


def _item_row(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    assert data is not None, f"{item.index.fqn} is not a tensor"
    properties = data.properties
    return [
        item.index.fqn,
        item.type.name,
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        list(data.size),
        str(properties.dtype).removeprefix("torch."),
        properties.requires_grad,
        properties.pin_memory,
    ]


def _plan(rows: Sequence[list[Any]]) -> SavePlan:
    items = []
    for name, kind, offsets, sizes, size, dtype, requires_grad, pin_memory in rows:
        place = torch.Size(offsets)
        items.append(
            WriteItem(
                MetadataIndex(name, place),
                WriteItemType[kind],
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(place, torch.Size(sizes)),
                    properties=TensorProperties(
                        dtype=getattr(torch, dtype),
                        requires_grad=requires_grad,
                        pin_memory=pin_memory,
                    ),
                    size=torch.Size(size),
                ),
            )
        )
    # NamedTensors: a section and a name, which DCP joins with a dot.
    return SavePlan(items, planner_data={row[0]: tuple(row[0].split(".", 1)) for row in rows})


def _result_row(result: WriteResult) -> list[Any]:
    index, info = result.index, result.storage_data
    where = [info.relative_path, info.offset, info.length]
    return [index.fqn, list(index.offset), index.index, result.size_in_bytes, where]


def _result(row: list[Any]) -> WriteResult:
    name, offset, place, size_in_bytes, where = row
    index = MetadataIndex(name, torch.Size(offset), place)
    return WriteResult(index, size_in_bytes, _StorageInfo(*where))


def _swap(board: Board, commit: Commit, keep: int, origin: Origin | None) -> BoardState:
    """Put `commit` on the board and return the board's state.

    Raises:
        FencedError: the board is at another epoch.
        SaveFailedError: the commit was refused.
        UncertainError: nobody can tell; the next commit or restore will.
    """
    try:
        state = update(board, partial(with_commit, commit=commit, keep=keep, origin=origin))
    except BoardBusyError as error:
        raise SaveFailedError(str(error)) from error
    except OSError as error:
        with contextlib.suppress(OSError):
            current = board.get_state()
            if current and commit in (state := BoardState.decode(current[0])).commits:
                return state
        raise UncertainError(f"the board cannot be reached: {describe(error)}") from error
    assert state is not None
    return state
